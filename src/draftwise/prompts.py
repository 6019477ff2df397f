"""Prompts as users give them: text, tokens, chat messages, and files of JSON lines."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwise.errors import InvalidParameterError, PromptError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

# Spec-Bench and MT-Bench have `turns`, HumanEval `prompt`, GSM8K `question`, MBPP `text`.
_KEYS = ("prompt", "question", "turns", "text")


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


def tokenize(
    tokenizer: Any, prompt: Prompt, chat: ChatFormat | None = None
) -> tuple[str | None, list[int]]:
    """The text of a prompt, if it has one, and its tokens.

    Args:
        tokenizer: a Hugging Face tokenizer; ``None`` if the model has none.
        prompt: text, token ids, or messages for the chat template.
        chat: how messages become a prompt; ``None`` for the tokenizer's own template alone.

    Raises:
        PromptError: it is empty or malformed, or the tokenizer for it is missing.
        InvalidParameterError: a variable of the template has a name that it cannot have.
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
    text = (
        prompt if isinstance(prompt, str) else _render_chat(tokenizer, prompt, chat or ChatFormat())
    )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            "prompt", f"is no valid text: half of a surrogate pair at character {error.start}"
        ) from error
    # A chat template writes its own special tokens.
    ids = tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
    return text, list(ids)


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
