"""View of a running comparison: the texts of both ways to decode, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from draftwise.cli.render import SPECULATIVE, STYLES, TARGET_ONLY
from draftwise.engine.request import Request

# Lines of each text, and drawings per second, few because drawing takes time from decoding.
_NUM_LINES = 10
_DRAWINGS_PER_SECOND = 5


class _Side:
    """One way to decode: its text and its speed in the current turn."""

    def __init__(self, name: str) -> None:
        """Begin without a text."""
        self._name = name
        self.begin()

    def begin(self) -> None:
        """Begin a turn."""
        self._shown: Request | None = None
        self._text = Text()
        self._num_tokens = 0
        self._start = self._last = perf_counter()

    def add(self, advanced: Sequence[Request]) -> None:
        """Add what a step generated. The text of the first request is shown."""
        self._last = perf_counter()
        if self._shown is None and advanced:
            self._shown = advanced[0]
            self._text.append(self._shown.output().prompt or "", style="dim")
        for request in advanced:
            new = request.take_new()
            self._num_tokens += len(new.token_ids)
            if request is self._shown:
                for text, source in new.texts:
                    self._text.append(text, style=STYLES[source])

    def panel(self, console: Console) -> Panel:
        """The last lines of the text, and the speed."""
        width = max(console.width // 2 - 6, 10)
        lines = self._text.copy().wrap(console, width)[-_NUM_LINES:]
        seconds = self._last - self._start
        speed = f"{self._num_tokens / seconds:.1f} tokens/s" if seconds else ""
        return Panel(
            Text("\n").join(lines),
            title=self._name,
            subtitle=speed,
            height=_NUM_LINES + 2,
            border_style="dim",
        )


class ComparisonView:
    """Shows a comparison while it runs: both texts in a terminal, otherwise a line per prompt.

    With results on stdout, lines are left out.
    """

    def __init__(self, console: Console, num_prompts: int) -> None:
        """Begin.

        Args:
            console: console to draw on.
            num_prompts: number of prompts, each of which is decoded in both ways.
        """
        self._console = console
        self._sides = {name: _Side(name) for name in (TARGET_ONLY, SPECULATIVE)}
        self._running = self._sides[TARGET_ONLY]
        self._total = 2 * num_prompts
        self._num_done = self._num_turns = 0
        self._bar = Progress(
            TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._bar.add_task("comparing", total=self._total)

    def begin_turn(self, name: str) -> None:
        """Begin the turn of one way to decode. Two turns are about the same prompts."""
        if self._num_turns % 2 == 0:
            for side in self._sides.values():
                side.begin()
        self._num_turns += 1
        self._running = self._sides[name]
        self._running.begin()

    def on_step(self, advanced: Sequence[Request]) -> None:
        """Show the tokens of a step."""
        self._running.add(advanced)
        ended = sum(request.finish_reason is not None for request in advanced)
        self._num_done += ended
        self._bar.update(self._task, completed=self._num_done)
        is_visible = not (self._console.is_terminal or self._console.stderr)
        if ended and is_visible and self._num_turns % 2 == 0:
            self._console.print(f"compared {self._num_done // 2} of {self._total // 2} prompts")

    def __rich__(self) -> Group:
        """Both texts, and a progress bar."""
        table = Table.grid(expand=True)
        for _ in self._sides:
            table.add_column(ratio=1)
        table.add_row(*(side.panel(self._console) for side in self._sides.values()))
        return Group(table, self._bar)


@contextmanager
def comparison_view(console: Console, num_prompts: int) -> Iterator[ComparisonView]:
    """Show a comparison until the context ends."""
    view = ComparisonView(console, num_prompts)
    if not console.is_terminal:
        yield view
        return
    rate = _DRAWINGS_PER_SECOND
    with Live(view, console=console, transient=True, refresh_per_second=rate):
        yield view
