"""Writes the reference of the command line from the command itself, without importing PyTorch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

MARKER = "<!-- commands -->"
_PANEL = "Other options"
_KINDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
_EXAMPLES = "Examples:\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the reference in place of the marker."""
    if MARKER not in markdown:
        return markdown
    sources = str(Path(config.docs_dir).parent / "src")
    if sources not in sys.path:
        sys.path.insert(0, sources)
    import typer

    from draftwise.cli.app import app

    return markdown.replace(MARKER, "\n".join(_sections("draftwise", typer.main.get_command(app))))


def _sections(name: str, command: Any) -> Iterator[str]:
    """The section of a command, and those of its subcommands."""
    subcommands = getattr(command, "commands", {})
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = [name, "[OPTIONS]" if options else "", *map(_usage, arguments)]
    usage.append("COMMAND …" if subcommands else "")
    yield f"## `{name}`\n"
    described, _, examples = (command.help or "").partition(_EXAMPLES)
    yield _plain(described) + "\n"
    yield f"```text\n{' '.join(filter(None, usage))}\n```\n"
    if examples:
        commands = (f"$ {line.strip()}" for line in examples.strip().splitlines())
        yield "\n".join(["```console", *commands, "```\n"])
    if arguments:
        yield "| argument | meaning |\n|---|---|"
        yield from (f"| `{_usage(each)}` | {_cell(each.help)} |" for each in arguments)
        yield ""
    panels: dict[str, list[Any]] = {}
    for option in options:
        if not option.hidden:
            panels.setdefault(getattr(option, "rich_help_panel", None) or _PANEL, []).append(option)
    if _PANEL in panels:  # after the named panels
        panels[_PANEL] = panels.pop(_PANEL)
    for panel, members in panels.items():
        if len(panels) > 1:
            yield f"**{panel}**\n"
        yield "| option | meaning | default |\n|---|---|---|"
        yield from map(_row, members)
        yield ""
    for each, subcommand in subcommands.items():
        yield from _sections(f"{name} {each}", subcommand)


def _usage(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper().strip("[]")
    name += "…" if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _row(option: Any) -> str:
    names = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts])
    kind = "" if option.is_flag else f" <small>{_kind(option)}</small>"
    repeated = "; may be repeated" if option.multiple and "repeated" not in option.help else ""
    return f"| {names}{kind} | {_cell(option.help)}{repeated} | {_default(option)} |"


def _kind(option: Any) -> str:
    """What an option takes, with its bounds: ``INTEGER ≥ 1``."""
    annotation = option.type_descriptor.annotation
    kind = option.metavar or _KINDS.get(annotation, _KINDS[str])
    if option.min is not None and option.max is not None:
        return f"{kind}, {option.min} … {option.max}"
    if option.min is not None:
        return f"{kind} ≥ {option.min}"
    return kind if option.max is None else f"{kind} ≤ {option.max}"


def _default(option: Any) -> str:
    shown = getattr(option, "show_default", True)
    if isinstance(shown, str):
        return _cell(shown)
    value = option.default
    if option.required:
        return "required"
    if not shown or value is None or value is False or value in ((), [], "") or callable(value):
        return "–"
    if value is True:
        return "on"
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str | None) -> str:
    return _plain(text or "").replace("\n", " ").replace("|", "\\|")


def _plain(text: str) -> str:
    """Help without the terminal's markup; what Markdown would take for itself is escaped."""
    text = re.sub(r"\[/?(?:bold|dim|cyan|green|yellow|red|italic)?\]", "", text)
    text = re.sub(r"(?<![\w`])(--[\w-]+)", r"`\1`", text.strip())
    return re.sub(r"([<*])", r"\\\1", text)
