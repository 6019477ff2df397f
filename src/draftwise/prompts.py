"""Prompts as users give them: text, tokens, chat messages, and files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwise.errors import InvalidParameterError, PromptError

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

# Spec-Bench and MT-Bench have `turns`, HumanEval `prompt`, GSM8K `question`, MBPP `text`.
_KEYS = ("prompt", "question", "turns", "text")

# Text has about four characters per token, so a beginning of eight per token tells enough.
_CHARACTERS_PER_TOKEN = 8
_TOKENS_AT_A_CUT = 256


def load_prompts(path: str | Path, num_prompts: int | None = None) -> list[str]:
    """Read prompts from a file of JSON lines.

    Args:
        path: each line an object with ``prompt``, ``question``, ``turns`` (the first is taken) or
            ``text``.
        num_prompts: stop after this many; ``None`` for all.

    Raises:
        PromptError: the file cannot be read, or a line has none of the keys; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError("prompts", f"cannot read {str(path)!r}: {error}") from error
    prompts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if num_prompts is not None and len(prompts) == num_prompts:
            break
        if line.strip():
            prompts.append(_prompt(line, f"{path}:{number}"))
    if not prompts:
        raise PromptError("prompts", f"{str(path)!r} holds no prompts")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError("prompts", f"{where} is not JSON: {error}") from error
    for key in _KEYS:
        value = record.get(key) if isinstance(record, dict) else None
        if key == "turns" and isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value:
            return value
    raise PromptError("prompts", f"{where} has no text under any of {', '.join(_KEYS)}")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt becomes a list of one; a list of ids or of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise PromptError(
            "prompt",
            f"must be a string, token ids, messages or a list of these, got "
            f"{type(prompts).__name__}",
        )
    items = list(prompts)
    if items and isinstance(items[0], int | Mapping):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def one_per_prompt(field: str, given: Any, kind: type[Any], prompts: list[Prompt]) -> list[Any]:
    """One for all, or the standard one for ``None``, becomes one for each."""
    if given is None or isinstance(given, kind):
        return [given or kind()] * len(prompts)
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise InvalidParameterError(
            field, f"must be {kind.__name__} or a list of them, got {given!r}"
        )
    if len(given) != len(prompts):
        raise InvalidParameterError(
            field, f"{len(given)} parameter sets for {len(prompts)} prompts"
        )
    return list(given)


def is_tokens(prompt: Prompt) -> bool:
    """Whether a prompt is given as token ids."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], int)


def tokenize(
    tokenizer: Any, prompt: Prompt, *, max_tokens: int | None = None
) -> tuple[str | None, list[int]]:
    """The text of a prompt, if it has one, and its tokens.

    Args:
        tokenizer: a Hugging Face tokenizer; ``None`` if the model has none.
        prompt: text, token ids, or messages for the chat template.
        max_tokens: a text that certainly has more tokens is refused without tokenizing all of it.

    Raises:
        PromptError: it is empty, malformed or far too long, or the tokenizer for it is missing.
    """
    if not isinstance(prompt, str | Sequence):
        raise PromptError(
            "prompt", f"must be a string, token ids or messages, got {type(prompt).__name__}"
        )
    if not prompt:
        raise PromptError("prompt", "is empty; give some text or at least one token")
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        return None, list(prompt)  # type: ignore[arg-type]
    if tokenizer is None:
        raise PromptError("prompt", "the target has no tokenizer; give token ids")
    text = prompt if isinstance(prompt, str) else _render_chat(tokenizer, prompt)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            "prompt", f"is no valid text: half of a surrogate pair at character {error.start}"
        ) from error
    if max_tokens is not None:
        _refuse_far_too_long(tokenizer, text, max_tokens)
    # A chat template writes its own special tokens.
    ids = tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
    return text, list(ids)


def _refuse_far_too_long(tokenizer: Any, text: str, max_tokens: int) -> None:
    """Tokenize beginnings of a long text, each twice as long as the last.

    A beginning has at most a few tokens more than the same characters have within the whole text,
    because only the token at the cut can change.

    Raises:
        PromptError: a beginning has too many tokens already.
    """
    length = _CHARACTERS_PER_TOKEN * max_tokens
    while length < len(text):
        ids = tokenizer(text[:length], add_special_tokens=False)["input_ids"]
        if len(ids) > max_tokens + _TOKENS_AT_A_CUT:
            raise PromptError(
                "prompt",
                f"is too long: its first {length} of {len(text)} characters have {len(ids)} "
                f"tokens; the longest prompt has {max_tokens}",
            )
        length *= 2


def _render_chat(tokenizer: Any, messages: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("prompt", "the target's tokenizer has no chat template; give text")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise PromptError("prompt", "each message needs a 'role' and a 'content'")
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise whatever their authors chose
        raise PromptError("prompt", f"the chat template refuses it: {error}") from error
    return text
