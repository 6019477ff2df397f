"""Exits with an adapter: folders, logits, and what verification continues from."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from draftwise import LLM
from draftwise.errors import DraftwiseError, UnsupportedModelError
from draftwise.kernels.native import library
from draftwise.kernels.native.library import kernel_in_use
from draftwise.policies.step_times import SCORED

from ..stand_ins import unguarded, vary_choices
from ..tiny_models import Recipe
from .assembly import generate, sampled, token_ids
from .exits import (
    DEEPER,
    TARGET,
    AdapterRecipe,
    assert_drafts_of_exit,
    engine_with_exit,
    exit_logits,
)
from .heads import recorded_drafts
from .target_readers import PROMPTS

ADAPTER = AdapterRecipe()


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("target", "adapter"),
    [
        (TARGET, AdapterRecipe(exit=1, rank=40)),
        (Recipe("gpt2", vocab=12, seed=2, config={"num_hidden_layers": 4}), ADAPTER),
    ],
    ids=str,
)
def test_drafts_and_texts(models, tmp_path, target, adapter, monkeypatch):
    """Drafts follow the adapter, and greedy texts stay the target's."""
    folder = adapter.save(tmp_path / "exit")
    greedy = sampled(4, temperature=0.0)
    expected = token_ids(generate(engine_with_exit(models, target, policy="none"), PROMPTS, greedy))
    vary_choices(monkeypatch, [3, SCORED + 3, SCORED + 2], [0.3, 0.1])
    for policy in ("fixed", "sv"):
        engine = engine_with_exit(models, target, folder, DEEPER, policy=policy)
        assert token_ids(generate(engine, PROMPTS, greedy)) == expected
        drafts = recorded_drafts(engine)
        generate(engine, PROMPTS, sampled(4))
        assert_drafts_of_exit(models, drafts, target, adapter.exit, adapter)


@pytest.mark.usefixtures("kernels")
def test_a_companion_with_an_adapter(models, tmp_path):
    folder = AdapterRecipe(exit=3).save(tmp_path / "exit")
    greedy = sampled(4, temperature=0.0)
    expected = token_ids(generate(engine_with_exit(models, policy="none"), PROMPTS, greedy))
    engine = engine_with_exit(models, companion=folder, policy="staged")
    assert token_ids(generate(engine, PROMPTS, greedy)) == expected
    reference, score, compared = models.reference(TARGET), engine._pipeline.score, []

    def checked(batch, draft):
        scores = score(batch, draft)
        for index, request in enumerate(batch.generating):
            length = draft.lengths[index]
            if scores is not None and length:
                text = [*request.tokens, *draft.host_tokens[index][: length - 1]]
                logits = exit_logits(reference, 3, text, AdapterRecipe(exit=3))[-length:]
                c = logits.softmax(dim=-1)
                torch.testing.assert_close(scores.probs[index, :length], c, atol=1e-4, rtol=1e-3)
                compared.append(length)
        return scores

    engine._pipeline.score = checked
    generate(engine, PROMPTS, sampled(4))
    assert len(compared) > 10


def damaged(folder, what):
    """Damage a folder."""
    config = json.loads((folder / "config.json").read_text())
    if what == "no weights":
        (folder / "model.safetensors").unlink()
    elif what == "garbage":
        (folder / "model.safetensors").write_bytes(b"nothing")
    elif what == "missing tensor":
        tensors = ADAPTER.tensors()
        del tensors["up.weight"]
        save_file(tensors, folder / "model.safetensors")
    elif what == "unknown tensor":
        tensors = {**ADAPTER.tensors(), "bias": torch.zeros(2)}
        save_file(tensors, folder / "model.safetensors")
    else:
        config |= what
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no weights", "has no model.safetensors"),
        ("garbage", "is damaged"),
        ("missing tensor", r"tensor 'up.weight' of the exit must be \[16, 5\], and is absent"),
        ("unknown tensor", "tensor 'bias' of the exit must be absent"),
        ({"adapter_rank": 6}, r"must be \[6, 16\], and is \[5, 16\]"),
        ({"exit": 4}, "before its last layer"),
        ({"exit": 0}, "exit in the config.json of the exit must be a positive finite number"),
        ({"exit": "two"}, "must be a positive finite number, got 'two'"),
        ({"hidden_size": None}, "must be a positive finite number, got None"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps in .* positive finite number, got inf"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps in .* positive finite number, got nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps in .* positive finite number, got -1e-06"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps in .* positive finite number, got 1000"),
        ({"num_hidden_layers": 7}, "was made for a target of 7 layers of size 16"),
    ],
    ids=str,
)
def test_damaged_folders_are_refused(models, tmp_path, what, message):
    name = ADAPTER.save(tmp_path / "exit")
    damaged(tmp_path / "exit", what)
    with pytest.raises(DraftwiseError, match=message) as caught:
        LLM(models.folder(TARGET), unguarded(name, policy="fixed"), dtype="float32")
    assert caught.value.field == "draft"


@pytest.mark.skipif(kernel_in_use() != "native", reason="no native kernels on this machine")
def test_another_epsilon_than_the_target_s_is_refused_by_the_kernels(models, tmp_path):
    name = AdapterRecipe(epsilon=1e-3).save(tmp_path / "exit")
    with pytest.raises(UnsupportedModelError, match="the target's rms_norm_eps"):
        LLM(models.folder(TARGET), unguarded(name, policy="fixed"), dtype="float32")


def test_adapters_with_other_epsilons_have_other_fingerprints(models, tmp_path, monkeypatch):
    """Profiles of the acceptance of one are not those of another."""
    monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    llm, found = LLM(models.folder(TARGET), dtype="float32"), set()
    for at, epsilon in enumerate((1e-6, 1e-3, 1e-6)):
        name = AdapterRecipe(epsilon=epsilon).save(tmp_path / str(at))
        found.add(llm.load_models(unguarded(name, policy="fixed")).draft.fingerprint)
    assert len(found) == 2


def test_an_exit_is_no_target(tmp_path):
    with pytest.raises(UnsupportedModelError, match="is an exit of a target"):
        LLM(ADAPTER.save(tmp_path / "exit"), dtype="float32")
