import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwise.core.sampling import (
    LogitControls,
    TokenHistory,
    control_logits,
    greedy_tokens,
    probabilities,
)

from ..refusals import error_of

property_test = settings(deadline=None, derandomize=True, max_examples=60)


@dataclass(frozen=True)
class Row:
    """The sampling parameters of one request, as specified by a user."""

    temperature: float = 1.0
    top_k: int = 0  # off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Case:
    """Rows of logits with their parameters and the tokens each has seen."""

    rows: list[Row]
    logits: torch.Tensor
    prompts: list[list[int]]
    outputs: list[list[int]]

    @property
    def vocab(self):
        return self.logits.shape[1]

    def controls(self):
        return controls_of(self.rows, self.vocab)

    def token_history(self):
        return token_history_of(self.prompts, self.outputs)

    def row(self, i):
        return Case([self.rows[i]], self.logits[i : i + 1], [self.prompts[i]], [self.outputs[i]])

    def probabilities(self):
        return probabilities(self.logits, self.controls(), self.token_history())


def controls_of(rows, vocab):
    """Controls with ``None`` for the parameters that no row uses."""

    def column(name, off, dtype=torch.float32):
        values = [getattr(row, name) for row in rows]
        return None if all(v == off for v in values) else torch.tensor(values, dtype=dtype)

    top_k = column("top_k", 0, torch.int64)
    tokens = values = None
    if any(row.bias for row in rows):
        tokens, values = torch.zeros(len(rows), 3, dtype=torch.long), torch.zeros(len(rows), 3)
        for i, row in enumerate(rows):
            for place, (token, value) in enumerate(row.bias):
                tokens[i, place], values[i, place] = token, value
    return LogitControls(
        temperature=torch.tensor([row.temperature for row in rows]),
        all_greedy=all(row.temperature == 0 for row in rows),
        top_k=None if top_k is None else torch.where(top_k == 0, vocab, top_k),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        repetition_penalty=column("repetition_penalty", 1.0),
        presence_penalty=column("presence_penalty", 0.0),
        frequency_penalty=column("frequency_penalty", 0.0),
        bias_tokens=tokens,
        bias_values=values,
    )


def token_history_of(prompts, outputs):
    rows = [list(dict.fromkeys(p + o)) for p, o in zip(prompts, outputs, strict=True)]
    widest = max(len(row) for row in rows)
    padded = [row + row[:1] * (widest - len(row)) for row in rows]
    counts = [[o.count(token) for token in row] for row, o in zip(padded, outputs, strict=True)]
    return TokenHistory(torch.tensor(padded), torch.tensor(counts, dtype=torch.float32))


def random_logits(seed, rows, vocab, scale):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


temperatures = st.floats(0.05, 5.0)
top_ps = st.one_of(st.just(1.0), st.floats(0.01, 0.999))
min_ps = st.one_of(st.just(0.0), st.floats(0.001, 1.0))
penalties = st.one_of(st.just(1.0), st.floats(0.5, 3.0))
additive_penalties = st.one_of(st.just(0.0), st.floats(-2.0, 2.0))


@st.composite
def cases(draw, min_rows=1, max_rows=4, greedy=True, max_blocked=0.5):
    vocab = draw(st.integers(2, 40))
    num_rows = draw(st.integers(min_rows, max_rows))
    tokens = st.integers(0, vocab - 1)
    row = st.builds(
        Row,
        temperature=st.one_of(st.just(0.0), temperatures) if greedy else temperatures,
        top_k=st.integers(0, vocab + 2),
        top_p=top_ps,
        min_p=min_ps,
        repetition_penalty=penalties,
        presence_penalty=additive_penalties,
        frequency_penalty=additive_penalties,
        bias=st.lists(
            st.tuples(tokens, st.floats(-5.0, 5.0)), max_size=3, unique_by=lambda pair: pair[0]
        ).map(tuple),
    )
    logits = random_logits(draw(st.integers(0, 10**6)), num_rows, vocab, draw(st.floats(0.2, 8.0)))
    p_blocked = draw(st.sampled_from([0.0, max_blocked]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    blocked = torch.rand(logits.shape, generator=generator) < p_blocked
    blocked.scatter_(1, logits.argmax(dim=1, keepdim=True), False)
    texts = st.lists(tokens, min_size=1, max_size=8)
    return Case(
        rows=draw(st.lists(row, min_size=num_rows, max_size=num_rows)),
        logits=logits.masked_fill(blocked, float("-inf")),
        prompts=draw(st.lists(texts, min_size=num_rows, max_size=num_rows)),
        outputs=draw(st.lists(texts, min_size=num_rows, max_size=num_rows)),
    )


def hugging_face(logits, row, tokens):
    """The distribution that ``generate`` samples from, by its own processors in its own order."""
    processors = LogitsProcessorList()
    if row.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(row.repetition_penalty))
    processors.append(TemperatureLogitsWarper(row.temperature))
    if row.top_k:
        processors.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        processors.append(TopPLogitsWarper(row.top_p))
    if row.min_p:
        processors.append(MinPLogitsWarper(row.min_p))
    return processors(torch.tensor([tokens]), logits).softmax(dim=-1)


def far_from_a_threshold(case, margin=1e-5):
    """Whether the tokens that top-p and min-p keep do not depend on rounding."""
    row = case.rows[0]
    unfiltered = Row(row.temperature, row.top_k, repetition_penalty=row.repetition_penalty)
    p = Case([unfiltered], case.logits, case.prompts, case.outputs).probabilities()[0].double()
    p = p.sort(descending=True).values
    before = p.cumsum(0) - p
    kept = p[(before < row.top_p) | (before == 0)]
    return (row.top_p == 1 or bool(((before - row.top_p).abs() > margin).all())) and bool(
        ((kept / kept[0] - row.min_p).abs() > margin)[1:].all()
    )


@property_test
@given(cases(max_rows=1, greedy=False))
def test_equals_hugging_face(case):
    row = Row(
        case.rows[0].temperature,
        case.rows[0].top_k,
        case.rows[0].top_p,
        case.rows[0].min_p,
        case.rows[0].repetition_penalty,
    )
    case = Case([row], case.logits, case.prompts, case.outputs)
    assume(far_from_a_threshold(case))
    expected = hugging_face(case.logits, row, case.prompts[0] + case.outputs[0])
    actual = case.probabilities()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(actual > 0, expected > 0)


def test_top_k_keeps_ties_like_hugging_face():
    """Logits in bfloat16 are often equal. The order of equal logits must not matter."""
    for top_k in [1, 2, 3, 5, 9]:
        logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, -1.0, 2.0, 3.0]])
        expected = hugging_face(logits, Row(top_k=top_k), [0])
        actual = Case([Row(top_k=top_k)], logits, [[0]], [[]]).probabilities()
        torch.testing.assert_close(actual, expected)


def reference(case):
    """Reference implementation: a loop over one row, in double precision."""
    (row,) = case.rows
    scores = [float(x) for x in case.logits[0]]
    for token, value in row.bias:
        scores[token] += value
    for token in set(case.prompts[0] + case.outputs[0]):
        x = scores[token]
        scores[token] = x * row.repetition_penalty if x < 0 else x / row.repetition_penalty
    for token in set(case.outputs[0]):
        scores[token] -= row.presence_penalty
        scores[token] -= row.frequency_penalty * case.outputs[0].count(token)
    return scores


@property_test
@given(cases(max_rows=1))
def test_bias_and_penalties_equal_a_direct_loop(case):
    expected = torch.tensor([reference(case)])
    actual = control_logits(case.logits, case.controls(), case.token_history())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@property_test
@given(cases(max_rows=1, greedy=False))
def test_penalised_distribution_equals_a_direct_loop(case):
    """Bias and penalties come before the temperature."""
    row = case.rows[0]
    kept = Row(
        row.temperature,
        repetition_penalty=row.repetition_penalty,
        presence_penalty=row.presence_penalty,
        frequency_penalty=row.frequency_penalty,
        bias=row.bias,
    )
    case = Case([kept], case.logits, case.prompts, case.outputs)
    scores = [x / row.temperature for x in reference(case)]
    largest = max(scores)
    weights = [math.exp(x - largest) for x in scores]
    expected = torch.tensor([[w / sum(weights) for w in weights]])
    torch.testing.assert_close(case.probabilities(), expected, rtol=1e-3, atol=1e-5)


@property_test
@given(cases(min_rows=2, max_rows=5))
def test_mixed_batches_equal_row_by_row(case):
    together = case.probabilities()
    alone = torch.cat([case.row(i).probabilities() for i in range(len(case.rows))])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-7)
    assert torch.equal(together > 0, alone > 0)


@pytest.mark.slow
@property_test
@given(cases())
def test_every_row_is_a_distribution(case):
    p = case.probabilities()
    assert p.dtype == torch.float32
    assert bool((p >= 0).all())
    torch.testing.assert_close(p.sum(dim=1), torch.ones(len(case.rows)))
    assert not bool(p[case.logits == float("-inf")].any())


@property_test
@given(cases())
def test_greedy_rows_are_one_hot_at_the_largest_controlled_logit(case):
    p = case.probabilities()
    tokens = greedy_tokens(case.logits, case.controls(), case.token_history())
    for i, row in enumerate(case.rows):
        scores = reference(case.row(i))
        assert scores[int(tokens[i])] == pytest.approx(max(scores), abs=1e-5)
        if row.temperature == 0:
            one_hot = torch.zeros(case.vocab)
            one_hot[tokens[i]] = 1.0
            assert torch.equal(p[i], one_hot)


@property_test
@given(cases(), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_rows_can_be_repeated_and_reordered(case, index):
    index = torch.tensor([i % len(case.rows) for i in index])
    taken = probabilities(
        case.logits[index], case.controls().rows(index), case.token_history().rows(index)
    )
    torch.testing.assert_close(taken, case.probabilities()[index], rtol=1e-5, atol=1e-7)


@property_test
@given(cases(), st.data())
def test_history_after_one_token_more(case, data):
    tokens = data.draw(
        st.lists(st.integers(0, case.vocab - 1), min_size=len(case.rows), max_size=len(case.rows))
    )
    valid = data.draw(st.lists(st.booleans(), min_size=len(case.rows), max_size=len(case.rows)))
    before = case.token_history()
    tokens_before, counts = before.tokens.clone(), before.counts.clone()
    after = before.after(torch.tensor(tokens), torch.tensor(valid))
    outputs = [
        output + [token] * said
        for output, token, said in zip(case.outputs, tokens, valid, strict=True)
    ]
    assert in_rows(after) == in_rows(token_history_of(case.prompts, outputs))
    # The history before is still needed when a drafted token is rejected.
    assert torch.equal(before.tokens, tokens_before)
    assert torch.equal(before.counts, counts)
    # Only the first token of a row may occur again, with the same count.
    for row, row_counts in zip(after.tokens.tolist(), after.counts.tolist(), strict=True):
        pairs = list(zip(row, row_counts, strict=True))
        others = [pair for pair in pairs[1:] if pair != pairs[0]]
        assert len({token for token, _ in others} | {row[0]}) == len(others) + 1


def in_rows(token_history):
    """The count of each token, row by row."""
    return [
        dict(zip(tokens, counts, strict=True))
        for tokens, counts in zip(
            token_history.tokens.tolist(), token_history.counts.tolist(), strict=True
        )
    ]


OFF = {
    "top_k": torch.full((3,), 11),
    "top_p": torch.ones(3),
    "min_p": torch.zeros(3),
    "repetition_penalty": torch.ones(3),
    "presence_penalty": torch.zeros(3),
    "frequency_penalty": torch.zeros(3),
}
TEMPERATURE = torch.tensor([0.7, 0.0, 1.3])


def test_a_disabled_parameter_changes_nothing():
    for name in OFF:
        logits = random_logits(3, 3, 11, 3.0)
        token_history = token_history_of([[1, 2], [3], [4]], [[1], [], [5, 5]])
        plain = LogitControls(TEMPERATURE, all_greedy=False)
        off = LogitControls(TEMPERATURE, all_greedy=False, **{name: OFF[name]})
        assert not plain.uses_token_history, name
        assert off.uses_token_history == name.endswith("penalty")
        torch.testing.assert_close(
            probabilities(logits, off, token_history),
            probabilities(logits, plain),
            rtol=1e-6,
            atol=0,
        )


def test_top_p_of_one_keeps_even_the_least_likely_token():
    """It is kept beside a row that uses top-p, although the sum of the others rounds to 1."""
    logits = torch.zeros(2, 50)
    logits[:, 0] = 25.0
    controls = LogitControls(torch.ones(2), all_greedy=False, top_p=torch.tensor([1.0, 0.9]))
    p = probabilities(logits, controls)
    assert bool((p[0] > 0).all())
    assert p[1].count_nonzero() == 1


def test_top_p_of_zero_keeps_the_most_likely_token():
    logits = torch.tensor([[0.1, 2.0, 1.9], [3.0, 0.0, -1.0]])
    controls = LogitControls(torch.ones(2), all_greedy=False, top_p=torch.zeros(2))
    assert probabilities(logits, controls).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_the_logits_of_the_caller_are_not_modified():
    case = Case(
        [Row(0.8, 3, 0.9, 0.1, 1.2, 0.3, 0.4, ((2, 1.0),)), Row(temperature=0.0)],
        random_logits(1, 2, 9, 2.0),
        [[1], [2]],
        [[3], [4, 4]],
    )
    before = case.logits.clone()
    case.probabilities()
    greedy_tokens(case.logits, case.controls(), case.token_history())
    assert torch.equal(case.logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_type_are_processed_in_float32(dtype):
    case = Case([Row(0.8, 4, 0.9, 0.05, 1.3)], random_logits(2, 1, 20, 3.0), [[1, 2]], [[3]])
    logits = case.logits.to(dtype)
    in_float32 = Case(case.rows, logits.float(), case.prompts, case.outputs).probabilities()
    actual = Case(case.rows, logits, case.prompts, case.outputs).probabilities()
    assert actual.dtype == torch.float32
    assert torch.equal(actual, in_float32)


def test_penalties_without_a_history_are_refused():
    for name in ["repetition_penalty", "presence_penalty", "frequency_penalty"]:
        controls = LogitControls(torch.ones(1), all_greedy=False, **{name: torch.tensor([1.5])})
        error_of(probabilities, torch.zeros(1, 4), controls, error=ValueError, match="history")


class TestMasks:
    """Masked tokens have no effect on the filters or on sampling."""

    PARTS = (
        {},
        {"top_k": torch.tensor([2, 3, 11])},
        {"top_p": torch.tensor([0.5, 0.9, 1.0])},
        {"min_p": torch.tensor([0.3, 0.0, 0.1])},
        {
            "bias_tokens": torch.tensor([[1, 5], [2, 0], [9, 6]]),
            "bias_values": torch.tensor([[1.5, -2.0], [2.5, 0.0], [-1.0, 1.0]]),
        },
        {"presence_penalty": torch.tensor([1.0, 0.0, 2.0])},
    )

    @pytest.mark.parametrize("parts", PARTS, ids=lambda parts: next(iter(parts), "plain"))
    def test_equals_a_smaller_vocabulary(self, parts):
        logits, keep = random_logits(3, 3, 11, 2.0), torch.tensor([1, 2, 5, 6, 9])
        mask = torch.full((3, 11), -torch.inf)
        mask[:, keep] = 0.0
        prompts, outputs = [[1, 4], [2], [9, 5]], [[1, 1, 6], [], [5, 3]]
        token_history = token_history_of(prompts, outputs)
        controls = LogitControls(torch.tensor([0.7, 0.0, 1.3]), all_greedy=False, **parts)
        # Tokens that are not in the smaller vocabulary become its token 0 without any change.
        places = {token: place for place, token in enumerate(keep.tolist())}
        small = dict(parts)
        if "bias_tokens" in parts:
            small["bias_tokens"] = parts["bias_tokens"].clone().apply_(lambda t: places.get(t, 0))
        kept = [
            [[places[t] for t in text if t in places] for text in x] for x in (prompts, outputs)
        ]
        p = probabilities(logits, controls.masked(mask), token_history)
        expected = probabilities(
            logits[:, keep],
            LogitControls(controls.temperature, all_greedy=False, **small),
            token_history_of(*kept),
        )
        torch.testing.assert_close(p[:, keep], expected)
        assert p.sum(dim=1).tolist() == pytest.approx([1.0] * 3)
        greedy = greedy_tokens(logits, controls.masked(mask), token_history)
        assert greedy[1] == p[1].argmax()

    def test_rows_without_a_mask_do_not_change(self):
        logits = random_logits(4, 2, 50, 3.0)
        mask = torch.zeros(2, 50)
        mask[0, ::2] = -torch.inf
        controls = LogitControls(
            torch.ones(2), all_greedy=False, top_p=torch.tensor([0.9, 0.9]), any_greedy=False
        )
        p = probabilities(logits, controls.masked(mask))
        assert torch.equal(p[1], probabilities(logits, controls)[1])
        assert p[0, ::2].count_nonzero() == 0
