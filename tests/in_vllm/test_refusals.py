"""Unsupported settings are refused at the server's start, with an error that names them."""

import types

import pytest

from draftwise.checkpoints.fingerprint import checkpoint_fingerprint
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile

from ..tiny_models import ModelShelf, Recipe
from .conftest import EngineError, answer, steered

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODEL = Recipe(vocab=8, config=SIZES)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return ModelShelf(tmp_path_factory.mktemp("models"))


def refused(shelf, settings, **speculative):
    """What the server says at its start."""
    engine = {
        "model": shelf.folder(MODEL),
        "dtype": "float32",
        "max_model_len": 32,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 1 << 28,
    }
    draft = shelf.folder(MODEL.draft())
    with pytest.raises(EngineError) as caught:
        answer(steered(engine, draft, settings, 2, **speculative), [[1, 2]], {"max_tokens": 1})
    return str(caught.value)


def test_an_unknown_key_is_refused(shelf):
    said = refused(shelf, {"companon": "x"})
    assert "draftwise.companon: unknown key; did you mean 'companion'?" in said


@pytest.mark.exhaustive
def test_a_biased_rule_is_refused_with_sampled_drafts(shelf):
    said = refused(shelf, {"policy": "sv"}, draft_sample_method="probabilistic")
    assert "greedy drafts only" in said


@pytest.mark.exhaustive
def test_a_companion_that_does_not_exist_is_refused(shelf):
    assert "draftwise.companion" in refused(shelf, {"companion": "/nowhere/model"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", ["target", "companion"])
def test_a_profile_of_other_models_is_refused(shelf, tmp_path, other):
    path = tmp_path / "p.safetensors"
    made_for = {
        "target": checkpoint_fingerprint(shelf.folder(MODEL)),
        "draft": checkpoint_fingerprint(shelf.folder(MODEL.draft())),
        "companion": checkpoint_fingerprint(shelf.folder(MODEL.draft(0.2))),
    }
    AcceptanceProfile({**made_for, other: "another"}).save(path)
    settings = {"profile": str(path), "companion": shelf.folder(MODEL.draft(0.2))}
    said = refused(shelf, settings)
    assert f"profile: was made for another {other}" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model",
    [Recipe(vocab=8, config={**SIZES, "hidden_size": 16}), Recipe(vocab=9, config=SIZES)],
    ids=["heads that vLLM does not support", "another vocabulary"],
)
def test_a_companion_that_vllm_cannot_run_is_refused(shelf, model):
    said = refused(shelf, {"companion": shelf.folder(model)})
    assert ("head" if model.vocab == 8 else "draftwise.companion") in said.lower()


@pytest.mark.parametrize(
    ("part", "key", "value", "named"),
    [
        ("speculative_config", "method", "eagle", "speculative_config.method"),
        ("speculative_config", "method", "suffix", "speculative_config.method"),
        ("speculative_config", "use_heterogeneous_vocab", True, "use_heterogeneous_vocab"),
        ("speculative_config", "use_local_argmax_reduction", True, "use_local_argmax_reduction"),
        # vLLM itself needs a GPU for this one.
        ("speculative_config", "enable_adaptive_verification", True, "adaptive_verification"),
        ("speculative_config", "disable_padded_drafter_batch", True, "disable_padded"),
        ("speculative_config", "parallel_drafting", True, "parallel_drafting"),
        ("speculative_config", "rejection_sample_method", "synthetic", "rejection_sample_method"),
        ("scheduler_config", "async_scheduling", True, "async_scheduling"),
        ("parallel_config", "data_parallel_size", 2, "data_parallel_size"),
    ],
)
def test_unsupported_settings_of_vllm_are_refused(part, key, value, named):
    from draftwise.integrations.vllm.worker import check_config

    parts = {
        "speculative_config": {
            "method": "draft_model",
            "use_heterogeneous_vocab": False,
            "use_local_argmax_reduction": False,
            "enable_adaptive_verification": False,
            "disable_padded_drafter_batch": False,
            "parallel_drafting": False,
            "rejection_sample_method": "standard",
        },
        "scheduler_config": {"async_scheduling": False},
        "parallel_config": {"data_parallel_size": 1},
    }

    def config():
        of_parts = {name: types.SimpleNamespace(**values) for name, values in parts.items()}
        return types.SimpleNamespace(**of_parts)

    for method in ("ngram", "draft_model"):
        parts["speculative_config"]["method"] = method
        check_config(config())
    parts[part][key] = value
    with pytest.raises(InvalidParameterError, match=named):
        check_config(config())
