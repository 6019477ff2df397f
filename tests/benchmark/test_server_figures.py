"""Figures of servers under load, from requests made by hand."""

import pytest

from draftwise.audit.draft_counts import DraftCounts
from draftwise.benchmark.servers.contenders import ServerContender
from draftwise.benchmark.servers.figures import figures_of_servers, slower
from draftwise.benchmark.servers.requests import Answered
from draftwise.benchmark.servers.run import Asked, Cell, Questions, ServerResult, ServerTurn
from draftwise.prompt_files import Question

QUESTIONS = (Question(("a",), "letters", "1"), Question(("b",), "others", "2"))
CELL = Cell(Questions("work", QUESTIONS), 0.0, 2, None, 2, 2)
RATE = Cell(Questions("work", QUESTIONS), 1.0, None, 3.0, 2, 2)
NAMES = ("base", "s none", "s fixed:1", "s fixed:2")
CONTENDERS = [
    ServerContender(name, None, name.split(" ")[0], is_fixed="fixed" in name) for name in NAMES
]


def turn(seconds, counts=None, tokens=11, text="x", **others):
    """A turn of two requests, of which the second ends last."""
    answers = (
        Answered(0.0, seconds / 2, text, tokens, 0.1, **others),
        Answered(0.0, seconds, text, tokens, 0.2, **others),
    )
    asked = [Asked(q, 0, each) for q, each in zip(QUESTIONS, answers, strict=True)]
    return ServerTurn(asked, counts)


def figures(cell=CELL, **results):
    named = {name: ServerResult([turn(1.0), turn(2.0)]) for name in NAMES}
    for name, result in results.items():
        named[name.replace("_", " ", 1).replace("_", ":")] = result
    return figures_of_servers(cell, CONTENDERS, named)


def test_speeds_are_relative_to_the_first_in_the_same_round():
    cell = figures(s_none=ServerResult([turn(0.5), turn(4.0)]))
    base, own = (cell["contenders"][name] for name in NAMES[:2])
    # 22 tokens in 1 and in 2 seconds.
    assert base["tokens_per_second"] == pytest.approx({"median": 16.5, "low": 13.75, "high": 19.25})
    assert base["ratio"]["median"] == 1
    assert own["ratio"] == pytest.approx({"median": 1.25, "low": 0.875, "high": 1.625})
    assert (cell["workload"], cell["concurrency"], cell["temperature"]) == ("work", 2, 0.0)
    assert base["requests"] == 4
    assert base["num_tokens"] == 44


def test_percentiles_of_times():
    own = figures(base=ServerResult([turn(1.0)]))["contenders"]["base"]
    assert own["ttft_ms"]["median"] == pytest.approx(150)
    assert own["ttft_ms"]["p90"] == pytest.approx(190)
    # (0.5 - 0.1) / 10 and (1.0 - 0.2) / 10 seconds
    assert own["tpot_ms"]["median"] == pytest.approx(60)
    assert own["tpot_ms"]["p99"] == pytest.approx(79.6)


def test_losing_results_are_listed():
    cell = figures(
        s_none=ServerResult([turn(4.0), turn(8.0)]),
        s_fixed_1=ServerResult(error="lost"),
        s_fixed_2=ServerResult([turn(0.5), turn(1.0)]),
    )
    labels = {"workload": "work", "temperature": 0.0, "concurrency": 2}
    assert slower([cell]) == [
        {**labels, "contender": "s none", "ratio": pytest.approx(0.25)},
        {**labels, "contender": "s fixed:1", "ratio": 0.0},
    ]
    assert cell["contenders"]["s fixed:1"] == {"error": "lost"}
    assert cell["best_fixed"] == {"s": "s fixed:2"}


def test_a_contender_that_fails_later_keeps_its_rounds():
    own = figures(s_none=ServerResult([turn(0.5)], "lost"))["contenders"]["s none"]
    assert own["ratio"]["median"] == pytest.approx(2)
    assert own["error"] == "lost"


def test_requests_that_arrive_at_random_are_compared_by_the_speed_of_answers():
    """The throughput is that of the arrivals."""
    fast = turn(0.5)
    late = [Answered(3.5, 0.25, "x", 11, 0.1), Answered(3.5, 0.5, "x", 11, 0.1)]
    fast.requests = [Asked(q, 0, each) for q, each in zip(QUESTIONS, late, strict=True)]
    cell = figures(RATE, base=ServerResult([turn(1.0)]), s_none=ServerResult([fast]))
    own = cell["contenders"]["s none"]
    assert cell["request_rate"] == 3.0
    assert own["ratio"]["median"] == pytest.approx(2)
    assert own["tokens_per_second"]["median"] == pytest.approx(22 / 4.0)
    assert "same_texts" not in own


def test_acceptance_in_all_and_by_category():
    drafts = {"num_verified": 10, "num_accepted": 1}
    own = figures(s_none=ServerResult([turn(1.0, **drafts)]))["contenders"]["s none"]
    assert own["acceptance_rate"] == pytest.approx(0.1)
    # Each answer of 11 tokens took 10 steps, each of which has one token of its own.
    assert own["accepted_length"] == pytest.approx(1.1)
    letters = own["categories"]["letters"]
    assert (letters["requests"], letters["acceptance_rate"]) == (1, pytest.approx(0.1))
    # Of the category's answers in both rounds of the baseline: 40 and 90 ms, against 40 ms.
    assert letters["ratio"] == pytest.approx(65 / 40)
    assert "acceptance_rate" not in figures()["contenders"]["base"]


def test_acceptance_by_position():
    by_histogram = ServerResult([turn(1.0, acceptance_histogram=(2, 1, 1))])
    cell = figures(
        s_none=by_histogram,
        s_fixed_1=ServerResult(
            [turn(1.0, DraftCounts(4, 8, 3, {0: 3})), turn(1.0, DraftCounts(4, 8, 1, {0: 1}))]
        ),
        s_fixed_2=ServerResult([turn(1.0, DraftCounts(9, 8, 3, {0: 3, 1: 1}, {0: 5, 1: 2}))]),
    )
    by_position = [cell["contenders"][name].get("acceptance_by_position") for name in NAMES]
    assert by_position == [
        None,
        {"1": 0.5, "2": 0.25},
        {"1": 0.5},
        {"1": 0.6, "2": 0.5},
    ]


def test_texts_are_compared_with_those_of_the_first():
    cell = figures(s_none=ServerResult([turn(1.0, text="y"), turn(1.0)]))
    same = {name: own["same_texts"] for name, own in cell["contenders"].items()}
    assert same == {"base": 4, "s none": 2, "s fixed:1": 4, "s fixed:2": 4}


def test_failed_requests_are_counted_and_left_out():
    failed = Asked(QUESTIONS[1], 0, Answered(0.0, 9.0, error="lost"))
    partly = turn(1.0)
    partly.requests[1] = failed
    own = figures(s_none=ServerResult([partly]))["contenders"]["s none"]
    assert (own["requests"], own["failed_requests"], own["num_tokens"]) == (2, 1, 11)
    assert list(own["categories"]) == ["letters"]


def test_answers_without_tokens_have_no_ratio():
    cell = figures(base=ServerResult([turn(1.0, tokens=0)]))
    assert cell["contenders"]["s none"]["ratio"] == {}
    assert cell["contenders"]["base"]["tpot_ms"] == {}
