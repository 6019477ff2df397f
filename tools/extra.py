"""Prints the requirements of an extra, for an environment without Draftwise's own requirements.

python tools/extra.py docs
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print one requirement per line; none has spaces."""
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    print("\n".join(each.replace(" ", "") for each in extras[sys.argv[1]]))


if __name__ == "__main__":
    main()
