"""Makes links from the documentation to other files of the repository work on the site.

Where ``repo_url`` is set in ``mkdocs.yml``, they lead there. Otherwise every linked file gets a
page of the site with its text, and every linked folder a page with a list of its files.
``README.md`` is the home page, and ``CHANGELOG.md`` and ``CONTRIBUTING.md`` are pages of their own.
Links whose text is a file's name get the title of the page, as in the navigation.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.repository_links")

# Pages made of files outside the documentation's folder.
INCLUDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_SHOWN_FOLDER = "source"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FILE_NAME_LINK = re.compile(r"\[(?:docs/)?[\w/]+\.md\]\(([\w/.]+\.md)(?=[#)])")
_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".json": "json", ".md": "markdown"}
_LONGEST_PAGE = 200_000  # characters


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the included pages, and a page for each file and folder that a page links to."""
    root = Path(config.docs_dir).parent
    for name, page in INCLUDED.items():
        text = (root / name).read_text()
        files.append(File.generated(config, page, content=text))
    if config.repo_url:
        return files
    tracked = _tracked_files(root)
    for target in sorted(_linked_paths(files, tracked)):
        text = _page_of(root, target, tracked)
        shown = File.generated(
            config, _shown(target), content=text, inclusion=InclusionLevel.NOT_IN_NAV
        )
        files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files outside the documentation's folder."""
    here = posixpath.dirname(page.file.src_uri)
    titles = _titles(config.nav)

    def titled(link: re.Match[str]) -> str:
        title = titles.get(posixpath.normpath(posixpath.join(here, link[1])))
        return link[0] if title is None else f"[{title}]({link[1]}"

    def rewritten(link: re.Match[str]) -> str:
        path, section = link[1], link[2] or ""
        outside = _outside(page.file.src_uri, path)
        if outside is None:
            return link[0]
        if outside.startswith("docs/"):
            target = outside.removeprefix("docs/")
        elif outside in INCLUDED:
            target = INCLUDED[outside]
        elif config.repo_url:
            return f"{config.repo_url.rstrip('/')}/blob/main/{outside}{section}"
        else:
            target = _shown(outside)
        if files.get_file_from_path(target) is None:
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, path)
        return posixpath.relpath(target, here or ".") + section

    return _FILE_NAME_LINK.sub(titled, _outside_fences(markdown, rewritten))


def _titles(nav: object) -> dict[str, str]:
    """Titles of pages by their files, from the navigation."""
    found: dict[str, str] = {}
    for entry in nav if isinstance(nav, list) else []:
        for title, value in entry.items() if isinstance(entry, dict) else []:
            found |= {value: title} if isinstance(value, str) else _titles(value)
    return found


def _outside_fences(markdown: str, rewritten: Callable[[re.Match[str]], str]) -> str:
    """Replace links everywhere but in blocks of code."""
    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewritten, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewritten, markdown[end:])])


def _outside(page: str, link: str) -> str | None:
    """The path in the repository that a page's link names; ``None`` if it is in the docs folder."""
    if page in INCLUDED.values():  # their links start at the repository's root
        return posixpath.normpath(link)
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def _linked_paths(files: Files, tracked: list[str]) -> Iterator[str]:
    """Files and folders outside the documentation that its pages link to, and files of folders."""
    seen = set()
    for file in files.documentation_pages():
        for link in _LINK.finditer(_FENCE.sub("", file.content_string)):
            path = _outside(file.src_uri, link[1])
            if path is None or path in INCLUDED or path.startswith("docs/"):
                continue
            found = {each for each in tracked if each == path or each.startswith(f"{path}/")}
            seen |= found | ({path} if found else set())
    yield from seen


def _tracked_files(root: Path) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):  # an archive without git's folder
        found = (path for path in root.rglob("*") if path.is_file())
        return sorted(path.relative_to(root).as_posix() for path in found)
    return sorted(line for line in listed.stdout.splitlines() if (root / line).is_file())


def _shown(path: str) -> str:
    return f"{_SHOWN_FOLDER}/{path}.md"


def _page_of(root: Path, path: str, tracked: list[str]) -> str:
    """Markdown that shows a file or lists a folder; source pages are not searched."""
    head = (
        f"---\ntitle: {posixpath.basename(path)}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    )
    if path not in tracked:
        inside = [each for each in tracked if each.startswith(f"{path}/")]
        start = posixpath.dirname(_shown(path))
        links = (
            f"- [`{each.removeprefix(path + '/')}`]({os.path.relpath(_shown(each), start)})"
            for each in inside
        )
        return head + "\n".join(links) + "\n"
    text = (root / path).read_text(errors="replace")
    if len(text) > _LONGEST_PAGE:
        return head + f"The file has {len(text):,} characters, too many to show here.\n"
    longest = max((len(ticks) for ticks in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    language = _LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"{head}{fence} {language}\n{text.rstrip()}\n{fence}\n"
