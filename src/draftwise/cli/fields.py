"""Options of commands that are declared by the dataclasses they fill.

A field of :class:`~draftwise.speculation.SpeculationConfig`, for example, gives an option its name,
type and default, and the first sentence of its documentation is the help text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

Values = dict[str, Any]
_UNSET_MEANS = re.compile(r"; None for (.*?)\.?$")
_TYPED = (bool, int, float, str, Path)


@dataclass(frozen=True)
class Own:
    """What an option has of its own, beside what its field declares.

    Attributes:
        help: help text; ``None`` for the first sentence of the field's documentation.
        flag: how the option is typed, separated by commas; ``None`` for the field's name.
        kind: type of what is typed; ``None`` for the field's type.
        parse: converts what was typed, which is not ``None``, to the field's value.
        panel: panel of the help; ``None`` for that of the group.
        show_default: default in the help; ``None`` for what the documentation says of ``None``.
        metavar: name of the value in the help.
        min: smallest value.
        envvar: environment variable with the default.
    """

    help: str | None = None
    flag: str | None = None
    kind: Any = None
    parse: Callable[[Any], Any] | None = None
    panel: str | None = None
    show_default: str | None = None
    metavar: str | None = None
    min: int | None = None
    envvar: str | None = None


@dataclass(frozen=True)
class Group:
    """Options that fill the fields of one dataclass.

    Attributes:
        kind: the dataclass.
        panel: panel of the options in the help.
        own: the fields that are options, in their order, with what each option has of its own.
        defaults: defaults that differ from those of the dataclass.
    """

    kind: type[Any]
    panel: str
    own: Mapping[str, Own]
    defaults: Mapping[str, Any] | None = None

    def only(self, *names: str) -> Group:
        """The group with these options, in this order."""
        return replace(self, own={name: self.own[name] for name in names})

    def without(self, *names: str) -> Group:
        """The group without these options."""
        return self.only(*(name for name in self.own if name not in names))

    def but(self, **changes: Any) -> Group:
        """The group with another default, or other details (:class:`Own`), of some options.

        Raises:
            TypeError: the group has no such option.
        """
        for name in changes:
            if name not in self.own:
                raise TypeError(f"{self.kind.__name__} has no option {name!r}")
        details = {name: each for name, each in changes.items() if isinstance(each, Own)}
        others = {name: each for name, each in changes.items() if name not in details}
        return replace(
            self, own={**self.own, **details}, defaults={**(self.defaults or {}), **others}
        )

    def parameters(self) -> list[inspect.Parameter]:
        """The options as parameters of a command."""
        hints = get_type_hints(self.kind)
        items = {item.name: item for item in fields(self.kind)}
        return [self._parameter(items[name], hints[name], own) for name, own in self.own.items()]

    def values(self, options: Values) -> Values:
        """Take the options of the group out of those of a command, as values of the fields.

        Raises:
            InvalidParameterError: a value cannot be parsed.
        """
        taken: Values = {}
        for name, own in self.own.items():
            value = options.pop(name)
            if get_origin(own.kind) is list:
                value = tuple(value or ())
            taken[name] = value if value is None or own.parse is None else own.parse(value)
        return taken

    def _parameter(self, item: Field[Any], hint: Any, own: Own) -> inspect.Parameter:
        kind, default = own.kind or _typed(item.name, hint), item.default
        text, unset = _documented(inspect.getdoc(self.kind) or "").get(item.name, ("", None))
        if get_origin(kind) is list:
            text = f"{text.removesuffix('.')}; may be repeated."
            if default == () or item.default_factory is not MISSING:
                default = None
        default = (self.defaults or {}).get(item.name, default)
        flag = own.flag or "--" + item.name.replace("_", "-")
        if "/" not in flag and (kind == bool | None or (kind is bool and default is True)):
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        option = typer.Option(
            *flag.split(","),
            help=text if own.help is None else own.help,
            rich_help_panel=own.panel or self.panel,
            show_default=own.show_default or (own.help is None and unset) or True,
            metavar=own.metavar,
            min=own.min,
            envvar=own.envvar,
        )
        return inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[kind if default is not None else kind | None, option],
        )


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take groups of options.

    Typer reads the options of a command from its signature. In that of the decorated command, the
    options of a group are in the place of the parameter that has its name. The command gets what
    was typed as a mapping from fields to values, or if the parameter's type is that of the group,
    as a filled object.

    Raises:
        InvalidParameterError: a value cannot be parsed, or a filled object is invalid; by the
            decorated command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        filled = set()
        for each in inspect.signature(command, eval_str=True).parameters.values():
            if each.name not in groups:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            parameters += groups[each.name].parameters()
            if each.annotation is groups[each.name].kind:
                filled.add(each.name)

        @wraps(command)
        def run(**options: Any) -> None:
            for name, group in groups.items():
                values = group.values(options)
                options[name] = group.kind(**values) if name in filled else values
            command(**options)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _typed(name: str, hint: Any) -> Any:
    """The type of what is typed for a field.

    Raises:
        TypeError: the field's type cannot be typed as it is.
    """
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kinds = tuple(each for each in kinds if each is not NoneType)
    if len(kinds) != 1 or kinds[0] not in _TYPED:
        raise TypeError(f"the option {name!r} needs a type of its own, as {hint} cannot be typed")
    return hint


@cache
def _documented(docstring: str) -> dict[str, tuple[str, str | None]]:
    """The first sentence about each attribute of a class, and what it says of ``None``."""
    _, _, text = docstring.partition("Attributes:\n")
    found: dict[str, tuple[str, str | None]] = {}
    described = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    for name, description in described:
        # Commands stay in quotes; values are shown as they are typed.
        plain = re.sub(r"``(draftwise .*?)``", r"`\1`", " ".join(description.split()))
        plain = re.sub(r'``"?(.*?)"?``', r"\1", plain)
        sentence = re.split(r"(?<=\.) ", plain, maxsplit=1)[0]
        if not description.startswith("``"):
            sentence = sentence[:1].upper() + sentence[1:]
        unset = _UNSET_MEANS.search(sentence)
        if unset is not None:
            sentence = f"{sentence[: unset.start()]}."
        found[name] = sentence, unset and unset.group(1)
    return found
