"""Runs the whole matrix of tests, from where the last run of the same sources stopped.

Results are kept in ``.test-results/<hash of the sources>``. Tests that passed are not run again
until a file of the working tree changes. Shards may be run one after another or on several
machines::

    python tools/exhaustive.py --shard 3/8
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".test-results"
# pytest's own: all passed, and nothing was left to run.
GOOD = {0, 5}


def source_hash() -> str:
    """Of the working tree with all changes, by an index of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GIT_INDEX_FILE": str(Path(folder, "index"))}

        def git(*arguments: str) -> str:
            command = ("git", "-C", str(ROOT), *arguments)
            return subprocess.run(
                command, env=environment, check=True, text=True, stdout=subprocess.PIPE
            ).stdout.strip()

        git("add", "--all")
        return git("write-tree")


def run(
    name: str, python: str, folder: Path, options: list[str], variables: dict[str, str]
) -> bool:
    """Run the tests that an environment can run; whether all of them passed."""
    runs = len(list(folder.glob(f"{name}-*.jsonl")))
    record = folder / f"{name}-{runs:03}.jsonl"
    print(f"\n{name}: results go to {record.relative_to(ROOT)}", flush=True)
    command = [python, "-m", "pytest", f"--record={record}", *options]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode in GOOD


def main() -> None:
    """Run the tests of both environments, and the CUDA tests with Triton's interpreter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", metavar="K/N", help="every Nth test, starting with the Kth")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--vllm-python",
        default=".venv-vllm/bin/python",
        help="interpreter that has vLLM (default: %(default)s)",
    )
    arguments = parser.parse_args()
    options = [] if arguments.shard is None else [f"--shard={arguments.shard}"]
    folder = RESULTS / source_hash()
    folder.mkdir(parents=True, exist_ok=True)
    parallel = [f"--numprocesses={arguments.workers}", "--dist=worksteal"]
    passed = [
        run("tests", sys.executable, folder, [*parallel, *options], {}),
        run("vllm", arguments.vllm_python, folder, ["tests/in_vllm", *options], {}),
        run(
            "interpreted",
            arguments.vllm_python,
            folder,
            [*parallel, "tests/cuda/kernels", *options],
            {"TRITON_INTERPRET": "1"},
        ),
    ]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
