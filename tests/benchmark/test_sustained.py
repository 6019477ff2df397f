"""Turns of engines that are kept full."""

import itertools
from types import SimpleNamespace

import pytest

from draftwise.benchmark.sustained import (
    BatchContender,
    Counts,
    begin,
    best_static,
    compete,
    summary,
)
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.params import SamplingParams


def test_one_turn_has_no_standard_error():
    with pytest.raises(InvalidParameterError, match="rounds: must be at least 2"):
        compete([BatchContender("none", "none", None, batch_size=3)], 1, 0.1, 0)


def counts(rounds, batch_size=1, steps=10):
    own = Counts(rounds=rounds, steps=steps)
    own.totals["verified"], own.totals["accepted"] = 8, 4
    return own


def everybody():
    """No speculation, a fixed length twice as fast, and an oracle whose replay is twice as fast."""
    llm = SimpleNamespace()
    none = BatchContender("none", "none", llm, True, counts=counts([(10, 1.0), (10, 1.0)]))
    fixed = BatchContender("fixed:3", "fixed", llm, True, counts=counts([(20, 1.0), (20, 1.0)]))
    again = BatchContender("replay:3", "replay", llm, counts=counts([(1, 0.5), (1, 0.5)]))
    oracle = BatchContender("oracle:3", "oracle", llm, counts=counts([(15, 9.0), (15, 9.0)]))
    return [none, fixed, again, oracle]


@pytest.mark.parametrize(("length", "max_tokens"), [(10, 7), (100, 4 * 7), (190, 10)])
def test_answers_last_until_all_requests_are_prefilled(length, max_tokens):
    """2 prompts of 100 tokens in chunks of 32 take 7 passes, each gaining at most 4 tokens. With a
    context of 200, prompts of 190 tokens leave room for 10. All contenders have equal lengths."""
    engine = SimpleNamespace(max_model_len=200)
    everybody = [
        BatchContender(
            "contender",
            "fixed",
            SimpleNamespace(speculation=speculation, max_chunk_tokens=32, engine=engine),
        )
        for speculation in (SimpleNamespace(num_speculative_tokens=3, tree_width=1), None)
    ]
    begin(everybody, [[0] * length, [0] * 5], SamplingParams(max_tokens=7), 2)
    assert [each.params.max_tokens for each in everybody] == [max_tokens] * 2
    assert all(each.params.ignore_eos for each in everybody)


@pytest.mark.slow
def test_a_batch_that_is_never_full_is_an_error():
    """Requests that end with their first token never fill the batch."""
    llm = LLM("zoo:draft", None, "float32", max_chunk_tokens=4)
    one = BatchContender("none", "none", llm)
    one.begin([[1] * 40], SamplingParams(max_tokens=8), 4)
    one.params = SamplingParams(max_tokens=2, ignore_eos=True)
    with pytest.raises(InvalidParameterError, match="a batch of 4 full"):
        one.warm_up(1)


def test_the_first_answers_end_at_staggered_times():
    """So that all contenders have the same distribution of contexts in every step."""
    llm = LLM("zoo:draft", None, "float32")
    one = BatchContender("none", "none", llm)
    one.begin([[1] * 5], SamplingParams(max_tokens=30), 4)
    one.warm_up(1)
    limits = [request.params.max_tokens for request in one.running.values()]
    assert limits == [8, 15, 23, 30]
    one.settle()
    one.take_turn(0.2)
    assert all(r.params.max_tokens == 30 for r in one.running.values() if r.request_id >= 4)
    ages = sorted(request.num_output_tokens for request in one.running.values())
    assert all(4 <= b - a <= 11 for a, b in itertools.pairwise(ages))
    assert 5 < one.counts.context / one.counts.steps / 4 < 35


def test_the_oracle_is_timed_by_its_replay():
    found = summary(everybody())
    assert list(found) == ["none", "fixed:3", "oracle:3"]
    assert found["fixed:3"]["ratio"] == pytest.approx(2.0)
    assert found["oracle:3"]["ratio"] == pytest.approx(3.0)
    assert found["none"]["acceptance_rate"] == 0.5
    assert best_static(found) == "fixed:3"
