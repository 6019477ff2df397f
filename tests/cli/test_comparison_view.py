"""The view of a running comparison, and its verdict."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from draftwise.benchmark.measure import Comparison, Run
from draftwise.cli.comparison_view import ComparisonView, comparison_view
from draftwise.cli.render import SPECULATIVE, TARGET_ONLY, show_comparison
from draftwise.engine.request import NewOutput
from draftwise.outputs import FinishReason, RequestOutput, SpeculationStats, TokenSource


class Running:
    """A request that generates one word in each step."""

    def __init__(self, prompt, words):
        self.prompt, self.words = prompt, list(words)

    @property
    def finish_reason(self):
        return None if self.words else FinishReason.LENGTH

    def take_new(self):
        return NewOutput([1], [TokenSource.DRAFT], [(self.words.pop(0), TokenSource.DRAFT)], None)

    def output(self):
        return SimpleNamespace(prompt=self.prompt)


def run(view, name, *requests):
    view.begin_turn(name)
    while any(request.words for request in requests):
        view.on_step([request for request in requests if request.words])


@pytest.fixture
def screen():
    """A terminal of 80 columns."""
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)


def drawn(console, view):
    console.print(view)
    return console.file.getvalue()


def test_both_texts_are_shown_side_by_side(screen):
    view = ComparisonView(screen, 2)
    run(view, TARGET_ONLY, Running("Say", [" one", " two"]))
    run(view, SPECULATIVE, Running("Say", [" three"]), Running("Tell", [" four"]))
    text = drawn(screen, view)
    (line,) = [line for line in text.splitlines() if "Say" in line]
    assert line.index("Say one two") < 40 < line.index("Say three")
    assert "four" not in text
    assert text.count("tokens/s") == 2
    assert "3/4" in text


def test_the_next_prompts_begin_with_empty_texts(screen):
    view = ComparisonView(screen, 2)
    run(view, TARGET_ONLY, Running("Say", [" one"]))
    run(view, SPECULATIVE, Running("Say", [" one"]))
    run(view, SPECULATIVE, Running("Tell", [" two"]))
    text = drawn(screen, view)
    assert "Tell two" in text
    assert "Say" not in text


def test_the_end_of_a_long_text_is_shown(screen):
    view = ComparisonView(screen, 1)
    run(view, TARGET_ONLY, Running("Count", [f" number-{n}\n" for n in range(50)]))
    text = drawn(screen, view)
    assert "number-49" in text
    assert "number-9\n" not in text


def test_without_a_terminal_a_line_says_how_many_prompts_were_compared():
    console = Console(file=io.StringIO(), width=80)
    with comparison_view(console, 2) as view:
        for _ in range(2):
            for name in (TARGET_ONLY, SPECULATIVE):
                run(view, name, Running("Say", [" one", " two"]))
    lines = ["compared 1 of 2 prompts", "compared 2 of 2 prompts"]
    assert console.file.getvalue().splitlines() == lines


def output(*tokens, num_accepted=1):
    ids = list(tokens)
    stats = SpeculationStats(num_steps=1, num_tokens=len(ids), num_accepted=num_accepted)
    sources = [TokenSource.TARGET] * len(ids)
    return RequestOutput("x", [1], "x", ids, sources, [""] * len(ids), FinishReason.LENGTH, stats)


@pytest.mark.parametrize(
    ("seconds", "texts", "verdict"),
    [
        (1.0, (output(1, 2), output(1, 2)), "2.00 times as fast at batch size 1, and both texts"),
        (
            1.0,
            (output(1, 2), output(1, 2, num_accepted=0)),
            "2.00 times as fast (no draft was accepted: this comes from other work on the",
        ),
        (4.0, (output(1, 2), output(1, 2)), "0.50 times as fast (drafts cost time here)"),
        (1.0, (output(1, 2), output(1, 3)), "and 0 of 1 texts are identical"),
    ],
)
def test_the_verdict_comes_last(screen, seconds, texts, verdict):
    model = SimpleNamespace(dtype=torch.float32, native=None)
    target = SimpleNamespace(name="target", num_parameters=1e6, model=model)
    llm = SimpleNamespace(
        target=target, draft=None, companion=None, draft_names=(), speculation=None
    )
    comparison = Comparison(Run([texts[0]], 2.0), Run([texts[1]], seconds), greedy=True)
    show_comparison(screen, llm, comparison, batch_size=1)
    shown = screen.file.getvalue().strip().splitlines()
    assert verdict in " ".join(shown[-2:])
    bars = {line.split()[0]: line.count("━") for line in shown if "━" in line}
    assert max(bars.values()) == 40
    assert bars["target"] == (20 if seconds == 1.0 else 40)
