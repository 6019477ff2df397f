"""Output of ``draftwise train``: what runs now, and the learning curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.status import Status

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


class LearningCurve:
    """Prints records of a run, and shows the latest ones while the run goes on."""

    def __init__(self, console: Console) -> None:
        """Create the curve without records."""
        self._console = console
        self._status: Status | None = None
        self._losses: list[float] = []
        self._activity = ""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show what runs now during the block, where the output is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("starting …") as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    def status(self, text: str) -> None:
        """Show what runs now. Without a terminal, each kind of activity is printed once."""
        if self._status is not None:
            self._status.update(f"{text} …")
            return
        activity = text.partition(":")[0]
        if activity != self._activity:
            self._activity = activity
            self._console.print(f"{activity} …", style="dim")

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Print what is trained."""
        print_ = self._console.print
        details = ""
        if "layers" in facts:
            details = f", reads the hidden states {', '.join(map(str, facts['layers']))}"
        if "draft_parameters" in facts:
            ratio = facts["num_parameters"] / facts["draft_parameters"]
            details = f", {ratio:.1f} times those of the draft {facts['draft']}"
        print_(
            f"{facts['kind']} of [bold]{facts['num_parameters'] / 1e6:.1f} M[/] "
            f"parameters{details}",
            soft_wrap=True,
        )
        vocabulary = ""
        if facts["draft_vocab"] < facts["target_vocab"]:
            vocabulary = (
                f"; the draft can propose {facts['draft_vocab']:,} of {facts['target_vocab']:,} "
                f"tokens, which are {facts['coverage']:.1%} of them"
            )
        print_(
            f"{facts['num_data_tokens']:,} tokens of answers and texts{vocabulary}", soft_wrap=True
        )

    def record(self, record: Mapping[str, float]) -> None:
        """Show a record of the loss, or print an evaluation."""
        place = f"{record['progress']:4.0%}  {record['minutes']:6.1f} min"
        if "loss" in record:
            self._losses.append(record["loss"])
            text = (
                f"{place}  loss {record['loss']:.3f}  {sparkline(self._losses)}  "
                f"{record['tokens_per_second']:.0f} tokens/s"
            )
            if self._status is not None:
                self._status.update(text)
            else:
                self._console.print(text, soft_wrap=True)
            return
        indented = describe(record).replace("\n", "\n" + " " * (len(place) + 2))
        self._console.print(f"{place}  {indented}", soft_wrap=True)

    def end(self, values: Mapping[str, float]) -> None:
        """Print the result."""
        self._console.print(f"[bold]{describe(values) or 'held-out answers are too short'}[/]")


def describe(values: Mapping[str, float]) -> str:
    """The figures of an evaluation, one line for each temperature.

    A companion has its overlap with the target, and the draft's own figures beside it, too.
    """
    by_temperature: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        figure, slash, temperature = name.partition("/")
        if slash:
            by_temperature.setdefault(temperature, {})[figure] = value
    parts = ((each, _parts(figures)) for each, figures in by_temperature.items())
    return "\n".join(f"{'; '.join(found)} at {each}" for each, found in parts if found)


def _parts(figures: Mapping[str, float]) -> list[str]:
    parts = []
    if "accepted_length" in figures:
        length, first = figures["accepted_length"], figures["acceptance"]
        parts.append(f"accepted length {length:.2f} (first token {first:.2f})")
    if "draft_accepted_length" in figures:
        length, first = figures["draft_accepted_length"], figures["draft_acceptance"]
        parts.append(f"the draft's {length:.2f} ({first:.2f})")
    if "target_overlap" in figures:
        draft = ""
        if "draft_target_overlap" in figures:
            draft = f", the draft's {figures['draft_target_overlap']:.2f}"
        parts.append(f"overlap with the target {figures['target_overlap']:.2f}{draft}")
    if "information" in figures:
        parts.append(
            f"S and A tell {figures['information']:.3f} of {figures['entropy']:.3f} bits, "
            f"the draft's q(x) {figures['draft_information']:.3f}"
        )
    return parts


def sparkline(values: list[float]) -> str:
    """A curve of at most 40 characters; of more values, the means of equal parts are shown."""
    count = min(_WIDTH, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
