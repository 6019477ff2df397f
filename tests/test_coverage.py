"""The tool that examines architectures: its verdicts, and those on every architecture."""

import json
import os
import time
from functools import partial

import pytest
import transformers
from safetensors.torch import load_file, save_file
from tools.coverage import architectures, comparison, heads, tiny
from tools.coverage.kinds import KINDS, select
from tools.coverage.layers import fewer_layers
from tools.coverage.processes import Task, run
from tools.coverage.report import update_page
from tools.coverage.shrinking import tiny_config
from tools.coverage.verdicts import (
    FAULTS,
    NotBuildableError,
    RefusedError,
    Result,
    UnequalError,
    Verdict,
    judge,
)
from transformers.models.auto import modeling_auto

LLAMA, RWKV = (
    next(each for each in architectures.causal() if each.name == name) for name in ("llama", "rwkv")
)


def raises(error):
    raise error


def test_verdict_on_an_error():
    for error, verdict, reason in [
        (RefusedError("too\nold"), Verdict.REFUSED, "too old"),
        (NotBuildableError("no timm"), Verdict.NOT_BUILDABLE, "no timm"),
        (UnequalError("token 3"), Verdict.UNEQUAL, "token 3"),
        (KeyError("x"), Verdict.CRASHED, "KeyError: 'x'"),
    ]:
        result = judge("causal", "llama", lambda error=error: raises(error))
        assert (result.verdict, result.reason) == (verdict, reason), error
        assert "Traceback" in result.details, error


def test_verdict_on_a_remark():
    result = judge("causal", "llama", lambda: "no token trees")
    assert (result.verdict, result.reason) == (Verdict.EQUAL, "no token trees")


def test_every_architecture_is_examined():
    names = [task.name for task in select(["causal"])]
    assert names == list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    others = {task.name for task in select(["image-text"])}
    for name in set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(names):
        assert name in others
    with pytest.raises(ValueError, match="nothing is called lama"):
        select(list(KINDS), ["llama", "lama"])


def test_a_few_layers_are_of_every_kind():
    config = transformers.Gemma3TextConfig()
    small = fewer_layers(config, ["num_hidden_layers", "layer_types"])
    assert small == {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    dense_first = transformers.Glm4MoeConfig(first_k_dense_replace=3)
    small = fewer_layers(dense_first, ["num_hidden_layers", "first_k_dense_replace"])
    assert small == {"num_hidden_layers": 2, "first_k_dense_replace": 1}


def test_parts_of_a_configuration_are_small():
    config = tiny_config(transformers.LlavaConfig)
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    assert config.image_token_id >= config.text_config.vocab_size


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.build(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.mark.slow
def test_equal(llama):
    assert judge("causal", "llama", lambda: comparison.compare(llama)).verdict is Verdict.EQUAL


@pytest.mark.slow
def test_refused(tmp_path):
    result = judge("causal", "rwkv", lambda: comparison.examine(RWKV, tmp_path))
    assert result.verdict is Verdict.REFUSED
    assert result.reason.startswith("target: rwkv ")
    assert str(tmp_path) not in result.reason


@pytest.mark.slow
def test_unequal(llama, tmp_path):
    """One weight is another one than in the reference."""
    for file in llama.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][0, 0] += 0.5
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    sabotaged = tiny.TinyModel(tmp_path, llama.draft, llama.reference)
    result = judge("causal", "llama", lambda: comparison.compare(sabotaged))
    assert result.verdict is Verdict.UNEQUAL
    assert "log-probability" in result.reason


def test_crashed(llama, monkeypatch):
    monkeypatch.setattr(comparison, "LLM", lambda *_, **__: raises(RuntimeError("no memory")))
    result = judge("causal", "llama", lambda: comparison.compare(llama))
    assert (result.verdict, result.reason) == (Verdict.CRASHED, "RuntimeError: no memory")


def ends(_):
    os._exit(3)


def waits(_):
    time.sleep(100)


def passes(_):
    return "nothing"


@pytest.mark.slow
def test_processes_that_end_or_take_too_long():
    results = {
        each.name: each
        for each in run([Task("test", "a", ends), Task("test", "b", passes)], 2, 100.0)
    }
    assert results["a"].verdict is Verdict.CRASHED
    assert results["a"].reason == "the process ended with status 3"
    assert results["b"] == Result("test", "b", Verdict.EQUAL, "nothing")
    (result,) = run([Task("test", "c", waits)], 1, 0.5)
    assert result.verdict is Verdict.CRASHED
    assert result.reason == "it takes more than 0.5 seconds"


def test_page(tmp_path):
    page = tmp_path / "models.md"
    page.write_text("a\n<!-- coverage: begin -->\nold\n<!-- coverage: end -->\nb\n")
    results = [
        Result("causal", "b", Verdict.REFUSED, "a|b"),
        Result("causal", "c", Verdict.EQUAL),
        Result("causal", "a", Verdict.REFUSED, "<x>"),
    ]
    update_page(results, page)
    text = page.read_text()
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")
    assert "old" not in text
    assert transformers.__version__ in text
    assert "3: 1 equal, 2 refused." in text
    assert "| `c` | equal |  |\n| `a` | refused | \\<x\\> |\n| `b` | refused | a\\|b |" in text
    update_page(results, page)
    assert page.read_text() == text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no section"):
        update_page(results, page)


@pytest.mark.slow
@pytest.mark.parametrize("layout", heads.LAYOUTS)
def test_heads(layout, tmp_path):
    result = judge("heads", layout, partial(heads.examine, layout, tmp_path))
    assert result.verdict is Verdict.EQUAL, result.details


@pytest.mark.exhaustive
def test_everything():
    results = list(run(select(list(KINDS)), os.cpu_count() or 2, 300.0))
    faults = [each for each in results if each.verdict in FAULTS]
    assert not faults, json.dumps([(each.name, each.details) for each in faults], indent=1)
    equal = [each.kind for each in results if each.verdict is Verdict.EQUAL]
    assert equal.count("causal") >= 120
    assert equal.count("image-text") >= 40
    assert equal.count("formats") >= 35
    assert equal.count("heads") == len(heads.LAYOUTS)
