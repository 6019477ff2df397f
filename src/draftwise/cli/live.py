"""Output during a run: a progress bar, and text while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.text import Text

from draftwise.cli.render import STYLES
from draftwise.engine.request import Request
from draftwise.outputs import FinishReason, RequestOutput
from draftwise.params import SamplingParams
from draftwise.prompts import Prompt


@contextmanager
def progress(
    console: Console, what: str, total: int, hidden: bool = False
) -> Iterator[Callable[[list[Request]], None]]:
    """Show a progress bar over finished requests; yields the function to call after each step."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[num_tokens]} tokens"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=hidden or not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total, num_tokens=0)
        num_tokens = 0

        def on_step(advanced: list[Request]) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(request.take_new().token_ids) for request in advanced)
            finished = sum(request.finish_reason is not None for request in advanced)
            bar.update(task, advance=finished, num_tokens=num_tokens)

        yield on_step


class Answers:
    """The requests of several prompts during generation.

    Attributes:
        requests: requests that have received tokens, by the index of their prompts.
    """

    def __init__(
        self, prompts: Sequence[Prompt] = (), params: Sequence[SamplingParams] = ()
    ) -> None:
        """Create the tracker without requests.

        Args:
            prompts: the prompts.
            params: a distinct object for each prompt, by which its request is identified.
        """
        self.requests: dict[int, Request] = {}
        self._prompts = prompts
        self._indices = {id(each): index for index, each in enumerate(params)}

    def on_step(self, advanced: Sequence[Request]) -> None:
        """Record the requests that received tokens in a step."""
        for request in advanced:
            self.requests[self._indices[id(request.params)]] = request

    def outputs(self) -> list[RequestOutput]:
        """Current outputs of all prompts."""
        return [
            self.requests[index].output() if index in self.requests else _cancelled(prompt)
            for index, prompt in enumerate(self._prompts)
        ]


class AnswerPrinter:
    """Prints texts in the order of their prompts, with each token coloured by its source.

    The first unfinished text is printed while it is generated.
    """

    def __init__(
        self,
        console: Console,
        answers: Answers,
        prompts: Sequence[Prompt],
        titles: bool = True,
    ) -> None:
        """Create the printer.

        Args:
            console: console to print to.
            answers: requests to print.
            prompts: the prompts.
            titles: print a line with the prompt above each text.
        """
        self._console = console
        self._answers, self._prompts = answers, prompts
        self._titles = titles
        self._index = 0
        self._has_title = False

    def print_new(self) -> None:
        """Print the text generated since the last call."""
        while (request := self._answers.requests.get(self._index)) is not None:
            if request.error is not None:
                return  # shown with the outputs
            self._title(request.output().prompt)
            for text, source in request.take_new().texts:
                self._console.print(Text(text, style=STYLES[source]), end="", soft_wrap=True)
            if request.finish_reason is None:
                return
            self._end()

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Print the remaining text of all outputs."""
        self.print_new()
        while self._index < len(outputs):
            output = outputs[self._index]
            if self._has_title:  # the request failed after part of its text was printed
                self._console.print()
            self._title(output.prompt)
            if output.error is None:
                self._console.print(_coloured(output), end="", soft_wrap=True)
            else:
                self._console.print(Text(f"error {output.error}", style="bold red"), end="")
            self._end()
            self.print_new()
        if self._titles:
            self._console.print(Rule(style="dim"))

    def _title(self, prompt: str | None) -> None:
        if self._titles and not self._has_title:
            number = self._index + 1
            prompt = _message(self._prompts[self._index]) or prompt
            title = _first_line(prompt) if prompt else f"prompt {number}"
            text = Text(f"{number}  {title}", style="bold")
            self._console.print(Rule(text, align="left", style="dim"))
        self._has_title = True

    def _end(self) -> None:
        self._console.print()
        self._index += 1
        self._has_title = False


def _coloured(output: RequestOutput) -> Text:
    text = Text()
    for piece, source in zip(output.token_texts, output.token_sources, strict=True):
        text.append(piece, style=STYLES[source])
    return text


def _message(prompt: Prompt) -> str | None:
    """The text of a chat's last message; ``None`` for other prompts, and for other contents."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return content if isinstance(content, str) else None


def _first_line(prompt: str) -> str:
    line = prompt.strip().splitlines()[0] if prompt.strip() else ""
    return line if len(line) <= 60 else line[:59] + "…"


def _cancelled(prompt: Prompt) -> RequestOutput:
    """The output of a prompt that was cancelled before its first token."""
    return RequestOutput.empty(prompt, FinishReason.CANCELLED)
