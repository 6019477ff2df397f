"""Draftwise against a reference: tokens and log-probabilities of greedy texts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise import LLM, RequestOutput, SamplingParams, SpeculationConfig
from draftwise.errors import DraftwiseError
from draftwise.outputs import TokenLogprobs

from .architectures import Architecture
from .reference import Reference
from .shrinking import CONTEXT, WINDOW
from .tiny import TinyModel, build
from .verdicts import NotBuildableError, RefusedError, UnequalError

# How Draftwise says that a model does not run by itself.
_OWN_FAILURE = "fails in its own forward pass"
# Largest difference of two log-probabilities that float32 explains.
_TOLERANCE = 1e-3
_NUM_TOKENS = 2 * WINDOW
_NUM_LOGPROBS = 20
# Prompts are read in chunks and in several groups.
_SIZES = {"max_batch_size": 4, "max_chunk_tokens": 12}
# Small token ids have meanings in some models.
_FIRST_TOKEN = 3
_LENGTHS = (1, 2, 5, 9, 17, 33)


def examine(architecture: Architecture, root: Path) -> str:
    """Build, load and compare a tiny model.

    Args:
        architecture: the architecture.
        root: an empty folder.

    Returns:
        What Draftwise refuses to do with the model although it loads; mostly nothing.

    Raises:
        NotBuildableError: ``transformers`` cannot build, load or run it.
        RefusedError: Draftwise does not load it.
        UnequalError: tokens or log-probabilities differ.
    """
    return compare(build(architecture, root))


def compare(tiny: TinyModel) -> str:
    """Load a model and compare its texts, alone and with drafts of several kinds.

    See :func:`examine`.
    """
    with _load(tiny) as llm:
        if tiny.reference is None:
            raise NotBuildableError(tiny.failure)
        check(llm, tiny.reference, "alone", asks_prompt=True)
        check(llm, tiny.reference, "with stored prefixes")
        refused = []
        for name, settings in _speculations(tiny.draft).items():
            try:
                other = llm.with_speculation(SpeculationConfig(**settings, guard=False))
            except DraftwiseError as error:
                refused.append(f"no {name}: {_reason(error, tiny.draft)}")
                continue
            with other:
                check(other, tiny.reference, f"with {name}", drafts=True)
        return "; ".join(refused)


def check(
    llm: LLM, reference: Reference, how: str, asks_prompt: bool = False, drafts: bool = False
) -> None:
    """Compare greedy texts of a model with its reference.

    Args:
        llm: the model.
        reference: what it is to compute.
        how: how it computes it; named in errors.
        asks_prompt: whether log-probabilities of the prompts are compared too.
        drafts: whether tokens must be drafted.

    Raises:
        UnequalError: tokens or log-probabilities differ, or nothing is drafted.
    """
    sampling = SamplingParams(
        max_tokens=_NUM_TOKENS,
        temperature=0,
        ignore_eos=True,
        logit_bias=dict.fromkeys(reference.padding, -100.0),
        logprobs=_NUM_LOGPROBS,
        prompt_logprobs=_NUM_LOGPROBS if asks_prompt else None,
    )
    outputs = llm.generate(_prompts(reference.vocab), sampling)
    for output in outputs:
        if output.error is not None:
            raise output.error
        _check_output(output, reference, how)
    if drafts and not any(output.speculation.num_drafted for output in outputs):
        raise UnequalError(f"{how}: nothing was drafted")


def load(folder: Path, **settings: Any) -> LLM:
    """Load a model of a folder in float32.

    Raises:
        DraftwiseError: Draftwise refuses it.
    """
    sizes = {"max_model_len": CONTEXT, **_SIZES}
    return LLM(folder, dtype="float32", device="cpu", **{**sizes, **settings})


def _load(tiny: TinyModel) -> LLM:
    try:
        return load(tiny.folder)
    except DraftwiseError as error:
        reason = _reason(error, tiny.folder)
        if not tiny.loads or (tiny.reference is None and _OWN_FAILURE in reason):
            # What stops transformers stops Draftwise too.
            raise NotBuildableError(tiny.failure) from error
        raise RefusedError(reason) from error


def _reason(error: DraftwiseError, folder: Path) -> str:
    return str(error).replace(str(folder), "MODEL")


def _speculations(draft: Path) -> Mapping[str, Mapping[str, Any]]:
    model = {"draft": str(draft), "num_speculative_tokens": 3}
    return {
        "a draft model": {**model, "policy": "fixed"},
        "copied text": {"draft": "suffix", "policy": "fixed", "num_speculative_tokens": 4},
        "token trees": {**model, "policy": "eagle2", "tree_width": 2},
    }


def _prompts(vocab: int) -> list[list[int]]:
    """Prompts of several lengths, of which one repeats itself and two begin with the same."""
    numbers = random.Random(0)
    prompts = [
        [numbers.randrange(_FIRST_TOKEN, vocab) for _ in range(length)] for length in _LENGTHS
    ]
    return [*prompts, prompts[2] * 3, prompts[-1][:-4] + prompts[3]]


def _check_output(output: RequestOutput, reference: Reference, how: str) -> None:
    """Compare the log-probabilities of a text with those of one pass over it."""
    tokens = [*output.prompt_token_ids, *output.token_ids]
    expected = reference.logprobs(tokens[:-1]).tolist()
    first = len(output.prompt_token_ids) - 1
    if len(output.token_ids) != _NUM_TOKENS or output.logprobs is None:
        raise UnequalError(f"{how}: {len(output.token_ids)} tokens instead of {_NUM_TOKENS}")
    told: list[TokenLogprobs | None] = [*(output.prompt_logprobs or [None] * (first + 1))[1:]]
    for position, entry in enumerate([*told, *output.logprobs]):
        row, token = expected[position], tokens[position + 1]
        where = f"{how}, position {position + 1} of a prompt of {first + 1}"
        if entry is not None:
            for each, logprob in [(token, entry.logprob), *entry.top]:
                if not _is_close(logprob, row[each]):
                    raise UnequalError(
                        f"{where}: token {each} has log-probability {logprob:.4f}, "
                        f"in transformers {row[each]:.4f}"
                    )
        best = max(range(len(row)), key=lambda each: (each not in reference.padding, row[each]))
        if position >= first and not row[token] >= row[best] - _TOLERANCE:
            raise UnequalError(f"{where}: token {token} instead of {best}")


def _is_close(one: float, other: float) -> bool:
    return one == other or (math.isfinite(one) and abs(one - other) <= _TOLERANCE)
