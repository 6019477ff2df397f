"""Turns the cross-references of docstrings (``:class:`Name```) into links of the site."""

from __future__ import annotations

import logging
import re
from typing import Any

import griffe

log = logging.getLogger("mkdocs.hooks.docstring_roles")

_ROLE = re.compile(r":(?:class|meth|attr|func|mod):`(~?)([\w.]+)`")
_PACKAGE = "draftwise"


class DocstringRoles(griffe.Extension):  # type: ignore[misc]
    """Replaces roles when a package was read. A name of this package must exist.

    A name without a page of its own is shown as code.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace the roles in all docstrings of a package."""
        if pkg.name == _PACKAGE:
            _replace_all(pkg)


def _replace_all(scope: griffe.Object) -> None:
    if scope.docstring is not None:
        scope.docstring.value = _ROLE.sub(
            lambda role: _link(scope, role[2], short=bool(role[1])), scope.docstring.value
        )
    for member in scope.members.values():
        if not member.is_alias:
            _replace_all(member)


def _link(scope: griffe.Object, name: str, *, short: bool) -> str:
    path = _path(scope, name)
    text = name.rpartition(".")[2] if short else name
    if path is None:
        log.warning("%s refers to %s, which does not exist", scope.path, name)
        return f"`{text}`"
    return f'<autoref optional identifier="{path}"><code>{text}</code></autoref>'


def _path(scope: griffe.Object, name: str) -> str | None:
    """The full name of what a docstring refers to; ``None`` if this package has no such thing."""
    first, *rest = name.split(".")
    around: Any = scope
    while around is not None:
        if first in around.members:
            return ".".join([_canonical(around.members[first]), *rest])
        around = around.parent
    if first != _PACKAGE:  # of another package
        return name
    try:
        found = scope.package.get_member(".".join(rest))
    except KeyError:
        return None
    return _canonical(found)


def _canonical(found: Any) -> str:
    return str(found.target_path if found.is_alias else found.path)
