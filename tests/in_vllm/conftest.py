"""Tools for tests of Draftwise inside vLLM, in an environment with both (``make test-vllm``)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftwise.integrations.vllm.command import WORKER
from draftwise.models.loading import locate

PROCESS = Path(__file__).with_name("engine_process.py")


class Answers:
    """The output of an engine's process: its tokens and counters."""

    def __init__(self, values):
        vars(self).update(values)


class EngineError(Exception):
    """vLLM failed to start or to generate."""


def answer(engine, prompts, params, runner=1, **extra_arguments):
    """Run an engine in its own process, with the given version of vLLM's model runner."""
    wanted = {"engine": engine, "prompts": prompts, "params": params, **extra_arguments}
    done = subprocess.run(
        [sys.executable, str(PROCESS), str(runner)],
        input=json.dumps(wanted) + "\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = done.stdout.splitlines()
    if not lines:
        raise EngineError(done.stderr[-4000:])
    values = json.loads(lines[-1])
    if "error" in values:
        raise EngineError(values["error"] + done.stderr[-2000:])
    return Answers(values)


def steered(engine, draft, settings, num_speculative_tokens=5, **speculative):
    """The arguments of an engine with Draftwise."""
    return {
        **engine,
        "speculative_config": {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": num_speculative_tokens,
            **speculative,
        },
        "additional_config": {"draftwise": settings},
        "worker_cls": WORKER,
        "async_scheduling": False,
    }


def steered_texts(engine, settings, num_speculative_tokens=5):
    """The arguments of an engine with Draftwise and without a draft model."""
    return {
        **engine,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": num_speculative_tokens,
        },
        "additional_config": {"draftwise": settings},
        "worker_cls": WORKER,
        "async_scheduling": False,
    }


@pytest.fixture(scope="session")
def zoo():
    """Folders of the bundled models by name."""
    return {name: locate(f"zoo:{name}", "model") for name in ("target", "draft", "companion")}
