"""The keys and methods of vLLM's ``--speculative-config`` in Draftwise's terms.

The source is ``vllm/config/speculative.py``, with the keys of earlier versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.core.formats import HEAD_METHODS, MODEL_FREE_DRAFTS, MTP_METHOD, is_mtp
from draftwise.errors import InvalidParameterError
from draftwise.values import shown

_WHERE = "speculation"
_MODEL_METHODS = ("draft_model", *HEAD_METHODS)
# Methods that are not run, and what to do instead.
_NO_METHODS = {
    **{
        name: f"drafts of this kind ({kind}) are not run by Draftwise yet; use 'suffix', "
        "'draft_model' or 'eagle3'"
        for name, kind in (
            ("hydra", "Hydra"),
            ("medusa", "Medusa"),
            ("mlp_speculator", "MLP speculator"),
        )
    },
    "ngram_gpu": "use 'ngram', which drafts the same on the host",
    "custom_class": "register a proposer instead, and name it as 'draft'",
    "extract_hidden_states": "drafts nothing; leave it out",
}
# How vLLM verifies drafts, and the name of the same here.
_VERIFICATION = {"standard": "token", "probabilistic": "token", "block": "block"}
_ON_ONE_DEVICE = "a draft runs on one device; leave it out, or set 1"
_ON_POLICIES = "policies fit drafts to the batch and its load; set 'policy', such as 'adaptive'"
_OF_SUFFIX = "the policy decides by the estimated acceptance; leave it out"
_OF_NGRAM = (
    "'ngram' looks up the last 3, 2 and 1 tokens; leave it out, or use the method 'suffix', which "
    "compares up to 32"
)
_NOT_LOSSLESS = "changes the output; leave it out, or set 'lenience'"
_AT_RANDOM = "accepts tokens at random, which changes the output; leave it out"
_OF_ITS_ENGINE = "is a setting of vLLM's engine without a counterpart; leave it out"
_OTHER_VERSION = "download this version of the draft, and name its folder"
# What vLLM proposes, and the name of the same here.
_PROPOSALS = {"greedy": "one-hot", "probabilistic": "sampled"}
# (accepted values, what to do instead of others). Accepted values say what Draftwise does anyway.
_KEYS: dict[str, tuple[tuple[object, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), _ON_ONE_DEVICE),
    "tensor_parallel_size": ((1,), _ON_ONE_DEVICE),
    "quantization": ((), "append ':int8' or ':int4' to the draft's name instead"),
    "max_model_len": ((), "a draft is used up to the target's context; leave it out"),
    "revision": ((), _OTHER_VERSION),
    "code_revision": ((), _OTHER_VERSION),
    "prompt_lookup_max": ((3,), _OF_NGRAM),
    "prompt_lookup_min": ((1,), _OF_NGRAM),
    "suffix_decoding_max_tree_depth": (
        (),
        "'suffix' compares up to 32 tokens; leave it out, and limit drafts by "
        "'num_speculative_tokens'",
    ),
    "suffix_decoding_max_cached_requests": (
        (),
        "set 'remember_outputs' to continue earlier outputs, and 'corpus_tokens' to limit them",
    ),
    "suffix_decoding_max_spec_factor": ((), _OF_SUFFIX),
    "suffix_decoding_min_token_prob": ((), _OF_SUFFIX),
    "use_heterogeneous_vocab": (
        (True,),
        "a draft with another vocabulary is translated in any case; leave it out",
    ),
    "parallel_drafting": (
        (False,),
        "heads of P-EAGLE are recognised by their files, and draft models of PARD are not run by "
        "Draftwise yet; leave it out",
    ),
    "speculative_token_tree": ((), "set 'tree_width' for token trees"),
    "num_speculative_tokens_per_batch_size": ((), _ON_POLICIES),
    "disable_by_batch_size": ((), _ON_POLICIES),
    "speculative_disable_by_batch_size": ((), _ON_POLICIES),
    "enable_adaptive_verification": ((False,), _ON_POLICIES),
    "synthetic_acceptance_rate": ((), _AT_RANDOM),
    "synthetic_acceptance_rates": ((), _AT_RANDOM),
    "synthetic_acceptance_length": ((), _AT_RANDOM),
    "acceptance_method": (("rejection_sampler",), _NOT_LOSSLESS),
    "posterior_threshold": ((), _NOT_LOSSLESS),
    "posterior_alpha": ((), _NOT_LOSSLESS),
    **dict.fromkeys(
        (
            "attention_backend",
            "disable_eagle_block_drop",
            "disable_log_stats",
            "disable_logprobs",
            "disable_mqa_scorer",
            "disable_padded_drafter_batch",
            "draft_load_config",
            "dspark_draft_topk",
            "enforce_eager",
            "index_share_for_mtp_iteration",
            "kv_cache_dtype",
            "moe_backend",
            "use_local_argmax_reduction",
        ),
        ((False,), _OF_ITS_ENGINE),
    ),
}


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate settings with vLLM's keys to those of ``SpeculationConfig``.

    Keys of ``SpeculationConfig`` and unknown keys are kept as they are. In vLLM's keys, ``None``
    stands for a key that is left out.

    Raises:
        InvalidParameterError: a method or a value is not supported. The error names the key and the
            remedy.
    """
    values = dict(given)
    if "model" in values and "draft" in values:
        raise InvalidParameterError(
            f"{_WHERE}.model", "is an alias of 'draft'; give only one of them"
        )
    if "model" in values:
        values["draft"] = values.pop("model")
    _translate_method(values)
    for key, own, names in (
        ("rejection_sample_method", "verification", _VERIFICATION),
        ("draft_sample_method", "proposals", _PROPOSALS),
    ):
        _translate_value(values, key, own, names)
    for key in [key for key in values if key in _KEYS]:
        accepted, remedy = _KEYS[key]
        value = values.pop(key)
        is_accepted = any(type(value) is type(each) and value == each for each in accepted)
        if value is not None and not is_accepted:
            raise InvalidParameterError(f"{_WHERE}.{key}", f"got {shown(value)}: {remedy}")
    return values


def _translate_method(values: dict[str, Any]) -> None:
    """Replace a method by the draft that it stands for, or by the kind of head that it asks for."""
    method, draft = values.pop("method", None), values.get("draft")
    if method is None:
        return
    if isinstance(method, str) and is_mtp(method):
        values |= {"draft": MTP_METHOD} if draft is None else {"method": MTP_METHOD}
    elif method in MODEL_FREE_DRAFTS:
        if draft not in (None, method):
            raise InvalidParameterError(
                f"{_WHERE}.draft", f"cannot be combined with the method {method!r}; give one"
            )
        values["draft"] = method
    elif method in _MODEL_METHODS:
        if draft is None:
            what = "a head" if method in HEAD_METHODS else "a draft model"
            raise InvalidParameterError(
                f"{_WHERE}.model",
                f"is missing: the method {method!r} needs the folder or hub id of {what}",
            )
        if method in HEAD_METHODS:
            values["method"] = method
    elif isinstance(method, str) and method in _NO_METHODS:
        raise InvalidParameterError(f"{_WHERE}.method", f"{method!r}: {_NO_METHODS[method]}")
    else:
        known = ", ".join(map(repr, (*_MODEL_METHODS, *MODEL_FREE_DRAFTS)))
        raise InvalidParameterError(
            f"{_WHERE}.method", f"must be one of {known}; got {shown(method)}"
        )


def _translate_value(values: dict[str, Any], key: str, own: str, names: Mapping[str, str]) -> None:
    """Replace a key of vLLM by one of ``SpeculationConfig`` that says the same."""
    value = values.pop(key, None)
    if value is None:
        return
    field = f"{_WHERE}.{key}"
    if not isinstance(value, str) or value not in names:
        known = " or ".join(repr(name) for name in names)
        raise InvalidParameterError(field, f"must be {known}, got {shown(value)}")
    if values.setdefault(own, names[value]) != names[value]:
        raise InvalidParameterError(
            field, f"{value!r} is {own!r} {names[value]!r}; give only one of them"
        )
