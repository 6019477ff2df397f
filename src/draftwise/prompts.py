"""Prompts as users give them: text, tokens, chat messages, and files of JSON lines."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from draftwise.errors import InvalidParameterError, PromptError
from draftwise.values import is_integer, shown

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Message = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message] | np.ndarray[Any, Any] | Tensor"

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
    """One prompt becomes a list of one; a list of ids or of messages is one prompt.

    Raises:
        PromptError: it is neither a prompt nor a list.
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
    if items and _belongs_to_a_prompt(items[0]):
        return [items]
    return items


def _is_array(value: Any) -> bool:
    """Whether it is an array of NumPy, a tensor, or one of their kind."""
    return all(hasattr(value, name) for name in ("dtype", "ndim", "tolist"))


def _belongs_to_a_prompt(item: Any) -> bool:
    """Whether what it is in is one prompt: it is a number or a message."""
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
        hint = "; decode it, or pass list(...) of it if its bytes are token ids"
    return PromptError(
        "prompt",
        f"must be a string, token ids, messages or a list of these, got "
        f"{type(value).__name__}{hint}",
    )


def _as_ids_or_messages(prompt: Any) -> list[Any]:
    """Plain integers, or whatever is in a list that begins with a message."""
    items: list[Any]
    if _is_array(prompt):
        if prompt.ndim != 1:
            raise PromptError("prompt", f"token ids have one dimension, got {prompt.ndim}")
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


@dataclass(frozen=True)
class ChatFormat:
    """How messages become a prompt.

    Attributes:
        template: Jinja text in place of the tokenizer's own template; ``None`` for its own.
        tools: functions that the model may call, in OpenAI's form; ``None`` for none.
        variables: further variables of the template, such as ``{"enable_thinking": False}``.
    """

    template: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def is_tokens(prompt: Prompt) -> bool:
    """Whether a prompt is given as token ids."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], int)


def tokenize(
    tokenizer: Any,
    prompt: Prompt,
    chat: ChatFormat | None = None,
    *,
    max_tokens: int | None = None,
) -> tuple[str | None, list[int]]:
    """The text of a prompt, if it has one, and its tokens.

    Args:
        tokenizer: a Hugging Face tokenizer; ``None`` if the model has none.
        prompt: text, token ids, or messages for the chat template.
        chat: how messages become a prompt; ``None`` for the tokenizer's own template alone.
        max_tokens: a text that certainly has more tokens is refused without tokenizing all of it.

    Raises:
        PromptError: it is empty, malformed or far too long, or the tokenizer for it is missing.
        InvalidParameterError: a variable of the template has a name that it cannot have.
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
        prompt if isinstance(prompt, str) else _render_chat(tokenizer, prompt, chat or ChatFormat())
    )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            "prompt", f"is no valid text: half of a surrogate pair at character {error.start}"
        ) from error
    if max_tokens is not None:
        _refuse_far_too_long(tokenizer, text, max_tokens)
    # A chat template writes its own special tokens.
    ids = tokenizer(text, add_special_tokens=isinstance(prompt, str), verbose=False)["input_ids"]
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
        ids = tokenizer(text[:length], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > max_tokens + _TOKENS_AT_A_CUT:
            raise PromptError(
                "prompt",
                f"is too long: its first {length} of {len(text)} characters have {len(ids)} "
                f"tokens; the longest prompt has {max_tokens}",
            )
        length *= 2


def load_chat_template(path: str | Path) -> str:
    """Read a chat template.

    Args:
        path: a file with a Jinja template.

    Raises:
        InvalidParameterError: it cannot be read, is empty, or is no Jinja template.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(
            "chat_template", f"cannot read {str(path)!r}: {error}"
        ) from error
    if not text.strip():
        raise InvalidParameterError("chat_template", f"{str(path)!r} is empty")
    try:
        from jinja2 import TemplateSyntaxError
    except ImportError as error:
        raise InvalidParameterError(
            "chat_template", 'jinja2 is not installed: pip install "draftwise[serve]"'
        ) from error
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[{"role": "user", "content": "Hello"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise InvalidParameterError(
            "chat_template", f"{str(path)!r}, line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # a template may refuse this chat, or need what only a tokenizer has
        return text
    return text


def _render_chat(tokenizer: Any, messages: Any, chat: ChatFormat) -> str:
    if not chat.template and not getattr(tokenizer, "chat_template", None):
        raise PromptError("prompt", "the target's tokenizer has no chat template; give text")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise PromptError("prompt", "each message needs a 'role' and a 'content'")
    reserved = {"messages", "conversations", *_parameters(tokenizer.apply_chat_template)}
    for name in chat.variables:
        if name in reserved:
            raise InvalidParameterError(
                f"chat_template_kwargs.{name}", "is set by the server; use another name"
            )
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if chat.tools is None else [dict(each) for each in chat.tools],
            chat_template=chat.template,
            tokenize=False,
            add_generation_prompt=True,
            **chat.variables,
        )
    except Exception as error:  # templates raise whatever their authors chose
        raise PromptError("prompt", f"the chat template refuses it: {error}") from error
    return text


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Names of the parameters of a function that are declared."""
    every = inspect.signature(function).parameters.values()
    return {each.name for each in every if each.kind is not each.VAR_KEYWORD}
