"""The acceptance law in isolation: identities, packing, greedy decoding, sampling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.rejection import accept, accept_greedy, sample

property_test = settings(deadline=None, derandomize=True, max_examples=60)
methods = st.sampled_from(["token", "block"])

BELOW_ONE = 1 - 2.0**-24  # the largest uniform number in float32


def distributions(generator, *shape, p_zero=0.3):
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64)
    weights *= torch.rand(*shape, generator=generator) >= p_zero
    weights[..., 0] += 1e-3
    return weights / weights.sum(dim=-1, keepdim=True)


class Batch:
    """Random arguments of ``accept`` for requests of the given verification lengths."""

    def __init__(self, seed, lengths, vocab, width):
        generator = torch.Generator().manual_seed(seed)
        batch = len(lengths)
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self.p = distributions(generator, int(self.lengths.sum()) + batch, vocab)
        keep = torch.rand(batch, width + 1, vocab, generator=generator) < 0.8
        keep[..., 0] = True
        self.proposals = distributions(generator, batch, width + 1, vocab) * keep
        self.tokens = torch.zeros(batch, width, dtype=torch.int64)
        if batch and width:
            flat = self.proposals[:, :width].reshape(-1, vocab)
            drawn = torch.multinomial(flat, 1, generator=generator)
            self.tokens = drawn.reshape(batch, width)
        nothing = torch.rand(batch, generator=generator) < 0.5  # a cut instead of a filter
        self.proposals[torch.arange(batch)[nothing], self.lengths[nothing]] = 0.0
        double = {"generator": generator, "dtype": torch.float64}
        self.accept_uniforms = torch.rand(batch, width, **double)
        self.final_uniforms = torch.rand(batch, **double)

    def arguments(self):
        return (
            self.p,
            self.proposals,
            self.tokens,
            self.lengths,
            self.accept_uniforms,
            self.final_uniforms,
        )

    def alone(self, i, width):
        """The arguments of one request, padded to ``width`` only."""
        first = int((self.lengths[:i] + 1).sum())
        return (
            self.p[first : first + int(self.lengths[i]) + 1],
            self.proposals[i : i + 1, : width + 1],
            self.tokens[i : i + 1, :width],
            self.lengths[i : i + 1],
            self.accept_uniforms[i : i + 1, :width],
            self.final_uniforms[i : i + 1],
        )


@st.composite
def batches(draw, max_batch=5, max_width=4, max_vocab=7):
    width = draw(st.integers(0, max_width))
    lengths = draw(st.lists(st.integers(0, width), min_size=1, max_size=max_batch))
    return Batch(draw(st.integers(0, 10**6)), lengths, draw(st.integers(2, max_vocab)), width)


@property_test
@given(batches(), methods)
def test_results_do_not_depend_on_the_batch(batch, method):
    together = accept(*batch.arguments(), method=method)
    for i, length in enumerate(batch.lengths.tolist()):
        for width in {length, batch.tokens.shape[1]}:
            alone = accept(*batch.alone(i, width), method=method)
            assert alone.num_accepted.tolist() == [int(together.num_accepted[i])]
            assert alone.next_tokens.tolist() == [int(together.next_tokens[i])]


@property_test
@given(batches(), methods, st.integers(0, 10**6))
def test_entries_beyond_the_length_are_ignored(batch, method, seed):
    """They are ignored even if they are NaN."""
    expected = accept(*batch.arguments(), method=method)
    generator = torch.Generator().manual_seed(seed)
    vocab = batch.p.shape[1]
    column = torch.arange(batch.tokens.shape[1] + 1)
    beyond = column > batch.lengths.unsqueeze(1)
    batch.proposals[beyond] = float("nan")
    beyond = beyond[:, 1:]
    batch.tokens[beyond] = torch.randint(vocab, (int(beyond.sum()),), generator=generator)
    batch.accept_uniforms[beyond] = 0.0
    actual = accept(*batch.arguments(), method=method)
    assert torch.equal(actual.num_accepted, expected.num_accepted)
    assert torch.equal(actual.next_tokens, expected.next_tokens)


@property_test
@given(batches(), methods, st.sampled_from([0.0, 0.5, 1.0]))
def test_results_have_positive_probability(batch, method, p_zero):
    """Accepted tokens and the next token have p > 0, and only verified tokens are accepted."""
    batch.accept_uniforms *= batch.accept_uniforms > p_zero  # 0 is a valid uniform number
    num_accepted, next_tokens, *probabilities = accept(*batch.arguments(), method=method)
    for each in probabilities:
        assert bool(((each >= 0) & (each <= 1)).all())
    assert num_accepted.dtype == next_tokens.dtype == torch.int64
    first = 0
    for i, length in enumerate(batch.lengths.tolist()):
        count = int(num_accepted[i])
        assert 0 <= count <= length
        said = [*batch.tokens[i, :count].tolist(), int(next_tokens[i])]
        for position, token in enumerate(said):
            assert batch.p[first + position, token] > 0
        first += length + 1


def test_an_empty_batch():
    for method in ["token", "block"]:
        batch = Batch(0, [], 5, 3)
        accepted = accept(*batch.arguments(), method=method)
        assert accepted.num_accepted.shape == accepted.next_tokens.shape == (0,), method
        nothing = torch.zeros(0, dtype=torch.int64)
        greedy = accept_greedy(nothing, torch.zeros(0, 3, dtype=torch.int64), nothing)
        assert greedy.num_accepted.shape == greedy.next_tokens.shape == (0,), method


@property_test
@given(batches(max_width=1))
def test_both_methods_are_equal_for_one_token(batch):
    """With one drafted token, block and token verification are the same."""
    batch.proposals[torch.arange(len(batch.lengths)), batch.lengths] = 0.0
    token = accept(*batch.arguments(), method="token")
    block = accept(*batch.arguments(), method="block")
    assert torch.equal(token.num_accepted, block.num_accepted)
    assert torch.equal(token.next_tokens, block.next_tokens)


@property_test
@given(batches(), methods)
def test_lenience_of_one_changes_nothing(batch, method):
    expected = accept(*batch.arguments(), method=method)
    lenience = torch.ones(len(batch.lengths), dtype=torch.float64)
    actual = accept(*batch.arguments(), lenience=lenience, method=method)
    assert torch.equal(actual.num_accepted, expected.num_accepted)
    assert torch.equal(actual.next_tokens, expected.next_tokens)


def test_lenience_divides_the_denominator_of_its_own_request():
    p, q = 0.3, 0.6
    target = torch.tensor([p, 1 - p]).expand(4, 2)
    proposals = torch.tensor([[q, 1 - q], [0.0, 0.0]]).expand(2, 2, 2)
    tokens, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    lenience = torch.tensor([1.0, 0.7])
    for uniform, expected in [(0.49, [1, 1]), (0.51, [0, 1]), (0.71, [0, 1]), (0.72, [0, 0])]:
        numbers = torch.full((2, 1), uniform)
        accepted = accept(target, proposals, tokens, lengths, numbers, numbers[:, 0], lenience)
        assert accepted.num_accepted.tolist() == expected


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE])
def test_a_draft_with_the_target_distribution_is_always_accepted(method, uniform):
    generator = torch.Generator().manual_seed(0)
    p = distributions(generator, 64, 5, 50).float()  # 64 requests, 4 drafted tokens
    proposals = p.clone()
    proposals[:, 4] = 0.0
    tokens = torch.multinomial(p[:, :4].reshape(-1, 50), 1, generator=generator).reshape(64, 4)
    accepted = accept(
        p.reshape(-1, 50),
        proposals,
        tokens,
        torch.full((64,), 4),
        torch.full((64, 4), uniform),
        torch.rand(64, generator=generator),
        method=method,
    )
    assert accepted.num_accepted.tolist() == [4] * 64


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("final", [0.0, 0.3, 0.7, BELOW_ONE])
def test_a_rejection_by_rounding_still_gives_a_possible_token(method, final):
    """By one rounding error p ≤ q′ everywhere, so the residual is empty."""
    p = torch.tensor([[0.0, 0.5 - 2.0**-24, 0.5], [0.0, 0.5, 0.5]])
    proposals = torch.tensor([[[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]])
    accepted = accept(
        p,
        proposals,
        torch.tensor([[1]]),
        torch.tensor([1]),
        torch.tensor([[BELOW_ONE]]),
        torch.tensor([final]),
        method=method,
    )
    assert accepted.num_accepted.tolist() == [0]
    assert accepted.next_tokens.tolist() == [1 if final < 0.5 else 2]


token_lists = st.lists(st.integers(0, 2), max_size=5)


@property_test
@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=5), st.data())
def test_greedy_accepts_tokens_equal_to_the_argmax(requests, data):
    drafts = [draft for draft, _ in requests]
    width = max(map(len, drafts))
    said = [
        data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
        for draft in drafts
    ]
    padded = torch.tensor([draft + [0] * (width - len(draft)) for draft in drafts]).long()
    tokens = padded.reshape(len(drafts), width)
    lengths = torch.tensor([len(draft) for draft in drafts])
    target_tokens = torch.tensor([token for row in said for token in row])
    greedy = accept_greedy(target_tokens, tokens, lengths)

    for i, (draft, target) in enumerate(zip(drafts, said, strict=True)):
        count = 0
        while count < len(draft) and draft[count] == target[count]:
            count += 1
        assert int(greedy.num_accepted[i]) == count
        assert int(greedy.next_tokens[i]) == target[count]

    # At temperature 0 the general law with one-hot distributions gives the same result.
    p = torch.nn.functional.one_hot(target_tokens, 3).float()
    proposals = torch.zeros(len(drafts), width + 1, 3)
    proposals[:, :width] = torch.nn.functional.one_hot(tokens, 3)
    proposals[torch.arange(len(drafts)), lengths] = 0.0
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    accept_uniforms = torch.rand(len(drafts), width, generator=generator)
    final_uniforms = torch.rand(len(drafts), generator=generator)
    for method in ("token", "block"):
        general = accept(
            p, proposals, tokens, lengths, accept_uniforms, final_uniforms, method=method
        )
        assert torch.equal(general.num_accepted, greedy.num_accepted)
        assert torch.equal(general.next_tokens, greedy.next_tokens)


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("lenience", [None, 0.7])
def test_prefix_acceptance_prob_is_the_acceptance_frequency(method, lenience):
    """Its mean over drafts from q equals the frequency of accepting at least this many tokens."""
    generator = torch.Generator().manual_seed(3)
    vocab, width, count = 5, 4, 60_000
    # One distribution per prefix length is enough, because the law does not use the prefix itself.
    p, q = (distributions(generator, width + 1, vocab, p_zero=0.0) for _ in range(2))
    tokens = torch.multinomial(q[:width].repeat(count, 1), 1, generator=generator)
    proposals = q.repeat(count, 1, 1).clone()
    proposals[:, width] = 0.0
    accepted = accept(
        p.repeat(count, 1),
        proposals,
        tokens.view(count, width),
        torch.full((count,), width),
        torch.rand(count, width, generator=generator, dtype=torch.float64),
        torch.rand(count, generator=generator, dtype=torch.float64),
        None if lenience is None else torch.full((count,), lenience),
        method,
    )
    kept = (accepted.num_accepted.unsqueeze(1) > torch.arange(width)).double()
    difference = kept - accepted.prefix_acceptance_prob
    error = difference.std(dim=0) / count**0.5
    assert (difference.mean(dim=0).abs() < 4 * error + 1e-6).all()
    assert 0.1 < accepted.prefix_acceptance_prob[:, 0].mean() < 0.99
    product = accepted.acceptance.cumprod(dim=1)
    if lenience is None:
        assert (accepted.prefix_acceptance_prob >= product - 1e-6).all()
        assert torch.allclose(accepted.prefix_acceptance_prob, product) == (method == "token")


weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e3)), min_size=1, max_size=30).filter(
    any
)
uniform_numbers = st.one_of(
    st.sampled_from([0.0, 2.0**-24, BELOW_ONE]),
    st.integers(0, 2**24 - 1).map(lambda n: n * 2.0**-24),
)


@property_test
@given(st.lists(weights, min_size=1, max_size=4), uniform_numbers)
def test_a_token_of_weight_zero_is_never_drawn(rows, uniform):
    vocab = max(map(len, rows))
    table = torch.tensor([row + [0.0] * (vocab - len(row)) for row in rows])
    drawn = sample(table, torch.full((len(rows),), uniform))
    assert drawn.shape == (len(rows),)
    assert drawn.dtype == torch.int64
    assert bool((table.gather(1, drawn.unsqueeze(1)) > 0).all())


def test_a_row_of_zeros_gives_index_zero():
    assert sample(torch.zeros(2, 5), torch.tensor([0.0, 0.9])).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 7, 100])
def test_drawing_has_the_exact_frequencies(vocab, dtype):
    """An evenly spaced grid of uniforms draws each token in proportion to its weight."""
    generator = torch.Generator().manual_seed(vocab)
    weights = 5 * distributions(generator, vocab)  # not normalised
    grid = 20_011
    numbers = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    drawn = sample(weights.to(dtype).expand(grid, vocab), numbers.to(dtype))
    frequencies = torch.bincount(drawn, minlength=vocab).double() / grid
    assert float((frequencies - weights / weights.sum()).abs().max()) < 1.1 / grid


def test_the_largest_uniform_draws_a_possible_token():
    """With many small weights, the rounded total must not push the draw past the end."""
    for num_zeros in [0, 1, 5]:
        table = torch.full((1, 3000), 1 / 3000)
        table[:, 3000 - num_zeros :] = 0.0
        drawn = int(sample(table, torch.tensor([BELOW_ONE])))
        assert float(table[0, drawn]) > 0, num_zeros


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [513, 4096, 50_000])
def test_drawing_from_a_large_vocabulary_loses_no_token(vocab):
    """Quantiles in the middle of each token's share, unlikely tokens included, find that token."""
    generator = torch.Generator().manual_seed(vocab)
    weights = (4 * torch.randn(vocab, generator=generator)).softmax(0)
    weights[::7] = 0.0
    cumulative = weights.double().cumsum(0)
    middle = ((cumulative - weights.double() / 2) / cumulative[-1]).clamp(max=1 - 2**-53)
    chosen = torch.nonzero(weights).squeeze(1)[:: max(1, vocab // 2000)]
    assert weights[chosen].min() < 2**-24  # below what a float32 running sum can tell apart
    drawn = sample(weights.expand(len(chosen), vocab), middle[chosen])
    assert torch.equal(drawn, chosen)


@pytest.mark.parametrize("lenience", [None, 0.7])
def test_one_hot_proposals_without_distributions(lenience):
    """Accepted as if q were given, and each position is drawn with its own number."""
    generator = torch.Generator().manual_seed(4)
    vocab, width, count = 6, 3, 60_000
    p = distributions(generator, width + 1, vocab, p_zero=0.2).repeat(count, 1)
    tokens = torch.randint(0, vocab, (count, width), generator=generator)
    lengths = torch.full((count,), width)
    final, following = (
        torch.rand(count, *shape, generator=generator, dtype=torch.float64)
        for shape in ((), (width,))
    )
    accept_uniforms = torch.rand(count, width, generator=generator)
    leniences = None if lenience is None else torch.full((count,), lenience)
    ours = accept(
        p, None, tokens, lengths, accept_uniforms, final, leniences, following_uniforms=following
    )
    proposals = torch.zeros(count, width + 1, vocab)
    proposals[:, :width] = torch.nn.functional.one_hot(tokens, vocab)
    tested = accept(p, proposals, tokens, lengths, accept_uniforms, final, leniences, "token")
    torch.testing.assert_close(ours.acceptance, tested.acceptance)
    torch.testing.assert_close(ours.prefix_acceptance_prob, tested.prefix_acceptance_prob)
    joint = [
        torch.bincount(each.num_accepted * vocab + each.next_tokens, minlength=vocab * (width + 1))
        for each in (ours, tested)
    ]
    assert (joint[0] - joint[1]).abs().max() < 5 * (2 * count / 8) ** 0.5
    if lenience is None:
        row = torch.arange(count) * (width + 1) + ours.num_accepted
        uniforms = torch.cat([final.unsqueeze(1), following], dim=1)
        chosen = uniforms.gather(1, ours.num_accepted.unsqueeze(1)).squeeze(1)
        assert torch.equal(ours.next_tokens, sample(p[row], chosen))
