"""Processes that start quickly: forks of a process that has imported PyTorch and nothing else.

Importing PyTorch and transformers takes most of the time of a short program. A few tests of each
kind start a new interpreter, as users do.
"""

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PATIENCE_SECONDS = 120
IMPORTED = (
    "draftwise.cli",
    "draftwise.cli.generate_run",
    "draftwise.llm",
    "draftwise.serving.run",
    "draftwise.serving.worker",
    "transformers.models.llama.modeling_llama",
)
COMMAND = "from draftwise.cli import main; main()"


@functools.cache
def context():
    """A context of ``multiprocessing`` whose processes are such forks."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([*IMPORTED])
    return made


def run(*arguments, program=COMMAND, new_session=False):
    """Run a program, the command ``draftwise`` by default, with the environment of this process.

    Args:
        *arguments: of the program.
        program: its source.
        new_session: whether to run it in a session of its own.

    Returns:
        A ``CompletedProcess``.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = context().Process(
            target=_run, args=(program, arguments, new_session, files, dict(os.environ))
        )
        process.start()
        process.join(PATIENCE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, PATIENCE_SECONDS)
        return subprocess.CompletedProcess(
            arguments, process.exitcode, *(file.read_text() for file in files)
        )


def _run(program, arguments, new_session, files, environment):
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["draftwise", *arguments]
    exec(program, {"__name__": "__main__"})
