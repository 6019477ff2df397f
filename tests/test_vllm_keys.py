"""Speculation settings with the keys and methods of vLLM's ``--speculative-config``."""

import pytest

from draftwise import SpeculationConfig
from draftwise.errors import InvalidParameterError

from .refusals import error_of


def config(**values):
    return SpeculationConfig.from_dict(values)


def test_methods_of_heads():
    for method in ["eagle", "eagle3", "dflash", "dspark"]:
        expected = SpeculationConfig("folder", num_speculative_tokens=3, method=method)
        assert config(method=method, model="folder", num_speculative_tokens=3) == expected
        assert config(method=method, draft=["suffix", "folder"]).method == method


def test_methods_that_need_a_model():
    for method in ["draft_model", "eagle", "eagle3"]:
        caught = error_of(
            config, method=method, num_speculative_tokens=3, error=InvalidParameterError
        )
        assert caught.field == "speculation.model"
        assert f"the method {method!r} needs the folder" in caught.message


def test_a_head_cannot_be_a_draft_without_a_model():
    with pytest.raises(InvalidParameterError, match="draft: must name a head"):
        config(method="eagle3", draft="suffix")
    with pytest.raises(InvalidParameterError, match="draft: must name a head"):
        SpeculationConfig(method="eagle")


def test_methods_of_the_targets_own_layers():
    """They are refused when the target is known."""
    for method in ["mtp", "deepseek_mtp", "qwen3_next_mtp", "glm5_next_mtp"]:
        assert config(method=method, num_speculative_tokens=2).draft == "mtp"
        named = config(method=method, model="folder")
        assert (named.draft, named.method) == ("folder", "mtp")


OTHER_METHODS = [
    ("medusa", r"\(Medusa\) are not run by Draftwise yet; use 'suffix', 'draft_model' or"),
    ("mlp_speculator", "MLP speculator"),
    ("ngram_gpu", "use 'ngram'"),
    ("custom_class", "register a proposer"),
    ("extract_hidden_states", "leave it out"),
    ("magic", "must be one of 'draft_model', 'eagle', 'eagle3', 'dflash', 'dspark'"),
    (5, "got 5"),
    (["eagle"], r"got \['eagle'\]"),
]


def test_other_methods():
    for method, remedy in OTHER_METHODS:
        caught = error_of(
            config, method=method, model="folder", error=InvalidParameterError, match=remedy
        )
        assert caught.field == "speculation.method"


def test_values_that_say_what_is_done():
    for values, expected in [
        ({"draft_tensor_parallel_size": 1}, {}),
        ({"quantization": None, "revision": None, "max_model_len": None}, {}),
        ({"rejection_sample_method": "standard"}, {"verification": "token"}),
        ({"rejection_sample_method": "probabilistic"}, {"verification": "token"}),
        ({"rejection_sample_method": "block"}, {"verification": "block"}),
        ({"rejection_sample_method": "block", "verification": "block"}, {}),
        ({"rejection_sample_method": None}, {}),
        ({"draft_sample_method": "probabilistic"}, {"proposals": "sampled"}),
        ({"draft_sample_method": "greedy"}, {"proposals": "one-hot"}),
        ({"use_heterogeneous_vocab": True, "parallel_drafting": False}, {}),
        ({"enforce_eager": False, "method": None}, {}),
    ]:
        assert config(model="folder", **values) == SpeculationConfig("folder", **expected)


def test_the_texts_that_ngram_looks_up():
    assert config(method="ngram", prompt_lookup_max=3, prompt_lookup_min=1).draft == "ngram"


OTHER_KEYS = [
    ("draft_tensor_parallel_size", 2, "a draft runs on one device"),
    ("draft_tensor_parallel_size", True, "a draft runs on one device"),
    ("tensor_parallel_size", 4, "a draft runs on one device"),
    ("quantization", "fp8", "append ':int8' or ':int4' to the draft's name"),
    ("max_model_len", 2048, "up to the target's context"),
    ("revision", "main", "download this version"),
    ("prompt_lookup_max", 4, "use the method 'suffix'"),
    ("prompt_lookup_min", 2, "looks up the last 3, 2 and 1 tokens"),
    ("suffix_decoding_max_tree_depth", 24, "'num_speculative_tokens'"),
    ("suffix_decoding_max_cached_requests", 10000, "'remember_outputs'"),
    ("suffix_decoding_min_token_prob", 0.1, "estimated acceptance"),
    ("rejection_sample_method", "synthetic", "must be 'standard' or 'probabilistic' or 'block'"),
    ("rejection_sample_method", ["block"], "must be 'standard' or 'probabilistic' or 'block'"),
    ("synthetic_acceptance_length", 2.0, "at random"),
    ("posterior_threshold", 0.1, "'lenience'"),
    ("use_heterogeneous_vocab", False, "is translated in any case"),
    ("parallel_drafting", True, "P-EAGLE"),
    ("speculative_token_tree", "[(0,)]", "'tree_width'"),
    ("disable_by_batch_size", 16, "'adaptive'"),
    ("num_speculative_tokens_per_batch_size", [[1, 8, 3]], "'adaptive'"),
    ("enable_adaptive_verification", True, "'adaptive'"),
    ("kv_cache_dtype", "fp8", "setting of vLLM's engine"),
    ("draft_load_config", {"load_format": "dummy"}, "setting of vLLM's engine"),
]


def test_other_keys_are_refused_with_the_remedy():
    for key, value, remedy in OTHER_KEYS:
        caught = error_of(config, model="folder", **{key: value}, error=InvalidParameterError)
        assert caught.field == f"speculation.{key}"
        assert remedy in caught.message


def test_two_names_of_the_verification():
    with pytest.raises(InvalidParameterError, match="'standard' is 'verification' 'token'") as info:
        config(model="folder", rejection_sample_method="standard", verification="block")
    assert info.value.field == "speculation.rejection_sample_method"


def test_two_names_of_the_proposals():
    for value, message in [("greedy", "'greedy' is 'proposals' 'one-hot'"), (1, "got 1")]:
        caught = error_of(
            config,
            model="folder",
            draft_sample_method=value,
            proposals="sampled",
            error=InvalidParameterError,
            match=message,
        )
        assert caught.field == "speculation.draft_sample_method"
