"""Interleaved runs of all contenders on the same prompts, so disturbances affect all equally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftwise.benchmark.contenders import Contender, Turn
from draftwise.benchmark.recorder import StepRecords
from draftwise.benchmark.titles import BASELINE
from draftwise.benchmark.turns import in_turns, ratios_of_turns
from draftwise.errors import DraftwiseError
from draftwise.params import SamplingParams

# Tokens generated per prompt before anything is timed, twice: on a GPU the first run of a step
# prepares it, and the second one records it.
_WARM_UP_TOKENS, WARM_UP_TURNS = 32, 2


@dataclass(frozen=True)
class Cell:
    """One workload at one batch size, which all contenders run.

    Attributes:
        workload: name of the workload.
        batch_size: number of prompts answered at once.
        rounds: ``[rounds][batch_size]`` token ids of the prompts, the same for all contenders.
        question_ids: ``[rounds][batch_size]`` index of each prompt in the workload.
        untimed_rounds: ``[untimed rounds][batch_size]`` token ids of the prompts of untimed turns.
            They are other prompts than the timed ones if the workload has enough of them.
    """

    workload: str
    batch_size: int
    rounds: list[list[list[int]]]
    question_ids: list[list[int]]
    untimed_rounds: list[list[list[int]]]


@dataclass
class Result:
    """Result of one contender in one cell.

    Attributes:
        turns: turns of the contender, one per round.
        error: error that excluded the contender from further turns; ``None`` without an error.
    """

    turns: list[Turn] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens_per_second(self) -> list[float]:
        """Tokens per second of each round."""
        return [turn.num_tokens / turn.seconds for turn in self.turns]

    @property
    def records(self) -> StepRecords | None:
        """Sum of the records of all rounds."""
        total: StepRecords | None = None
        for turn in self.turns:
            if turn.records is not None:
                total = total or StepRecords()
                total.add(turn.records)
        return total


def make_cell(
    workload: str, prompts: Sequence[list[int]], batch_size: int, num_rounds: int
) -> Cell:
    """Divide the prompts of a workload between rounds.

    If there are more prompts than places, the timed ones are spread evenly over the workload, which
    is often ordered by category. Otherwise prompts come again, cyclically.
    """
    timed, untimed = divided(len(prompts), batch_size, num_rounds)

    def texts(rounds: list[list[int]]) -> list[list[list[int]]]:
        return [[prompts[i] for i in each] for each in rounds]

    return Cell(workload, batch_size, texts(timed), timed, texts(untimed))


def divided(
    count: int, batch_size: int, num_rounds: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Indices of the prompts of timed and of untimed rounds; see :func:`make_cell`.

    Args:
        count: number of prompts.
        batch_size: prompts of a round.
        num_rounds: number of timed rounds.
    """
    places = batch_size * num_rounds
    timed = [i * count // places if places < count else i % count for i in range(places)]
    others = sorted(set(range(count)) - set(timed)) or list(range(count))
    num_untimed = max(1, len(others) // batch_size)
    untimed = [others[i % len(others)] for i in range(batch_size * num_untimed)]

    def rounds(indices: list[int]) -> list[list[int]]:
        return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]

    return rounds(timed), rounds(untimed)


def compete(
    cell: Cell,
    contenders: Sequence[Contender],
    params: SamplingParams,
    learning_turns: int = 0,
    on_turn: Callable[[str], None] = lambda _: None,
) -> dict[str, Result]:
    """Run all contenders on every round, in an order that changes from round to round.

    Before the first round, each contender has short untimed turns, and contenders that learn have
    additional untimed turns of full length. A contender that fails is excluded and its error is
    kept, while the others continue.

    Args:
        cell: the prompts.
        contenders: contenders. Those that do not support the cell are left out.
        params: sampling parameters of all prompts. With ``ignore_eos`` every answer has exactly
            ``max_tokens`` tokens, so that all contenders do the same work; otherwise answers end at
            the target's end-of-sequence tokens. Other stop conditions are ignored. The seed
            increases by one from prompt to prompt.
        learning_turns: number of untimed turns of contenders that learn.
        on_turn: called with the name of the contender before each turn.
    """
    params = replace(params, stop=(), stop_token_ids=())
    playing = [each for each in contenders if each.refusal(cell.batch_size, params) is None]
    results = {each.name: Result() for each in playing}

    def take_turn(
        contender: Contender, number: int, prompts: list[list[int]], longest: int
    ) -> None:
        result = results[contender.name]
        if result.error is not None:
            return
        on_turn(contender.name)
        own = [replace(params, max_tokens=longest) for _ in prompts]
        if params.seed is not None:
            first = params.seed + number * cell.batch_size
            own = [replace(each, seed=first + place) for place, each in enumerate(own)]
        try:
            turn = contender.generate(prompts, own)
        except DraftwiseError as error:
            result.error = error.message
            return
        result.turns.append(turn)

    short = min(params.max_tokens, _WARM_UP_TOKENS)
    for contender in playing:
        learning = [params.max_tokens] * learning_turns if contender.learns else []
        for number, longest in enumerate([short] * WARM_UP_TURNS + learning):
            untimed = cell.untimed_rounds[number % len(cell.untimed_rounds)]
            # The timed rounds have other random numbers.
            take_turn(contender, len(cell.rounds) + number, untimed, longest)
        results[contender.name].turns.clear()
    for number, contender in in_turns(playing, len(cell.rounds)):
        take_turn(contender, number, cell.rounds[number], params.max_tokens)
    return results


def ratios(results: dict[str, Result], name: str) -> list[float]:
    """Tokens per second relative to target-only decoding, for each round that both completed."""
    return ratios_of_turns(results[name].tokens_per_second, results[BASELINE].tokens_per_second)


def num_identical(results: dict[str, Result], name: str) -> tuple[int, list[int]]:
    """Count answers that are identical to those of target-only decoding, token for token.

    Returns:
        The number of identical answers, and for each other answer the index of the first token that
        differs.
    """
    same, first_differences = 0, []
    for own, base in zip(results[name].turns, results[BASELINE].turns, strict=False):
        for mine, theirs in zip(own.answers, base.answers, strict=True):
            if mine == theirs:
                same += 1
            else:
                pairs = enumerate(zip(mine, theirs, strict=False))
                differs = (at for at, (a, b) in pairs if a != b)
                first_differences.append(next(differs, min(len(mine), len(theirs))))
    return same, first_differences
