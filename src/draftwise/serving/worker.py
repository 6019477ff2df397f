"""The engine's process: executes commands between steps and sends a report after each step."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from typing import Any, TextIO

from draftwise.core.types import PARTS
from draftwise.engine.prefix_cache import PrefixStats
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError, DraftwiseWarning, EngineError
from draftwise.llm import LLM
from draftwise.outputs import SpeculationStats
from draftwise.policies import POLICIES
from draftwise.processes import end_quickly, end_with_parent
from draftwise.serving.errors import EngineFaultError, EngineLostError
from draftwise.serving.grammar_thread import GrammarThread
from draftwise.serving.messages import (
    Add,
    Cancel,
    Command,
    DraftSteps,
    EngineLoad,
    EngineOutputs,
    Failed,
    Piece,
    Ping,
    Ready,
    StepStats,
    UpdateSpeculation,
)
from draftwise.serving.settings import EngineSettings

_LOG = logging.getLogger("draftwise.serving")


def run(connection: Connection, settings: EngineSettings) -> None:
    """Load the models and run the engine until a stop command or the end of the connection."""
    # The terminal sends ctrl-C to all processes, but only the server decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    end_quickly()
    try:
        with _our_warnings() as warned:
            llm = load(settings)
    except DraftwiseError as error:
        connection.send(Failed(error, at_start=True))
        return
    try:
        EngineWorker(connection, llm, warned).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        llm.close()


def load(settings: EngineSettings) -> LLM:
    """Load the models and create the engine.

    Raises:
        DraftwiseError: a model cannot be loaded, or a setting is invalid.
    """
    arguments = {item.name: getattr(settings, item.name) for item in fields(settings)}
    num_threads = arguments.pop("num_threads")
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    return LLM(**arguments)


@contextmanager
def _our_warnings() -> Iterator[list[str]]:
    """Collect each :class:`DraftwiseWarning` as a line; this process has no log to write to."""
    lines: list[str] = []
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, DraftwiseWarning):
                lines.append(" ".join(str(message).split()))
            else:
                show_others(message, category, filename, lineno, file, line)

        warnings.simplefilter("always", DraftwiseWarning)
        warnings.showwarning = show
        yield lines


class EngineWorker:
    """Runs an engine by the commands of a connection."""

    def __init__(self, connection: Connection, llm: LLM, warned: Sequence[str] = ()) -> None:
        """Create the worker.

        Args:
            connection: connection for commands and reports.
            llm: the loaded models, used only by this worker.
            warned: warnings about the models, one line each.
        """
        self._connection = connection
        self._llm = llm
        self._warned = warned
        self._requests: dict[int, Request] = {}
        self._keys: dict[int, int] = {}
        self._prefixes = PrefixStats()
        self._counted: dict[int, SpeculationStats] = {}
        self._drafts: dict[int, DraftSteps] = {}
        self._grammars = GrammarThread(llm.engine.grammars)
        self._preparing: set[int] = set()
        self._stopped = False

    def run(self) -> None:
        """Send :class:`Ready`, then execute commands and steps until a stop command.

        Raises:
            EOFError: the connection was closed.
        """
        llm = self._llm
        roles = {"target": llm.target, "draft": llm.draft, "companion": llm.companion}
        self._connection.send(
            Ready(
                llm.target.name,
                llm.engine.max_model_len,
                llm.engine.max_request_tokens,
                llm.target.model.vocab_size,
                llm.target.tokenizer,
                tuple(sorted(llm.target.eos_token_ids)),
                {role: each.fingerprint for role, each in roles.items() if each is not None},
                tuple(dict.fromkeys(self._warned)),
            )
        )
        while not self._stopped:
            outputs = self._take_commands()
            if self._requests:
                try:
                    self._step(outputs)
                except Exception as error:
                    # The batch cannot be continued, so report the error before the process ends.
                    reason = EngineLostError("engine", f"a step failed: {error!r}")
                    self._connection.send(Failed(reason, at_start=False))
                    raise
            outputs.load = self._load
            self._connection.send(outputs)

    def _take_commands(self) -> EngineOutputs:
        """Execute all pending commands; if there are no requests, wait for a command."""
        outputs = EngineOutputs()
        timeout = 0 if self._requests else None
        while not self._stopped:
            ready = wait([self._connection, self._grammars.readable], timeout)
            if not ready:
                break
            if self._connection in ready:
                command: Command = self._connection.recv()
                self._execute(command, outputs)
            if self._grammars.readable in ready:
                self._add_prepared(outputs)
            timeout = 0
        return outputs

    def _execute(self, command: Command, outputs: EngineOutputs) -> None:
        match command:
            case Add():
                self._add(command, outputs)
            case Cancel(key):
                self._preparing.discard(key)
                self._grammars.cancel(key)
                request = self._requests.get(key)
                if request is not None:
                    self._llm.engine.cancel(request)
                    self._forget(request)
                    self._report_failed(outputs)
            case UpdateSpeculation(call, changes):
                try:
                    if changes:
                        self._llm.change_speculation(**changes)
                    outputs.answers.append((call, self._describe()))
                except Exception as error:
                    outputs.answers.append((call, _typed(error)))
                    self._report_failed(outputs)
            case Ping():
                pass  # the outputs are sent in any case
            case _:
                self._stopped = True

    def _report_failed(self, outputs: EngineOutputs) -> None:
        """Report the requests that ended because a command finished a started step, which failed.

        The next step reports those that ended for a reason of their own.
        """
        for request in list(self._requests.values()):
            if isinstance(request.error, EngineError):
                error = EngineFaultError("engine", "a step failed while another request ended")
                outputs.refused.append((self._keys[request.request_id], error))
                self._forget(request)

    def _add_prepared(self, outputs: EngineOutputs) -> None:
        """Add the requests whose grammars have been compiled, unless they were cancelled."""
        for command, error in self._grammars.take():
            if command.key not in self._preparing:
                continue
            self._preparing.remove(command.key)
            if error is None:
                self._add(command, outputs)
            else:
                outputs.refused.append((command.key, _typed(error)))

    def _add(self, command: Add, outputs: EngineOutputs) -> None:
        """Add a request to the engine, now or when its grammar has been compiled."""
        try:
            if self._grammars.needs(command):
                self._preparing.add(command.key)
                self._grammars.submit(command)
                return
            request = self._llm.engine.add(
                command.prompt,
                command.prompt_ids,
                command.params,
                command.speculation,
            )
        except Exception as error:
            # The request was not queued, so the error does not affect other requests.
            outputs.refused.append((command.key, _typed(error)))
            return
        self._requests[command.key] = request
        self._keys[request.request_id] = command.key
        self._counted[request.request_id] = SpeculationStats()
        speculation = self._llm.speculation
        if speculation is not None:
            most = speculation.num_speculative_tokens
            self._drafts[request.request_id] = DraftSteps(most)
        outputs.added.append(command.key)

    def _step(self, outputs: EngineOutputs) -> None:
        """Run one step of the engine and add its results to the outputs."""
        engine = self._llm.engine
        advanced = [each for each in engine.step() if each.request_id in self._keys]
        verified: list[int] = []
        accepted: list[int] = []
        totals = SpeculationStats()
        for request in advanced:
            before = self._counted[request.request_id]
            now = request.stats
            num_verified = now.num_verified - before.num_verified
            num_accepted = now.num_accepted - before.num_accepted
            _count(verified, num_verified)
            _count(accepted, num_accepted)
            if num_verified:
                drafts = self._drafts[request.request_id]
                drafts.verified.append(num_verified)
                drafts.accepted.append(num_accepted)
            for name in ("num_tokens", "num_drafted", "num_scored"):
                gained = getattr(now, name) - getattr(before, name)
                setattr(totals, name, getattr(totals, name) + gained)
                setattr(before, name, getattr(now, name))
            before.num_verified, before.num_accepted = now.num_verified, now.num_accepted
            outputs.pieces.append(self._piece(request))
            if request.finish_reason is not None:
                self._forget(request)
        ended, prefixes = engine.step_times, engine.prefix_stats
        if not ended:  # the step only prepared one half of the batch
            return
        outputs.step = StepStats(
            {part: sum(getattr(times, part) for times in ended) for part in PARTS},
            len(advanced),
            totals.num_tokens,
            sum(times.num_prompt_tokens for times in ended),
            prefixes.num_queried - self._prefixes.num_queried,
            prefixes.num_hits - self._prefixes.num_hits,
            totals.num_drafted,
            totals.num_scored,
            verified,
            accepted,
            len(ended),
        )
        self._prefixes = prefixes

    def _piece(self, request: Request) -> Piece:
        new = request.take_new()
        done = request.finish_reason is not None
        return Piece(
            self._keys[request.request_id],
            new.token_ids,
            new.texts,
            new.logprobs,
            request.finish_reason,
            request.error,
            request.stats if done else None,
            new.prompt_logprobs,
            request.num_cached_tokens if done else 0,
            self._drafts.get(request.request_id) if done else None,
        )

    def _forget(self, request: Request) -> None:
        del self._requests[self._keys.pop(request.request_id)]
        del self._counted[request.request_id]
        self._drafts.pop(request.request_id, None)

    def _describe(self) -> dict[str, Any]:
        """The speculation settings as a JSON-serialisable object."""
        llm = self._llm
        speculation = llm.speculation
        names = {
            "target": llm.target.name,
            "draft": ", ".join(name for name in llm.draft_names if name != "none") or None,
            "companion": None if llm.companion is None else llm.companion.name,
        }
        if speculation is None:
            return {"enabled": False, "policy": "none", "policies": [], **names}
        usable = set(llm.engine.policies.usable())
        lenience = speculation.lenience
        return {
            "enabled": True,
            "policy": speculation.policy_name,
            "policy_options": dict(speculation.policy_options),
            "num_speculative_tokens": speculation.num_speculative_tokens,
            "max_num_speculative_tokens": llm.engine.max_num_speculative_tokens,
            "lenience": {str(start): each for start, each in lenience.items()}
            if isinstance(lenience, Mapping)
            else lenience,
            **names,
            "policies": [
                {
                    "name": name,
                    "description": policy.summary,
                    "lossless": policy.lossless,
                    "usable": name in usable,
                }
                for name, policy in POLICIES.items()
                if not policy.uses_target_oracle
            ],
        }

    @property
    def _load(self) -> EngineLoad:
        engine = self._llm.engine
        return EngineLoad(
            engine.num_unfinished - engine.num_waiting,
            engine.num_waiting,
            engine.cache_usage,
            engine.lenience,
            engine.guard_balance,
        )


def _typed(error: BaseException) -> DraftwiseError:
    """Convert any error to a typed one; unexpected errors are logged with their tracebacks."""
    if isinstance(error, DraftwiseError):
        return error
    _LOG.exception("a command of the engine failed unexpectedly", exc_info=error)
    return EngineFaultError("engine", f"failed unexpectedly: {type(error).__name__}: {error}")


def _count(positions: list[int], number: int) -> None:
    """Increment the counts of the first ``number`` positions."""
    while len(positions) < number:
        positions.append(0)
    for index in range(number):
        positions[index] += 1
