"""Setup of ``draftwise benchmark``: context lengths, the target, and the models of peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwise import zoo
from draftwise.benchmark.contenders import Setting
from draftwise.benchmark.peer_modes import peer_engine
from draftwise.benchmark.peers import PeerModels
from draftwise.checkpoints.exits.files import names_exit
from draftwise.checkpoints.heads.config import HeadKind
from draftwise.checkpoints.heads.files import is_assistant, read_head_config
from draftwise.checkpoints.mtp import drafts_with_mtp
from draftwise.checkpoints.source import split_name
from draftwise.cli.defaults import ChosenModels
from draftwise.core.formats import MODEL_FREE_DRAFTS, draft_parts
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.llm import LLM
from draftwise.models.heads.loading import find_named_head, names_head
from draftwise.models.loading import resolve_dtype
from draftwise.policies import policy_class

_LONGEST_PROMPT = 256


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens.

    Attributes:
        prompt: maximum length of a prompt.
        answer: length of an answer, including drafted tokens beyond its end.
        context: length of prompt and answer together.
        chosen: name of the option that determined the lengths; ``None`` for the defaults.
    """

    prompt: int
    answer: int
    context: int
    chosen: str | None


def context_lengths(longest_prompt: int | None, answer: int, max_model_len: int | None) -> Lengths:
    """Determine the maximum length of prompts and the context length.

    Args:
        longest_prompt: maximum number of prompt tokens; ``None`` for 256, or less if the context
            is shorter.
        answer: tokens of an answer, including drafted tokens beyond its end.
        max_model_len: context length; ``None`` for the required length.

    Raises:
        InvalidParameterError: prompt and answer do not fit into the context.
    """
    if max_model_len is None:
        longest = longest_prompt or _LONGEST_PROMPT
        chosen = None if longest_prompt is None else "longest_prompt"
        return Lengths(longest, answer, longest + answer, chosen)
    room = max_model_len - answer
    if room < (longest_prompt or 1):
        raise InvalidParameterError(
            "max_model_len",
            f"{max_model_len} leaves {max(0, room)} tokens for a prompt, because an answer and its "
            f"drafts need {answer}; increase it, or reduce max_tokens or longest_prompt",
        )
    longest = longest_prompt or min(_LONGEST_PROMPT, room)
    return Lengths(longest, answer, max_model_len, "max_model_len")


def load_target(name: str, lengths: Lengths, options: Mapping[str, Any]) -> tuple[LLM, int]:
    """Load the target without a draft, and adapt the maximum prompt length to its context.

    The maximum prompt length is reduced only if it is the default.

    Args:
        name: name of the target.
        lengths: lengths of prompts, answers and context.
        options: further arguments of :class:`~draftwise.llm.LLM`.

    Returns:
        The loaded target, and the maximum number of prompt tokens.

    Raises:
        DraftwiseError: the target cannot be loaded, or its context is too short.
    """
    # All rounds have the same prompts, and each round is to compute them.
    options = {**options, "enable_prefix_caching": False}
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
            f"an answer and its drafts need {lengths.answer} tokens, but the context of {name!r} "
            f"has {llm.target.max_model_len}",
        )
    return llm, min(lengths.prompt, room)


def check_names(policies: Sequence[str], peers: Sequence[str]) -> None:
    """Check the names of contenders before anything is loaded or trained.

    Raises:
        InvalidParameterError: there is no such policy or engine.
    """
    for text in policies:
        policy_class(Setting.parse(text).policy)
    for text in peers:
        peer_engine(text.partition("=")[0])


def peer_models(
    models: ChosenModels, llm: LLM, dtype: str, threads: int, max_batch_size: int
) -> PeerModels:
    """Determine the models that other engines load: no quantised companion, exit or EAGLE-1 head.

    Args:
        models: names of the models.
        llm: the loaded target.
        dtype: the dtype that the user asked for. ``auto`` is what PyTorch computes fast, as other
            engines do not have the native kernels.
        threads: number of CPU threads.
        max_batch_size: maximum number of prompts that run at once.

    Raises:
        InvalidParameterError: the target or the draft is quantised, which other engines do
            differently.
    """
    companion = models.companion
    parts = [] if models.draft is None else draft_parts(models.draft)
    draft = next((part for part in parts if part not in MODEL_FREE_DRAFTS), None)
    head = None
    # Other engines have no exits, and heads and MTP layers are not drafts of their own.
    if draft is not None and (names_exit(draft, "draft") or drafts_with_mtp(draft)):
        draft = None
    elif draft is not None and names_head(draft):
        head, draft = _eagle3_folder(draft), None
    if companion is not None and (
        split_name(companion)[1] is not None or names_exit(companion, "companion")
    ):
        companion = None
    return PeerModels(
        _folder(models.target),
        None if draft is None else _folder(draft),
        str(resolve_dtype(dtype, llm.target.model.device)).removeprefix("torch."),
        threads,
        llm.target.max_model_len,
        max_batch_size,
        None if companion is None else _folder(companion),
        tuple(sorted(llm.target.eos_token_ids)),
        llm.target.model.device.type,
        head,
    )


def _eagle3_folder(name: str) -> str | None:
    """The folder of a head; ``None`` if it is not one of EAGLE-3."""
    folder = find_named_head(name)
    assert folder is not None
    if is_assistant(folder):
        return None
    return str(folder) if read_head_config(folder).kind is HeadKind.EAGLE3 else None


def lookup_lengths(
    draft: str | None, policies: Sequence[str], num_speculative_tokens: int
) -> list[int]:
    """Determine how many tokens other engines draft from the text.

    They draft a fixed number of tokens per step, so they get the lengths of the policy ``fixed``.

    Args:
        draft: name of the draft.
        policies: valid names of policies, with optional draft lengths.
        num_speculative_tokens: draft length of policies without one, and of the other engines if
            ``fixed`` is not among the policies.

    Returns:
        The lengths; empty if the draft is none of those that need no model.
    """
    if draft is None or not set(draft_parts(draft)) & set(MODEL_FREE_DRAFTS):
        return []
    fixed = [each for each in map(Setting.parse, policies) if each.policy == "fixed"]
    lengths = [
        num_speculative_tokens if each.length is None else each.length
        for each in fixed
        if (each.width or 1) == 1
    ]
    return list(dict.fromkeys(filter(None, lengths))) or [num_speculative_tokens]


def _folder(name: str) -> str:
    """Resolve the name of a bundled model to its folder; return other names unchanged."""
    if split_name(name)[1] is not None:
        raise InvalidParameterError("peers", f"cannot load the quantised model {name!r}")
    return str(zoo.resolve(name)) if name.startswith("zoo:") else name
