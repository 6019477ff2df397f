"""Which form of a message's content a chat template reads: a string, a list of parts, or both."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class ContentFormat(Enum):
    """Forms of the content that a chat template reads."""

    STRING = "string"
    PARTS = "parts"
    BOTH = "both"


@lru_cache(maxsize=16)
def content_format(source: str) -> ContentFormat:
    """Determine the form of the content that a chat template reads, by its syntax tree.

    A template reads parts if it iterates over the content of a message or takes an item of it,
    also in a macro or by another name. It reads strings too if it tests whether the content is one.
    """
    try:
        template = _ENVIRONMENT.parse(source)
    except TemplateSyntaxError:
        return ContentFormat.STRING
    names = _names_of_content(template)
    if not any(_is_content(value, names) for value in _values_read_as_lists(template)):
        return ContentFormat.STRING
    for test in template.find_all(nodes.Test):
        if test.name == "string" and _is_content(test.node, names):
            return ContentFormat.BOTH
    return ContentFormat.PARTS


class _GenerationTag(Extension):
    """The tag ``generation`` of transformers, which only marks the text of the model."""

    def __init__(self, environment: Environment) -> None:
        self.tags = {"generation"}
        super().__init__(environment)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])


def _values_read_as_lists(template: nodes.Template) -> Sequence[nodes.Node | None]:
    """Expressions over which a template iterates, or of which it takes a numbered item."""
    values: list[nodes.Node | None] = [loop.iter for loop in template.find_all(nodes.For)]
    for item in template.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, int):
            values.append(item.node)
    for each in template.find_all(nodes.Filter):
        if each.name in ("map", "selectattr", "rejectattr"):
            values.append(each.node)
    return values


def _names_of_content(template: nodes.Template) -> set[str]:
    """Names of variables and parameters of macros whose value may be the content of a message."""
    values: list[tuple[nodes.Node, nodes.Node]] = []
    for each in template.find_all(nodes.Assign):
        values.append((each.target, each.node))
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            values += zip(macro.args, call.args, strict=False)
            values += [(nodes.Name(each.key, "param"), each.value) for each in call.kwargs]
    names: set[str] = set()
    while True:
        found = {
            target.name
            for target, value in values
            if isinstance(target, nodes.Name) and _is_content(value, names)
        }
        if found <= names:
            return names
        names |= found


def _is_content(value: nodes.Node | None, names: set[str]) -> bool:
    """Whether the value of an expression may be the content of a message, or a filtered form of it.

    Args:
        value: the expression.
        names: variables whose value may be the content.
    """
    match value:
        case nodes.Name():
            return value.name in names
        case nodes.Getattr():
            return value.attr == "content"
        case nodes.Getitem(arg=nodes.Slice()) | nodes.Filter():
            return _is_content(value.node, names)
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
        case nodes.CondExpr():
            return _is_content(value.expr1, names) or _is_content(value.expr2, names)
        case nodes.Or():
            return _is_content(value.left, names) or _is_content(value.right, names)
    return False
