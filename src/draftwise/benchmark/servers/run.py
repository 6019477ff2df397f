"""A benchmark of servers: turns of all contenders on the same prompts, in an order that changes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftwise.audit.client import Messages
from draftwise.audit.draft_counts import DraftCounts
from draftwise.audit.speculation import draft_counts
from draftwise.benchmark.contest import divided
from draftwise.benchmark.servers.contenders import ServerContender
from draftwise.benchmark.servers.load import arriving, at_once
from draftwise.benchmark.servers.requests import Answered, ask
from draftwise.benchmark.turns import in_turns
from draftwise.prompt_files import Question, load_questions

OnTurn = Callable[[str, str], None]


@dataclass(frozen=True)
class Questions:
    """The questions of one file.

    Attributes:
        name: name of the file, without its suffix.
        questions: its questions.
    """

    name: str
    questions: Sequence[Question]

    @classmethod
    def read(cls, path: Path, num_questions: int) -> Questions:
        """Read the first questions of a file.

        Raises:
            PromptError: the file cannot be read.
        """
        return cls(path.stem, load_questions(path, num_questions, "workload"))


@dataclass(frozen=True)
class Cell:
    """Questions under one load, which all contenders answer.

    Attributes:
        workload: the questions.
        temperature: temperature of all requests.
        concurrency: number of clients; ``None`` for requests that arrive at random.
        request_rate: requests that arrive in a second; ``None`` for clients.
        num_requests: questions of a turn.
        rounds: number of timed turns of each contender.
    """

    workload: Questions
    temperature: float
    concurrency: int | None
    request_rate: float | None
    num_requests: int
    rounds: int

    @property
    def labels(self) -> dict[str, Any]:
        """What distinguishes it from other cells."""
        found = {"workload": self.workload.name, "temperature": self.temperature}
        if self.concurrency is None:
            return found | {"request_rate": self.request_rate}
        return found | {"concurrency": self.concurrency}


@dataclass(frozen=True)
class Asked:
    """A request of a turn, with its place in the turn.

    Attributes:
        question: the question.
        turn_of_user: index of the user's turn in the question.
        answered: the request and its answer.
    """

    question: Question
    turn_of_user: int
    answered: Answered


@dataclass
class ServerTurn:
    """One turn of a contender.

    Attributes:
        requests: its requests, in the order of the questions.
        counts: what the server counted meanwhile; ``None`` if it does not publish counts.
    """

    requests: list[Asked]
    counts: DraftCounts | None = None

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return max(each.answered.end_seconds for each in self.requests)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(each.answered.num_tokens for each in self.requests)


@dataclass
class ServerResult:
    """Result of a contender in one cell.

    Attributes:
        turns: its timed turns, one per round.
        error: why it was left out of further turns; ``None`` if it was not.
    """

    turns: list[ServerTurn] = field(default_factory=list)
    error: str | None = None


class Measurement:
    """Runs the cells of a benchmark of servers.

    Attributes:
        max_tokens: tokens of an answer.
    """

    def __init__(
        self,
        contenders: Sequence[ServerContender],
        max_tokens: int,
        *,
        seed: int | None = None,
        multi_turn: bool = False,
        learning_turns: int = 0,
        write: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """Prepare the measurement; nothing is sent yet.

        Args:
            contenders: the contenders.
            max_tokens: tokens of an answer.
            seed: seed of the first request of a turn; ``None`` for none.
            multi_turn: ask all turns of a question, one after another, with the server's answers.
            learning_turns: untimed turns of contenders that learn, before those that are timed.
            write: called with every timed request, as JSON-compatible values.
        """
        self._contenders, self.max_tokens, self._seed = contenders, max_tokens, seed
        self._multi_turn, self._learning_turns, self._write = multi_turn, learning_turns, write
        # Servers may keep what an earlier run has asked.
        self._run, self._turns = f"{time.time_ns():x}", itertools.count()

    def num_turns(self, cell: Cell) -> int:
        """Number of turns of a cell, with those that are not timed."""
        return sum(
            cell.rounds + 1 + self._learning_turns * each.learns for each in self._contenders
        )

    def run(self, cell: Cell, on_turn: OnTurn = lambda name, what: None) -> dict[str, ServerResult]:
        """Measure one cell.

        Args:
            cell: the cell.
            on_turn: called before each turn with the contender's name, and ``"untimed"`` or
                ``"timed"``.
        """
        questions = cell.workload.questions
        timed, untimed = divided(len(questions), cell.num_requests, cell.rounds)
        results = {each.name: ServerResult() for each in self._contenders}

        def take_turn(
            contender: ServerContender, number: int, places: list[int], kind: str
        ) -> None:
            result = results[contender.name]
            if result.error is not None:
                return
            on_turn(contender.name, kind)
            before = draft_counts(contender.server)
            chosen = [questions[place] for place in places]
            requests = asyncio.run(self._turn(contender, cell, number, chosen))
            after = draft_counts(contender.server)
            counts = None if before is None or after is None else after.since(before)
            errors = [each.answered.error for each in requests]
            if all(errors):
                result.error = errors[0]
                return
            if kind == "timed":
                result.turns.append(ServerTurn(requests, counts))
                for record in self._records(contender, cell, number, requests):
                    self._write(record)

        for contender in self._contenders:
            for number in range(1 + self._learning_turns * contender.learns):
                places = untimed[number % len(untimed)]
                # The timed rounds have other random numbers.
                take_turn(contender, cell.rounds + number, places, "untimed")
        for number, contender in in_turns(self._contenders, cell.rounds):
            take_turn(contender, number, timed[number], "timed")
        return results

    async def _turn(
        self, contender: ServerContender, cell: Cell, number: int, questions: Sequence[Question]
    ) -> list[Asked]:
        start = time.perf_counter()
        salt = f"{self._run}-{next(self._turns)}"

        async def answer(place: int) -> list[Asked]:
            question = questions[place]
            seed = None if self._seed is None else self._seed + number * len(questions) + place
            fields = {
                "max_tokens": self.max_tokens,
                "temperature": cell.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
                **contender.fields_of(seed, salt),
            }
            messages: list[dict[str, str]] = []
            asked: list[Asked] = []
            turns = question.turns if self._multi_turn else question.turns[:1]
            for index, text in enumerate(turns):
                messages.append({"role": "user", "content": text})
                prompt: str | Messages = messages if self._multi_turn else text
                answered = await ask(contender.server, prompt, fields, start)
                asked.append(Asked(question, index, answered))
                if answered.error is not None:
                    break
                messages.append({"role": "assistant", "content": answered.text})
            return asked

        places = range(len(questions))
        if cell.concurrency is not None:
            found = await at_once(places, answer, cell.concurrency)
        else:
            assert cell.request_rate is not None
            found = await arriving(places, answer, cell.request_rate, number)
        return [asked for each in found for asked in each]

    def _records(
        self, contender: ServerContender, cell: Cell, number: int, requests: Sequence[Asked]
    ) -> Iterator[dict[str, Any]]:
        for each in requests:
            yield {
                "contender": contender.name,
                **cell.labels,
                "round": number,
                "question_id": each.question.question_id,
                "category": each.question.category,
                "turn": each.turn_of_user,
                **asdict(each.answered),
            }
