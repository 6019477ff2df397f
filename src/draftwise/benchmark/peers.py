"""Other engines as contenders, each in its own process and environment.

The interpreter of the peer's environment executes a script (``peer_worker.py``) that does not
import Draftwise. The script reads one JSON object per line and replies with one. The first request
has the settings. Each further request is a batch, and its reply has the tokens and the time
measured in that process.
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
from draftwise.benchmark.peer_modes import PeerMode, modes_of, peer_engine
from draftwise.errors import InvalidParameterError, PeerError
from draftwise.params import SamplingParams

_WORKER = Path(__file__).parent / "peer_worker.py"
# Timeouts: loading and compiling a model, and answering a batch.
_START_SECONDS, _TURN_SECONDS = 900.0, 900.0
_END_SECONDS = 20.0
# The last line of a Python traceback: "ValueError: …", with an optional module or process prefix.
_ERROR = re.compile(r"(?:^|[\s.])[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b")
# ``None`` on platforms without these signals.
_PAUSE, _RESUME, _KILL = (getattr(signal, name, None) for name in ("SIGSTOP", "SIGCONT", "SIGKILL"))

# Part of vLLM's message about an error in another of its processes.
_SEE_ABOVE = "See root cause above"


@dataclass(frozen=True)
class PeerModels:
    """Models and limits of peers.

    Attributes:
        target: folder or hub id of the target.
        draft: folder or hub id of the draft; ``None`` leaves out all modes with a draft model.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        threads: number of compute threads.
        max_model_len: maximum number of tokens of prompt and answer.
        max_batch_size: maximum number of prompts at once.
        companion: folder or hub id of the companion, for peers that use one.
        stop_token_ids: the target's end-of-sequence tokens, for requests that stop at them.
        device: type of the device on which Draftwise runs, such as ``"cpu"``.
        head: folder of an EAGLE-3 head; ``None`` leaves out all modes with a head.
    """

    target: str
    draft: str | None
    dtype: str
    threads: int
    max_model_len: int
    max_batch_size: int
    companion: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    device: str = "cpu"
    head: str | None = None


class Peer:
    """Another engine in its own process, started on its first turn.

    Its processes are paused between its turns. Otherwise threads that spin while waiting for work
    would slow down the other contenders.

    Attributes:
        name: name of the engine, with the label of its mode.
        learns: always false.
    """

    learns = False

    def __init__(
        self, engine: str, mode: PeerMode, interpreter: str, models: PeerModels, log: Path
    ) -> None:
        """Create a peer without starting its process.

        Args:
            engine: one of :data:`~draftwise.benchmark.peer_modes.PEERS`.
            mode: configuration of the engine.
            interpreter: Python interpreter of the environment that has the engine.
            models: models and limits.
            log: file for the engine's output.
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
        self._info: dict[str, Any] = {}

    def refusal(self, batch_size: int, params: SamplingParams) -> str | None:
        """Reason why this mode does not support the batch size or the sampling parameters."""
        return self._mode.refusal(batch_size, params)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Turn:
        """Answer all prompts at once.

        Raises:
            PeerError: the engine did not start, runs on another device than Draftwise, failed, or
                timed out; includes its last output.
        """
        if self._process is None:
            self._start()
        self._signal(_RESUME)
        first = params[0]
        reply = self._request(
            {
                "prompts": list(prompts),
                "max_tokens": first.max_tokens,
                "temperature": first.temperature,
                "top_p": first.top_p,
                "top_k": first.top_k,
                "seeds": None if first.seed is None else [each.seed for each in params],
                "stop_token_ids": () if first.ignore_eos else self._models.stop_token_ids,
            },
            _TURN_SECONDS,
        )
        self._signal(_PAUSE)
        try:
            answers = [[int(token) for token in answer] for answer in reply["answers"]]
            counts = {str(k): float(v) for k, v in reply.get("counts", {}).items()}
            seconds = float(reply["seconds"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(f"sent an invalid reply: {error!r}") from error
        if len(answers) != len(prompts):
            raise self._error(f"answered {len(answers)} of {len(prompts)} prompts")
        return Turn(seconds, answers, counts=counts)

    def describe(self) -> dict[str, Any]:
        """Versions reported at its start, the data type of its weights, and its settings."""
        own = {"dtype": self._models.dtype, "drafts": self._mode.drafts}
        return {**self._info, **own, **self._mode.settings}

    def close(self) -> None:
        """Stop its process."""
        self._end(_END_SECONDS)

    def _start(self) -> None:
        models = self._models
        settings = vars(models) | dict(self._mode.settings)
        settings["draft"] = {"model": models.draft, "head": models.head}.get(self._mode.drafts)
        environment = os.environ | {"OMP_NUM_THREADS": str(self._models.threads)}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log.open("w", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    [self._interpreter, str(_WORKER), peer_engine(self._engine).module],
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
        self._info = self._request(settings, _START_SECONDS)
        device = self._info.get("device", self._models.device)
        if device != self._models.device:
            self._end(_END_SECONDS)
            raise self._error(
                f"runs on the device {device!r}, and Draftwise on {self._models.device!r}; "
                "choose another --device"
            )

    def _request(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            while True:
                line = self._replies.get(timeout=seconds)
                if line is None:
                    raise BrokenPipeError
                if line.startswith("{"):  # skips other output of the engine
                    reply: dict[str, Any] = json.loads(line)
                    break
        except (BrokenPipeError, queue.Empty, json.JSONDecodeError) as error:
            why = "timed out" if isinstance(error, queue.Empty) else "exited"
            self._end(0.0)
            raise self._error(f"{why}; its last output: {last_error(self._printed())}") from error
        if "error" in reply:
            self._end(0.0)
            message = str(reply["error"])
            raise self._error(last_error(self._printed() if _SEE_ABOVE in message else message))
        return reply

    def _end(self, seconds: float) -> None:
        """Stop the process by closing its input, and kill it after ``seconds``."""
        self._signal(_RESUME)
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
        # Processes that it started may have outlived it. They would use the processors, and keep
        # the output open that the reader waits for.
        _signal_group(process, _KILL)
        if self._reader is not None:
            self._reader.join(_END_SECONDS)

    def _signal(self, number: signal.Signals | None) -> None:
        if self._process is not None:
            _signal_group(self._process, number)

    def _printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _error(self, why: str) -> PeerError:
        return PeerError(self.name, f"{why} (its log is {self._log})")


def _signal_group(process: subprocess.Popen[str], number: signal.Signals | None) -> None:
    """Send a signal to an engine and all processes that it started."""
    if number is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def last_error(text: str) -> str:
    """Return the last line of a text that names an error, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.search(line) and _SEE_ABOVE not in line]
    return (named or lines or ["nothing"])[-1]


def _read_lines(stream: IO[str], replies: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            replies.put(line)
    replies.put(None)


def peers(
    names: Sequence[str], models: PeerModels, logs: Path, lookup_lengths: Sequence[int] = ()
) -> list[Peer]:
    """Create the peers of all modes of some engines.

    Args:
        names: names of engines, with an optional interpreter if the engine is installed in another
            environment: ``vllm=/opt/vllm/bin/python``.
        models: models and limits.
        logs: folder for the engines' output.
        lookup_lengths: draft lengths of the modes that look drafts up in the text; empty to leave
            these modes out.

    Raises:
        InvalidParameterError: an engine is unknown or named twice, or requires a draft model that
            is missing.
    """
    found = []
    engines = [text.partition("=")[0] for text in names]
    for text, engine in zip(names, engines, strict=True):
        if engines.count(engine) > 1:
            raise InvalidParameterError("peers", f"{engine!r} is named more than once")
        interpreter = text.partition("=")[2]
        has_draft, has_head = models.draft is not None, models.head is not None
        for mode in modes_of(engine, has_draft, lookup_lengths, has_head):
            log = logs / f"{engine} {mode.label}".strip().replace(" ", "-")
            found.append(
                Peer(engine, mode, interpreter or sys.executable, models, log.with_suffix(".log"))
            )
    return found
