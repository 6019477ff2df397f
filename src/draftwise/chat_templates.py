"""Chat templates: messages to the text of a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwise.errors import InvalidParameterError, PromptError
from draftwise.values import shown

Message = Mapping[str, Any]
_Rendering = Callable[[list[dict[str, Any]]], str]

_NO_JINJA = 'jinja2 is not installed: pip install "draftwise[serve]"'
# A shorter text may occur in a rendering that leaves it out.
_TELLING_CHARACTERS = 16


@dataclass(frozen=True)
class ChatTemplateParams:
    """Parameters for rendering chat messages to a prompt.

    Attributes:
        template: Jinja source of the chat template; ``None`` for the tokenizer's template.
        tools: functions that the model may call, in OpenAI's format; ``None`` for none.
        variables: additional template variables, such as ``{"enable_thinking": False}``.
    """

    template: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def load_chat_template(path: str | Path) -> str:
    """Read a chat template.

    Args:
        path: a file with a Jinja template.

    Raises:
        InvalidParameterError: the file cannot be read, is empty, or is not a Jinja template.
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
        raise InvalidParameterError("chat_template", _NO_JINJA) from error
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[{"role": "user", "content": "Hello"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise InvalidParameterError(
            "chat_template", f"{str(path)!r}, line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # a template may reject this chat, or need variables of a tokenizer
        return text
    return text


def render_chat(tokenizer: Any, messages: Sequence[Message], chat: ChatTemplateParams) -> str:
    """Render messages with a chat template.

    The content of a message is a string or a list of text parts, and is converted to the form that
    the template reads. A template that reads both gets what was given.

    Args:
        tokenizer: a Hugging Face tokenizer.
        messages: the messages.
        chat: parameters of the chat template.

    Raises:
        PromptError: there is no template, a message is malformed, or the template fails or leaves
            out the text of the last user message.
        InvalidParameterError: a template variable has a reserved name.
    """
    if not chat.template and not getattr(tokenizer, "chat_template", None):
        raise PromptError("prompt", "the target's tokenizer has no chat template; give text")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    reserved = {"messages", "conversations", *_parameters(tokenizer.apply_chat_template)}
    for name in chat.variables:
        if name in reserved:
            raise InvalidParameterError(
                f"chat_template_kwargs.{name}", "is a reserved name; use another name"
            )
    tools = None if chat.tools is None else [dict(each) for each in chat.tools]

    def render(form: list[dict[str, Any]]) -> str:
        try:
            text: str = tokenizer.apply_chat_template(
                form,
                tools=tools,
                chat_template=chat.template,
                tokenize=False,
                add_generation_prompt=True,
                **chat.variables,
            )
        except Exception as error:  # templates may raise any exception
            raise PromptError("messages", f"the chat template failed: {error}") from error
        return text

    failure: PromptError | None = None
    for form in _forms(messages, _source(tokenizer, chat.template, tools)):
        try:
            text = render(form)
        except PromptError as error:
            failure = failure or error
            continue
        if not _prints_parts(text, form) and _shows_user(text, form, render):
            return text
    raise failure or PromptError(
        "messages",
        "the chat template leaves out the text of the last user message; use another template",
    )


def content_error(content: Any, quote: Callable[[object], str]) -> tuple[str, str] | None:
    """Find what is wrong with the content of a message.

    Args:
        content: the content; valid are a string, ``None`` and a list of text parts.
        quote: formats an invalid value for the error message.

    Returns:
        The place within the content, such as ``"[2].type"``, and the error message; ``None`` if the
        content is valid.
    """
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list | tuple):
        return "", f"must be a string or a list of text parts, got {quote(content)}"
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            example = '{"type": "text", "text": "…"}'
            return f"[{index}]", f"must be a part such as {example}, got {quote(part)}"
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            only = "must be 'text', the only supported type"
            return f"[{index}].type", f"{only}; got {quote(kind)}"
        if not isinstance(text, str):
            return f"[{index}].text", f"must be a string, got {quote(text)}"
    return None


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise PromptError(name, "must have a 'role' and a 'content'")
    error = content_error(message["content"], shown)
    if error is not None:
        raise PromptError(f"{name}.content{error[0]}", error[1])


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Names of the declared parameters of a function."""
    declared = inspect.signature(function).parameters.values()
    return {each.name for each in declared if each.kind is not each.VAR_KEYWORD}


def _source(tokenizer: Any, template: str | None, tools: list[dict[str, Any]] | None) -> str:
    """Jinja source of the template that the tokenizer uses."""
    try:
        source: str = tokenizer.get_chat_template(template, tools)
    except ValueError as error:  # the tokenizer has several templates and no default
        raise PromptError("messages", f"the chat template failed: {error}") from error
    return source


def _forms(messages: Sequence[Message], source: str) -> list[list[dict[str, Any]]]:
    """The messages in the forms that a template may read, the preferred form first.

    Raises:
        PromptError: the library that reads templates is not installed.
    """
    try:
        from draftwise.content_format import ContentFormat, content_format
    except ImportError as error:
        raise PromptError("messages", _NO_JINJA) from error

    def form(convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
        return [{**message, "content": convert(message["content"])} for message in messages]

    match content_format(source):
        case ContentFormat.STRING:
            return [form(_as_string)]
        case ContentFormat.PARTS:
            return [form(_as_parts), form(_as_string)]
    # Only some roles may have both forms, so the other forms follow.
    return [form(_as_given), form(_as_string), form(_as_parts)]


def _as_given(content: Any) -> str | list[dict[str, Any]] | None:
    return content if content is None or isinstance(content, str) else _as_parts(content)


def _as_string(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def _as_parts(content: Any) -> list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        # Without content too, since templates may read the type of the first part.
        return [{"type": "text", "text": content or ""}]
    return [dict(part) for part in content]


def _prints_parts(text: str, form: list[dict[str, Any]]) -> bool:
    """Whether a rendering has a part of a message as Python shows it."""
    lists = (message["content"] for message in form if isinstance(message["content"], list))
    return any(str(part) in text for parts in lists for part in parts)


def _shows_user(text: str, form: list[dict[str, Any]], render: _Rendering) -> bool:
    """Whether a rendering depends on all text of the last user message.

    Args:
        text: the rendering.
        form: the rendered messages.
        render: renders other messages.
    """
    users = [index for index, message in enumerate(form) if message["role"] == "user"]
    if not users:
        return True
    last = users[-1]
    parts = _as_parts(form[last]["content"])
    doubtful = []
    shown_text = _without_spaces(text)
    for index, part in enumerate(parts):
        characters = _without_spaces(part["text"])
        is_telling = len(characters) >= _TELLING_CHARACTERS
        if characters and not (is_telling and characters in shown_text):
            doubtful.append(index)
    if not doubtful:
        return True

    def with_numbers(numbers: Mapping[int, str]) -> str:
        """Render numbers in place of the doubtful parts."""
        changed: Any = [
            {**part, "text": numbers.get(index, part["text"])} for index, part in enumerate(parts)
        ]
        if isinstance(form[last]["content"], str):
            changed = _as_string(changed)
        return render([*form[:last], {**form[last], "content": changed}, *form[last + 1 :]])

    # Templates may escape a text or change its case, but hardly a number. If a number is missing,
    # the rendering may still depend on it. The other number is as long, because a template that
    # takes a string for a list writes something for each character.
    numbers = {index: f"4815162342{index:06}" for index in doubtful}
    try:
        rendering = with_numbers(numbers)
        missing = [index for index in doubtful if numbers[index] not in rendering]
        others = {index: f"2718281828{index:06}" for index in missing}
        return not missing or with_numbers(numbers | others) != rendering
    except PromptError:  # the template refuses a number, so it does read the text
        return True


def _without_spaces(text: str) -> str:
    return "".join(text.split())
