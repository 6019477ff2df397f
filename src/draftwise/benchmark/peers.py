"""Other engines as contenders, each in a process and an environment of its own.

A peer is run by a script (``peer_worker.py``) that the interpreter of the peer's environment
executes; it needs nothing of ours. It reads one JSON object per line and answers with
one: first its settings, then for every call the tokens and the time it took by its own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draftwise.benchmark.contenders import Turn
from draftwise.errors import InvalidParameterError, PeerError
from draftwise.params import SamplingParams

_WORKER = Path(__file__).parent / "peer_worker.py"
# Loading and compiling a model; answering a batch.
_START_SECONDS, _TURN_SECONDS = 900.0, 900.0
_END_SECONDS = 20.0
# As Python ends a traceback: "ValueError: …", perhaps behind the name of a module or a process.
_ERROR = re.compile(r"(?:^|[\s.])[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b")
# Where there are such signals.
_PAUSE, _GO_ON = (getattr(signal, name, None) for name in ("SIGSTOP", "SIGCONT"))

# What vLLM says of an error in another of its processes.
_ELSEWHERE = "See root cause above"


@dataclass(frozen=True)
class PeerMode:
    """A way to run a peer.

    Attributes:
        label: added to the peer's name; empty for target-only decoding.
        settings: for its worker.
        largest_batch: it can answer, ``None`` for any.
        greedy_only: whether it is wrong or unavailable at temperature above 0.
    """

    label: str
    settings: Mapping[str, Any]
    largest_batch: int | None = None
    greedy_only: bool = False


# What users would pick: the target alone, and its speculation with its usual settings.
PEERS: dict[str, tuple[PeerMode, ...]] = {
    "transformers": (
        PeerMode("", {"draft": False}),
        PeerMode("assisted", {"draft": True}, largest_batch=1),
    ),
    "vllm": (
        PeerMode("", {"draft": False}),
        PeerMode("draft 5", {"draft": True, "num_speculative_tokens": 5}),
    ),
    # Ours inside vLLM, where that is installed with it.
    "vllm-draftwise": (
        PeerMode("", {"draft": True, "num_speculative_tokens": 5, "steered": True}),
    ),
    "openvino": (
        PeerMode("", {"draft": False}),
        PeerMode("draft 3", {"draft": True, "num_speculative_tokens": 3}),
        PeerMode("draft 5", {"draft": True, "num_speculative_tokens": 5}),
        PeerMode("confidence", {"draft": True, "confidence_threshold": 0.4}),
    ),
}


@dataclass(frozen=True)
class PeerModels:
    """What peers load.

    Attributes:
        target: folder or hub id.
        draft: likewise; ``None`` leaves out all modes with a draft.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        threads: to compute with.
        max_model_len: prompt and answer together.
        max_batch_size: prompts at once.
        companion: folder or hub id, for those who ask one.
    """

    target: str
    draft: str | None
    dtype: str
    threads: int
    max_model_len: int
    max_batch_size: int
    companion: str | None = None


class Peer:
    """Another engine in its own process, started when it is first asked.

    Between its turns its processes are stopped: threads that wait for work by spinning would take
    the cores from whoever has the turn.

    Attributes:
        name: of the engine and the way it is run.
        learns: no.
    """

    learns = False

    def __init__(
        self, engine: str, mode: PeerMode, interpreter: str, models: PeerModels, log: Path
    ) -> None:
        """Prepare, start nothing.

        Args:
            engine: one of :data:`PEERS`.
            mode: how it is run.
            interpreter: of the environment in which it is installed.
            models: what it loads.
            log: file for what it prints.
        """
        self.name = f"{engine} {mode.label}".strip()
        self._engine = engine
        self._mode = mode
        self._interpreter = interpreter
        self._models = models
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._reader: threading.Thread | None = None
        self._said: dict[str, Any] = {}

    def can_run(self, batch_size: int, temperature: float) -> bool:
        """Whether this mode serves such a batch."""
        too_large = self._mode.largest_batch is not None and batch_size > self._mode.largest_batch
        return not too_large and not (temperature > 0 and self._mode.greedy_only)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Turn:
        """Answer all prompts at once.

        Raises:
            PeerError: it cannot be started, failed, or took too long; says what it printed last.
        """
        if self._process is None:
            self._start()
        self._signal(_GO_ON)
        first = params[0]
        reply = self._ask(
            {
                "prompts": list(prompts),
                "max_tokens": first.max_tokens,
                "temperature": first.temperature,
                "top_p": first.top_p,
                "top_k": first.top_k,
                "seed": first.seed,
            },
            _TURN_SECONDS,
        )
        self._signal(_PAUSE)
        try:
            answers = [[int(token) for token in answer] for answer in reply["answers"]]
            counts = {str(k): float(v) for k, v in reply.get("counts", {}).items()}
            return Turn(float(reply["seconds"]), answers, counts=counts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(f"answered something else: {error!r}") from error

    def describe(self) -> dict[str, Any]:
        """What it said of itself when it started."""
        return self._said | dict(self._mode.settings)

    def close(self) -> None:
        """End its process."""
        self._end(_END_SECONDS)

    def _start(self) -> None:
        settings = vars(self._models) | dict(self._mode.settings)
        if not self._mode.settings["draft"]:
            settings["draft"] = None
        else:
            settings["draft"] = self._models.draft
        environment = os.environ | {"OMP_NUM_THREADS": str(self._models.threads)}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log.open("w", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    [self._interpreter, str(_WORKER), self._engine],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise PeerError(self.name, f"cannot run {self._interpreter!r}: {error}") from error
        assert self._process.stdout is not None
        self._replies = queue.Queue()
        self._reader = threading.Thread(
            target=_read_lines, args=(self._process.stdout, self._replies), daemon=True
        )
        self._reader.start()
        self._said = self._ask(settings, _START_SECONDS)

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            while True:
                line = self._replies.get(timeout=seconds)
                if line is None:
                    raise BrokenPipeError
                if line.startswith("{"):  # whatever else it prints
                    reply: dict[str, Any] = json.loads(line)
                    break
        except (BrokenPipeError, queue.Empty, json.JSONDecodeError) as error:
            why = "took too long" if isinstance(error, queue.Empty) else "ended"
            self._end(0.0)
            raise self._error(f"{why}; it printed last: {last_error(self._printed())}") from error
        if "error" in reply:
            self._end(0.0)
            told = str(reply["error"])
            raise self._error(last_error(self._printed() if _ELSEWHERE in told else told))
        return reply

    def _end(self, seconds: float) -> None:
        """End the process: it ends at the end of its input, or is killed after so many seconds."""
        self._signal(_GO_ON)
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join()

    def _signal(self, number: signal.Signals | None) -> None:
        """To the engine and all processes that it started."""
        if self._process is not None and number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _error(self, why: str) -> PeerError:
        return PeerError(self.name, f"{why} (its log is {self._log})")


def last_error(text: str) -> str:
    """The last line of a text that names an error, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.search(line) and _ELSEWHERE not in line]
    return (named or lines or ["nothing"])[-1]


def _read_lines(stream: IO[str], replies: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            replies.put(line)
    replies.put(None)


def peers(names: Sequence[str], models: PeerModels, logs: Path) -> list[Peer]:
    """All ways to run some engines.

    Args:
        names: of engines, each with the interpreter of its environment if that is not ours:
            ``vllm=/opt/vllm/bin/python``.
        models: what they load.
        logs: folder for what they print.

    Raises:
        InvalidParameterError: an engine is not known.
    """
    found = []
    for text in names:
        engine, _, interpreter = text.partition("=")
        if engine not in PEERS:
            known = ", ".join(PEERS)
            raise InvalidParameterError("peers", f"{engine!r} is not one of {known}")
        for mode in PEERS[engine]:
            if mode.settings["draft"] and models.draft is None:
                continue
            log = logs / f"{engine} {mode.label}".strip().replace(" ", "-")
            found.append(
                Peer(engine, mode, interpreter or sys.executable, models, log.with_suffix(".log"))
            )
    return found
