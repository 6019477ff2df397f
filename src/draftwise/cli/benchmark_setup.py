"""What ``draftwise benchmark`` needs before it begins: lengths, the target, what peers load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwise import zoo
from draftwise.benchmark.peers import PeerModels
from draftwise.cli.defaults import ChosenModels
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.llm import LLM
from draftwise.models.loading import split_name

_LONGEST_PROMPT = 256


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens.

    Attributes:
        prompt: longest prompt that takes part.
        answer: an answer, and the drafts that go beyond its end.
        context: prompt and answer together.
        chosen: the option by which the user chose them; ``None`` if they are the usual ones.
    """

    prompt: int
    answer: int
    context: int
    chosen: str | None


def context_lengths(longest_prompt: int | None, answer: int, max_model_len: int | None) -> Lengths:
    """The longest prompt that takes part, and the context that it needs with its answer.

    Args:
        longest_prompt: in tokens; ``None`` for 256, or fewer where the context has no room for it.
        answer: tokens of an answer, and of the drafts that go beyond its end.
        max_model_len: the context; ``None`` for as much as is needed.

    Raises:
        InvalidParameterError: the context has no room for the answer beside such a prompt.
    """
    if max_model_len is None:
        longest = longest_prompt or _LONGEST_PROMPT
        chosen = None if longest_prompt is None else "longest_prompt"
        return Lengths(longest, answer, longest + answer, chosen)
    room = max_model_len - answer
    if room < (longest_prompt or 1):
        raise InvalidParameterError(
            "max_model_len",
            f"{max_model_len} leaves {max(0, room)} tokens for a prompt, as an answer and its "
            f"drafts take {answer}; raise it, or lower max_tokens or longest_prompt",
        )
    longest = longest_prompt or min(_LONGEST_PROMPT, room)
    return Lengths(longest, answer, max_model_len, "max_model_len")


def load_target(name: str, lengths: Lengths, options: Mapping[str, Any]) -> tuple[LLM, int]:
    """The target alone, and the longest prompt that takes part.

    Where the user chose no lengths and the context of the target is shorter than usual, so is the
    longest prompt.

    Args:
        name: of the target.
        lengths: of prompts, answers and context.
        options: further arguments of :class:`~draftwise.llm.LLM`.

    Raises:
        DraftwiseError: the target cannot be loaded, or its context is too short.
    """
    try:
        return LLM(name, None, max_model_len=lengths.context, **options), lengths.prompt
    except DraftwiseError as error:
        if error.field != "max_model_len" or lengths.chosen == "max_model_len":
            raise
        if lengths.chosen is not None:
            raise InvalidParameterError(
                lengths.chosen, f"with its answer {error.message}"
            ) from error
    llm = LLM(name, None, **options)
    room = llm.target.max_model_len - lengths.answer
    if room < 1:
        raise InvalidParameterError(
            "max_tokens",
            f"an answer and its drafts take {lengths.answer} tokens, but the context of {name!r} "
            f"has {llm.target.max_model_len}",
        )
    return llm, min(lengths.prompt, room)


def peer_models(models: ChosenModels, llm: LLM, threads: int, max_batch_size: int) -> PeerModels:
    """What other engines load.

    Args:
        models: by name.
        llm: with the target.
        threads: to compute with.
        max_batch_size: prompts at once.

    Raises:
        InvalidParameterError: target or draft are to be quantised, which others would do in ways
            of their own.
    """
    companion = models.companion
    if companion is not None and split_name(companion)[1] is not None:
        companion = None
    return PeerModels(
        _folder(models.target),
        None if models.draft is None else _folder(models.draft),
        str(llm.target.model.dtype).removeprefix("torch."),
        threads,
        llm.target.max_model_len,
        max_batch_size,
        None if companion is None else _folder(companion),
    )


def _folder(name: str) -> str:
    """The folder of a bundled model, any other name as it is."""
    if split_name(name)[1] is not None:
        raise InvalidParameterError("peers", f"load models as they are, not {name!r}")
    return str(zoo.resolve(name)) if name.startswith("zoo:") else name
