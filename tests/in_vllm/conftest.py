"""Tools for tests of Draftwise inside vLLM, in an environment with both (``make test-vllm``)."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftwise.checkpoints.source import locate
from draftwise.integrations.vllm.command import WORKER

PROCESS = Path(__file__).with_name("engine_process.py")
# vLLM would bind the threads of all engines that run at the same time to the same cores.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class EngineError(Exception):
    """vLLM failed to start or to generate."""


class Engines:
    """A process that has imported vLLM, and runs one engine after another.

    Args:
        runner: version of vLLM's model runner.
    """

    def __init__(self, runner):
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(runner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | ONE_THREAD,
        )

    def run(self, wanted):
        """The reply, and what vLLM printed to it."""
        self._log.truncate(0)
        try:
            print(json.dumps(wanted), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            reply = ""  # it failed to start
        else:
            reply = self._process.stdout.readline()
        self._log.seek(0)
        return reply, self._log.read()

    def close(self):
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._log.close()


started = {}  # by version of the model runner


@pytest.fixture(scope="session", autouse=True)
def end_of_engines():
    """End the processes that tests have started."""
    yield
    while started:
        started.popitem()[1].close()


def answer(engine, prompts, params, runner=1, **extra_arguments):
    """Run an engine in a process of its own, with the given version of vLLM's model runner.

    Args:
        engine: arguments of ``vllm.LLM``.
        prompts: token ids of each prompt.
        params: arguments of ``SamplingParams``.
        runner: the version.
        **extra_arguments: of the process, see ``engine_process.py``.

    Returns:
        The engine's tokens and counters.
    """
    if runner not in started:
        started[runner] = Engines(runner)
    wanted = {"engine": engine, "prompts": prompts, "params": params, **extra_arguments}
    reply, log = started[runner].run(wanted)
    if not reply:
        raise EngineError(log[-4000:])
    values = json.loads(reply)
    if "error" in values:
        raise EngineError(values["error"] + log[-2000:])
    return SimpleNamespace(**values)


def steered(engine, draft, settings, num_speculative_tokens=5, **speculative):
    """The arguments of an engine with Draftwise; ``draft`` is ``None`` without a draft model."""
    method = {"method": "ngram"} if draft is None else {"method": "draft_model", "model": draft}
    return {
        **engine,
        "speculative_config": {
            **method,
            "num_speculative_tokens": num_speculative_tokens,
            **speculative,
        },
        "additional_config": {"draftwise": {"guard": False, **settings}},
        "worker_cls": WORKER,
        "async_scheduling": False,
    }


@pytest.fixture(scope="session")
def zoo():
    """Folders of the bundled models by name."""
    return {name: locate(f"zoo:{name}", "model") for name in ("target", "draft", "companion")}
