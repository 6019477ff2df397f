"""Models that ``draftwise benchmark`` gives to other engines."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from draftwise import devices
from draftwise.benchmark.peers import peers
from draftwise.cli.benchmark_setup import peer_models
from draftwise.cli.defaults import ChosenModels
from draftwise.errors import InvalidParameterError

from ..engine.exits import AdapterRecipe
from ..tiny_eagle_heads import EagleRecipe
from ..tiny_heads import HeadRecipe


@dataclass
class Loaded:
    """A loaded target."""

    model = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu"))
    max_model_len = 128
    eos_token_ids = frozenset({4, 3})


def made(draft, companion=None, dtype="bfloat16"):
    models = ChosenModels("org/target", draft, companion, (), False)
    return peer_models(models, SimpleNamespace(target=Loaded()), dtype, 2, 8)


@pytest.fixture(params=["name", "folder"])
def exit_name(request, tmp_path):
    if request.param == "name":
        return "target:exit=2"
    return AdapterRecipe().save(tmp_path / "exit")


def test_models_are_handed_on():
    given = made("suffix,org/draft", "org/companion")
    assert (given.target, given.draft, given.companion) == (
        "org/target",
        "org/draft",
        "org/companion",
    )
    assert (given.dtype, given.max_model_len, given.stop_token_ids) == ("bfloat16", 128, (3, 4))


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_other_engines_do_not_emulate_bfloat16(monkeypatch, is_fast, dtype):
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: is_fast)
    assert made("org/draft", dtype="auto").dtype == dtype
    assert made("org/draft", dtype="bfloat16").dtype == "bfloat16"


def test_other_engines_get_no_exit(exit_name):
    assert made(exit_name).draft is None
    assert made(f"suffix,{exit_name}").draft is None
    given = made("org/draft", exit_name)
    assert (given.draft, given.companion) == ("org/draft", None)


def test_a_head_is_not_a_draft_model(tmp_path):
    head = HeadRecipe().save(tmp_path / "head")
    for given in (made(head), made(f"suffix,{head}")):
        assert (given.draft, given.head) == (None, head)
    assert made("org/draft").head is None
    older = EagleRecipe().save(tmp_path / "older")
    assert (made(older).draft, made(older).head) == (None, None)


def test_an_engine_that_needs_a_draft_model_is_refused(exit_name, tmp_path):
    with pytest.raises(InvalidParameterError, match="a draft model that other engines") as caught:
        peers(["vllm-draftwise"], made(exit_name), tmp_path)
    assert caught.value.field == "peers"
    assert [peer.name for peer in peers(["vllm"], made(exit_name), tmp_path)] == ["vllm"]
