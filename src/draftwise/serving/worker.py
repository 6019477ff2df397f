"""The process that owns the engine: takes commands between steps, reports after each."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from draftwise.core.types import PARTS
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError
from draftwise.llm import LLM
from draftwise.outputs import SpeculationStats
from draftwise.policies import POLICIES
from draftwise.processes import end_quickly, end_with_parent
from draftwise.serving.errors import EngineFaultError, EngineLostError
from draftwise.serving.messages import (
    Add,
    Ask,
    Cancel,
    Command,
    Failed,
    Load,
    Piece,
    Ping,
    Ready,
    StepFigures,
    Turn,
)
from draftwise.serving.preparation import GrammarThread
from draftwise.serving.settings import EngineSettings

_LOG = logging.getLogger("draftwise.serving")


def run(connection: Connection, settings: EngineSettings) -> None:
    """Load the models and generate until the other side says stop, or is gone."""
    # Only the server decides when to end; ctrl-C reaches every process of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    end_quickly()
    try:
        llm = load(settings)
    except DraftwiseError as error:
        connection.send(Failed(error, at_start=True))
        return
    try:
        EngineWorker(connection, llm).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        llm.close()


def load(settings: EngineSettings) -> LLM:
    """The models and the engine.

    Raises:
        DraftwiseError: something of it cannot be had.
    """
    if settings.num_threads is not None:
        import torch

        torch.set_num_threads(settings.num_threads)
    return LLM(
        settings.target,
        settings.speculation,
        settings.dtype,
        settings.device,
        settings.max_batch_size,
        settings.max_model_len,
        max_chunk_tokens=settings.max_chunk_tokens,
        cache_gib=settings.cache_gib,
        trust_remote_code=settings.trust_remote_code,
        overlap=settings.overlap,
        draft_replicas=settings.draft_replicas,
    )


class EngineWorker:
    """Runs an engine for the other side of a connection."""

    def __init__(self, connection: Connection, llm: LLM) -> None:
        """Take loaded models.

        Args:
            connection: where commands come from and reports go to.
            llm: used by nobody else.
        """
        self._connection = connection
        self._llm = llm
        self._requests: dict[int, Request] = {}
        self._keys: dict[int, int] = {}
        self._counted: dict[int, SpeculationStats] = {}
        self._grammars = GrammarThread(llm.engine.grammars)
        self._preparing: set[int] = set()
        self._stopped = False

    def run(self) -> None:
        """Say that it is ready, then work until told to stop.

        Raises:
            EOFError: the other side is gone.
        """
        llm = self._llm
        roles = {"target": llm.target, "draft": llm.draft, "companion": llm.companion}
        self._connection.send(
            Ready(
                llm.target.name,
                llm.engine.max_model_len,
                llm.target.model.vocab_size,
                llm.target.tokenizer,
                {role: each.fingerprint for role, each in roles.items() if each is not None},
            )
        )
        while not self._stopped:
            turn = self._take_commands()
            if self._requests:
                try:
                    self._step(turn)
                except Exception as error:
                    # The batch cannot be continued: better a clear end than a silent one.
                    why = EngineLostError("engine", f"a step failed: {error!r}")
                    self._connection.send(Failed(why, at_start=False))
                    raise
            turn.load = self._load
            self._connection.send(turn)

    def _take_commands(self) -> Turn:
        """Follow all commands that came meanwhile; without requests, wait for one."""
        turn = Turn()
        patience = 0 if self._requests else None
        while not self._stopped:
            ready = wait([self._connection, self._grammars.readable], patience)
            if not ready:
                break
            if self._connection in ready:
                command: Command = self._connection.recv()
                self._follow(command, turn)
            if self._grammars.readable in ready:
                self._add_prepared(turn)
            patience = 0
        return turn

    def _follow(self, command: Command, turn: Turn) -> None:
        match command:
            case Add():
                self._add(command, turn)
            case Cancel(key):
                self._preparing.discard(key)
                request = self._requests.get(key)
                if request is not None:
                    self._llm.engine.cancel(request)
                    self._forget(request)
            case Ask(call, changes):
                try:
                    if changes:
                        self._llm.change_speculation(**changes)
                    turn.answers.append((call, self._describe()))
                except Exception as error:
                    turn.answers.append((call, _typed(error)))
            case Ping():
                pass  # every turn is reported
            case _:
                self._stopped = True

    def _add_prepared(self, turn: Turn) -> None:
        """Add the requests whose grammars are compiled, unless they were cancelled meanwhile."""
        for command, error in self._grammars.take():
            if command.key not in self._preparing:
                continue
            self._preparing.remove(command.key)
            if error is None:
                self._add(command, turn)
            else:
                turn.refused.append((command.key, _typed(error)))

    def _add(self, command: Add, turn: Turn) -> None:
        """Add a request to the engine, at once or when its grammar is compiled."""
        try:
            if self._grammars.needs(command):
                self._preparing.add(command.key)
                self._grammars.submit(command)
                return
            request = self._llm.engine.add(
                command.prompt, command.prompt_ids, command.params, command.speculation
            )
        except Exception as error:
            # Nothing was queued: whatever is wrong with this request, the others go on.
            turn.refused.append((command.key, _typed(error)))
            return
        self._requests[command.key] = request
        self._keys[request.request_id] = command.key
        self._counted[request.request_id] = SpeculationStats()
        turn.added.append(command.key)

    def _step(self, turn: Turn) -> None:
        """Advance everybody, and tell what came of it."""
        engine = self._llm.engine
        advanced = [each for each in engine.step() if each.request_id in self._keys]
        verified: list[int] = []
        accepted: list[int] = []
        totals = SpeculationStats()
        for request in advanced:
            before = self._counted[request.request_id]
            now = request.stats
            _count(verified, now.num_verified - before.num_verified)
            _count(accepted, now.num_accepted - before.num_accepted)
            for name in ("num_tokens", "num_drafted", "num_judged"):
                gained = getattr(now, name) - getattr(before, name)
                setattr(totals, name, getattr(totals, name) + gained)
                setattr(before, name, getattr(now, name))
            before.num_verified, before.num_accepted = now.num_verified, now.num_accepted
            turn.pieces.append(self._piece(request))
            if request.finish_reason is not None:
                self._forget(request)
        times = engine.times
        turn.step = StepFigures(
            {part: getattr(times, part) for part in PARTS},
            len(advanced),
            totals.num_tokens,
            times.num_prompt_tokens,
            totals.num_drafted,
            totals.num_judged,
            verified,
            accepted,
        )

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
        )

    def _forget(self, request: Request) -> None:
        del self._requests[self._keys.pop(request.request_id)]
        del self._counted[request.request_id]

    def _describe(self) -> dict[str, Any]:
        """How it speculates, ready for JSON."""
        llm = self._llm
        speculation = llm.speculation
        names = {
            "target": llm.target.name,
            "draft": None if llm.draft is None else llm.draft.name,
            "companion": None if llm.companion is None else llm.companion.name,
        }
        if speculation is None or llm.draft is None:
            return {"enabled": False, "policy": "none", "policies": [], **names}
        usable = set(llm.engine.policies.usable())
        lenience = speculation.lenience
        return {
            "enabled": True,
            "policy": speculation.policy_name,
            "policy_options": dict(speculation.policy_options),
            "num_speculative_tokens": speculation.num_speculative_tokens,
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
                if not policy.judged_by_target
            ],
        }

    @property
    def _load(self) -> Load:
        engine = self._llm.engine
        return Load(
            engine.num_unfinished - engine.num_waiting,
            engine.num_waiting,
            engine.cache_usage,
            engine.lenience,
            engine.policies.default.calibration_error,
        )


def _typed(error: BaseException) -> DraftwiseError:
    """An error that the server can report; anything unexpected is logged with its traceback."""
    if isinstance(error, DraftwiseError):
        return error
    _LOG.exception("the engine refused a command for an unexpected reason", exc_info=error)
    return EngineFaultError("engine", f"failed unexpectedly: {type(error).__name__}: {error}")


def _count(positions: list[int], number: int) -> None:
    """Count one more at each of the first positions."""
    while len(positions) < number:
        positions.append(0)
    for index in range(number):
        positions[index] += 1
