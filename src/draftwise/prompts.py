"""Prompts as text, token ids or chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from draftwise.chat_templates import ChatTemplateParams, Message, render_chat
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.prompt_files import load_questions
from draftwise.values import is_integer, shown

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message] | np.ndarray[Any, Any] | Tensor"

# Text has about four characters per token, so a prefix with eight characters per allowed token is
# long enough to show that the text is too long.
_CHARACTERS_PER_TOKEN = 8
_CUT_TOLERANCE_TOKENS = 256
# Most special tokens that a tokenizer adds at the beginning, as ChatGLM's `[gMask]<sop>`.
_MOST_ADDED_TOKENS = 2


def load_prompts(path: str | Path, num_prompts: int | None = None) -> list[str]:
    """Read the first turns of a file of prompts; see :func:`draftwise.prompt_files.load_questions`.

    Args:
        path: file of JSON lines, or Parquet file.
        num_prompts: maximum number of prompts to read; ``None`` for all.

    Raises:
        PromptError: the file cannot be read, or a record has no prompt.
    """
    return [question.turns[0] for question in load_questions(path, num_prompts)]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Convert one prompt or a list of prompts to a list of prompts.

    A list of token ids and a list of chat messages are one prompt.

    Raises:
        PromptError: the value is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    if _is_array(prompts):
        array: Any = prompts
        return list(array) if array.ndim == 2 else [array]
    if isinstance(prompts, bytes | bytearray | memoryview | Mapping | set | frozenset):
        raise _not_a_prompt(prompts)
    if not isinstance(prompts, Iterable):
        raise _not_a_prompt(prompts)
    items = list(prompts)
    if items and _is_prompt_element(items[0]):
        return [items]
    return items


def _is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, a tensor, or another array with their interface."""
    return all(hasattr(value, name) for name in ("dtype", "ndim", "tolist"))


def _is_prompt_element(item: Any) -> bool:
    """Whether the first item of a list shows that the list is one prompt.

    Numbers are token ids, and mappings are chat messages.
    """
    if _is_array(item):
        return bool(item.ndim == 0)
    return isinstance(item, int | float) or (isinstance(item, Mapping) and "input_ids" not in item)


def _not_a_prompt(value: object) -> PromptError:
    hint = ""
    if isinstance(value, Mapping) and "input_ids" in value:
        hint = "; pass its ['input_ids']"
    elif isinstance(value, Mapping):
        hint = "; put the message into a list"
    elif isinstance(value, bytes | bytearray | memoryview):
        hint = "; decode it, or convert it with list(...) if its bytes are token ids"
    return PromptError(
        "prompt",
        f"must be a string, token ids, messages or a list of these, got "
        f"{type(value).__name__}{hint}",
    )


def _as_ids_or_messages(prompt: Any) -> list[Any]:
    """Convert a prompt to a list of Python integers, or to a list of messages."""
    items: list[Any]
    if _is_array(prompt):
        if prompt.ndim != 1:
            raise PromptError("prompt", f"token ids must have one dimension, got {prompt.ndim}")
        kind, items = f"{type(prompt).__name__} of {prompt.dtype}", prompt.tolist()
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
        kind, items = "", list(prompt)
        if items and isinstance(items[0], Mapping):
            return items
    else:
        raise _not_a_prompt(prompt)
    if all(type(item) is int for item in items):
        return items
    ids = [item.item() if _is_array(item) and item.ndim == 0 else item for item in items]
    for item in ids:
        if not is_integer(item):
            raise PromptError("prompt", f"token ids must be integers, got {kind or shown(item)}")
    return [int(item) for item in ids]


def one_per_prompt(field: str, given: Any, kind: type[Any], prompts: list[Prompt]) -> list[Any]:
    """Convert parameters, which may be shared or ``None`` for the defaults, to one per prompt.

    Raises:
        InvalidParameterError: a value has another type, or there is not one per prompt.
    """
    if given is None or isinstance(given, kind):
        return [given or kind()] * len(prompts)
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise InvalidParameterError(
            field, f"must be {kind.__name__} or a list of them, got {given!r}"
        )
    if len(given) != len(prompts):
        raise InvalidParameterError(
            field, f"must have one item per prompt, got {len(given)} for {len(prompts)} prompts"
        )
    return list(given)


def is_tokens(prompt: Prompt) -> bool:
    """Whether a prompt is a list of token ids."""
    return not isinstance(prompt, str) and bool(prompt) and is_integer(prompt[0])


def tokenize(
    tokenizer: Any,
    prompt: Prompt,
    chat: ChatTemplateParams | None = None,
    *,
    max_tokens: int | None = None,
) -> tuple[str | None, list[int]]:
    """Tokenize a prompt.

    Args:
        tokenizer: a Hugging Face tokenizer; ``None`` if the model has none.
        prompt: text, token ids, or messages for the chat template.
        chat: parameters of the chat template; ``None`` for the defaults.
        max_tokens: reject texts that certainly have more tokens, without tokenizing all of them.

    Returns:
        The text, or ``None`` if token ids were given, and the token ids.

    Raises:
        PromptError: the prompt is empty, malformed or far too long, or needs a tokenizer and there
            is none.
        InvalidParameterError: a template variable has a reserved name.
    """
    if not isinstance(prompt, str):
        prompt = _as_ids_or_messages(prompt)
    if not prompt:
        raise PromptError("prompt", "is empty; give some text or at least one token")
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        return None, prompt
    if tokenizer is None:
        raise PromptError("prompt", "the target has no tokenizer; give token ids")
    text = (
        prompt
        if isinstance(prompt, str)
        else render_chat(tokenizer, prompt, chat or ChatTemplateParams())
    )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            "prompt", f"is not valid text: unpaired surrogate at character {error.start}"
        ) from error
    if max_tokens is not None:
        _refuse_far_too_long(tokenizer, text, max_tokens)
    # Chat templates contain their own special tokens.
    if not isinstance(prompt, str):
        return text, _ids(tokenizer, text, add_special_tokens=False)
    return text, _ids_of_text(tokenizer, text)


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])


def _ids_of_text(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text with the special tokens that the tokenizer adds.

    A text that begins with them, such as a rendered chat, does not get them a second time.
    """
    ids = _ids(tokenizer, text, add_special_tokens=True)
    if not ids or ids[0] not in ids[1 : 1 + _MOST_ADDED_TOKENS]:
        return ids
    written = _ids(tokenizer, text, add_special_tokens=False)
    num_added = ids.index(ids[0], 1)
    added = ids[:num_added]
    is_added = ids[num_added : num_added + len(written)] == written
    return ids[num_added:] if is_added and written[:num_added] == added else ids


def _refuse_far_too_long(tokenizer: Any, text: str, max_tokens: int) -> None:
    """Tokenize prefixes of a long text, each twice as long as the one before.

    A prefix has at most a few tokens more than the same characters have within the whole text,
    because only tokens near the cut can change.

    Raises:
        PromptError: a prefix already has too many tokens.
    """
    length = _CHARACTERS_PER_TOKEN * max_tokens
    while length < len(text):
        ids = _ids(tokenizer, text[:length], add_special_tokens=False)
        if len(ids) > max_tokens + _CUT_TOLERANCE_TOKENS:
            raise PromptError(
                "prompt",
                f"is too long: the first {length} of its {len(text)} characters have {len(ids)} "
                f"tokens; at most {max_tokens} tokens are allowed",
            )
        length *= 2
