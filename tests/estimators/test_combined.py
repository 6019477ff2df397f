"""The acceptance model from several signals: its fits, online updates and vocabulary estimates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.signals import agreement, entropy, overlap
from draftwise.estimators.combined import Inputs, SignalModel, Signals
from draftwise.estimators.polynomial import SMALLEST_TOKEN_PROB
from draftwise.estimators.records import Records

property_test = settings(deadline=None, derandomize=True, max_examples=60)
each_kind = pytest.mark.parametrize("inputs", Inputs)
NUM_WEIGHTS = {Inputs.FREE: 8, Inputs.COMBINED: 15, Inputs.PREDICTABLE: 8}

# Laws that differ from the built-in weights.
LAWS = {
    Inputs.FREE: [1.0, 0.3, -0.05, 0.4, -0.1, 0.1, -0.5, -0.8],
    Inputs.COMBINED: [
        *(-1.0, 0.2, 0.02, 0.2, -0.05, 0.05, 0.5, -0.4),
        *(0.8, 1.0, 0.3, 0.7, -0.6, 0.1, 0.2),
    ],
    Inputs.PREDICTABLE: [-1.0, -0.8, 0.1, 1.5, 0.5, 0.3, -0.5, -0.6],
}


def random_signals(size, seed=0):
    random = np.random.default_rng(seed)
    return Signals(
        token_prob=random.uniform(0.001, 1, size) ** 2,
        entropy=random.uniform(0, 4, size),
        history=random.uniform(0, 1, size),
        position=np.arange(size) % 4 * 1.0,
        overlap=random.uniform(0, 1, size),
        agreement=random.uniform(0, 1, size),
    )


def records_of(signals, acceptance, chain_length=4):
    size = len(acceptance)
    columns = {
        name: values.astype(np.float32)
        for name, values in vars(signals).items()
        if name != "position"
    }
    return Records(
        chain=np.arange(size) // chain_length,
        position=signals.position.astype(np.int64),
        top_prob=np.zeros(size, dtype=np.float32),
        confidence=np.zeros(size, dtype=np.float32),
        acceptance=np.asarray(acceptance, dtype=np.float32),
        accepted=np.zeros(size, dtype=np.bool_),
        **columns,
    )


def law(inputs):
    return SignalModel(inputs, np.array(LAWS[inputs]))


def error(model, other, signals):
    return np.abs(model.predict(signals) - other.predict(signals)).mean()


class TestFitting:
    @each_kind
    def test_fits_recover_the_law(self, inputs):
        truth = law(inputs)
        signals = random_signals(200_000)
        fitted = SignalModel.fit(records_of(signals, truth.predict(signals)), inputs)
        assert error(fitted, truth, random_signals(1000, seed=1)) < 0.01
        # The data determine the weights, not the regularisation.
        assert fitted.weights == pytest.approx(truth.weights, abs=0.15)

    @each_kind
    def test_labels_may_be_probabilities(self, inputs):
        """With noisy acceptance probabilities, the fit estimates their mean."""
        truth = law(inputs)
        signals = random_signals(8000)
        mean = truth.predict(signals)
        noisy = np.random.default_rng(1).beta(2 * mean, 2 * (1 - mean))
        fitted = SignalModel.fit(records_of(signals, noisy), inputs)
        assert error(fitted, truth, random_signals(1000, seed=1)) < 0.025

    @each_kind
    def test_tokens_that_are_never_reached_are_ignored(self, inputs):
        signals = random_signals(4000)
        first = signals.position == 0
        acceptance = np.where(first, 0.0, 1.0)
        fitted = SignalModel.fit(records_of(signals, acceptance), inputs)
        expected = SignalModel.fit(records_of(signals, acceptance).take(first), inputs)
        assert fitted.weights == pytest.approx(expected.weights, abs=1e-6)

    @each_kind
    def test_few_records_hardly_change_the_weights(self, inputs):
        signals = random_signals(4)
        start = SignalModel(inputs)
        few = SignalModel.fit(records_of(signals, np.zeros(4)), inputs)
        assert 0 < np.abs(few.weights - start.weights).max() < 1
        none = SignalModel.fit(Records.empty(), inputs)
        assert np.array_equal(none.weights, start.weights)

    @each_kind
    @pytest.mark.parametrize("acceptance", [0.0, 1.0])
    def test_constant_acceptance(self, inputs, acceptance):
        signals = random_signals(3000)
        fitted = SignalModel.fit(records_of(signals, np.full(3000, acceptance)), inputs)
        first = signals.position == 0
        assert np.abs(fitted.predict(signals) - acceptance)[first].mean() < 0.05

    @property_test
    @given(st.integers(0, 10**6), st.sampled_from(list(Inputs)), st.integers(1, 200))
    def test_separable_labels_do_not_diverge(self, seed, inputs, size):
        """A threshold on one signal separates the labels, and some signals are extreme."""
        random = np.random.default_rng(seed)
        signals = random_signals(size, seed)
        extreme = {
            name: np.where(random.random(size) < 0.5, np.round(values), values)
            for name, values in vars(signals).items()
        }
        signals = Signals(**{**extreme, "entropy": extreme["entropy"] * 3})
        column = random.choice(["token_prob", "entropy", "history", "overlap", "agreement"])
        labels = (getattr(signals, column) > np.median(getattr(signals, column))) * 1.0
        model = SignalModel.fit(records_of(signals, labels), inputs)
        assert np.isfinite(model.weights).all()
        records = records_of(signals, labels)
        weights = records.reach_probability()

        def penalised_loss(theta):
            p = SignalModel(inputs, theta).predict(signals)
            loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p))
            return (weights * loss).sum() + 1.5 * ((theta - start) ** 2).sum()

        start = SignalModel(inputs).weights
        assert penalised_loss(model.weights) <= penalised_loss(start) + 1e-9


def distributions(generator, rows, vocab, sharpness=2.0):
    logits = sharpness * torch.randn(rows, vocab, generator=generator)
    probabilities = logits.double().softmax(dim=1)
    # Top-k leaves exact zeros.
    cut = probabilities < probabilities.quantile(0.3, dim=1, keepdim=True)
    probabilities[cut] = 0
    return probabilities / probabilities.sum(dim=1, keepdim=True)


@property_test
@given(
    st.integers(0, 10**6),
    st.sampled_from([Inputs.FREE, Inputs.COMBINED]),
    st.integers(0, 6),
    st.lists(st.floats(-2, 2), min_size=15, max_size=15),
)
def test_vocabulary_estimates_equal_predictions_of_single_tokens(seed, inputs, position, weights):
    generator = torch.Generator().manual_seed(seed)
    rows, vocab = 3, 12
    q, c = (distributions(generator, rows, vocab) for _ in range(2))
    model = SignalModel(inputs, np.array(weights[: NUM_WEIGHTS[inputs]]))
    history = torch.rand(rows, generator=generator)
    h, s = entropy(q), overlap(q, c)
    log_odds = model.log_odds_over_vocabulary(
        q.float(),
        h.float(),
        history,
        torch.full((rows,), position),
        c.float(),
    )
    assert log_odds.shape == (rows, vocab)
    a = agreement(q, c)
    for row in range(rows):
        for token in range(vocab):
            if q[row, token] == 0:
                continue  # never drawn
            signals = Signals(
                *(
                    np.array([float(value)])
                    for value in (
                        q[row, token],
                        h[row],
                        history[row],
                        position,
                        s[row],
                        a[row, token],
                    )
                )
            )
            p = 1 / (1 + np.exp(-float(log_odds[row, token])))
            assert np.clip(p, 0.01, 0.995) == pytest.approx(model.predict(signals)[0], abs=2e-4)


def test_vocabulary_estimates_do_not_modify_the_distributions():
    generator = torch.Generator().manual_seed(0)
    q, c = (distributions(generator, 2, 6).float() for _ in range(2))
    before = q.clone(), c.clone()
    SignalModel(Inputs.COMBINED).log_odds_over_vocabulary(
        q, entropy(q), torch.ones(2), torch.zeros(2), c
    )
    assert torch.equal(q, before[0])
    assert torch.equal(c, before[1])


def test_predictable_models_do_not_depend_on_the_token():
    q = torch.full((1, 4), 0.25)
    with pytest.raises(ValueError, match="token"):
        SignalModel(Inputs.PREDICTABLE).log_odds_over_vocabulary(q, q[:, 0], q[:, 0], q[:, 0], q)
    signals = random_signals(50)
    other = random_signals(50, seed=1)
    changed = Signals(
        **{**vars(signals), "token_prob": other.token_prob, "agreement": other.agreement}
    )
    model = law(Inputs.PREDICTABLE)
    assert np.array_equal(model.predict(signals), model.predict(changed))


def follow(model, truth, num_steps, batch=8, seed=0):
    for step in range(num_steps):
        signals = random_signals(batch, seed + step)
        model.observe(signals, truth.predict(signals), np.ones(batch))


@pytest.mark.slow
class TestLearning:
    @each_kind
    def test_updates_follow_a_workload_and_its_change(self, inputs):
        model = SignalModel(inputs)
        signals = random_signals(1000, seed=9)
        first, second = law(inputs), law(inputs)
        second.weights = second.weights * [-1.0, *[1.0] * (NUM_WEIGHTS[inputs] - 1)]
        for truth in (first, second):
            assert error(model, truth, signals) > 0.1
            follow(model, truth, 1500)
            assert error(model, truth, signals) < 0.03

    @each_kind
    def test_fitted_weights_change_more_slowly_than_built_in_ones(self, inputs):
        """Weights from a profile have more strength."""
        truth = law(inputs)
        signals = random_signals(1000, seed=9)
        guess = SignalModel(inputs)
        fitted = SignalModel.from_tensors(inputs, guess.to_tensors())
        follow(guess, truth, 20)
        follow(fitted, truth, 20)
        assert error(guess, truth, signals) < error(fitted, truth, signals)

    def test_tokens_count_by_their_weight(self):
        signals = random_signals(64)
        zero, small, full = (SignalModel(Inputs.FREE) for _ in range(3))
        for model, weight in ((zero, 0.0), (small, 0.1), (full, 1.0)):
            model.observe(signals, np.zeros(64), np.full(64, weight))
        start = SignalModel(Inputs.FREE).predict(signals).mean()
        assert zero.predict(signals).mean() == start
        assert full.predict(signals).mean() < small.predict(signals).mean() < start

    @each_kind
    def test_weights_without_recent_evidence_return_to_the_start(self, inputs):
        start = SignalModel(inputs)
        model = SignalModel(inputs)
        follow(model, law(inputs), 400)
        moved = np.abs(model.weights - start.weights)
        # From now on all tokens have the same signals, and the initial weights predict them well.
        one = Signals(*(np.full(8, value) for value in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
        for _ in range(4000):
            model.observe(one, start.predict(one), np.ones(8))
        left = np.abs(model.weights - start.weights)
        assert moved.max() > 0.4
        assert left.max() < 0.15 * moved.max()

    def test_an_update_without_tokens_changes_nothing(self):
        model = SignalModel(Inputs.COMBINED)
        before = model.weights.copy()
        model.observe(random_signals(0), np.zeros(0), np.zeros(0))
        assert np.array_equal(model.weights, before)

    @settings(property_test, max_examples=20)
    @given(
        st.sampled_from(list(Inputs)),
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 1e-30, 1e-4, 0.5, 1.0]),
                st.sampled_from([0.0, 1.0, 6.0, 1e4]),
                st.sampled_from([0.0, 1.0]),
                st.sampled_from([0.0, 3.0, 100.0]),
                st.sampled_from([0.0, 1.0]),
                st.sampled_from([0.0, 1.0]),
                st.sampled_from([0.0, 1.0]),
                st.sampled_from([0.0, 1.0]),
            ),
            min_size=1,
            max_size=20,
        ),
        st.integers(1, 60),
    )
    def test_extreme_signals_do_not_break_the_model(self, inputs, tokens, repeats):
        *columns, acceptance, weights = np.array(tokens).T
        signals = Signals(*columns)
        model = SignalModel(inputs)
        for _ in range(repeats):
            model.observe(signals, acceptance, weights)
        p = model.predict(signals)
        assert ((p >= 0.01) & (p <= 0.995)).all()
        # The weights did not diverge: ordinary tokens are still learnt.
        follow(model, SignalModel(inputs), 300)
        assert error(model, SignalModel(inputs), random_signals(200)) < 0.1


class TestFiles:
    @each_kind
    def test_round_trip_through_tensors(self, inputs):
        model = law(inputs)
        follow(model, SignalModel(inputs), 5)
        again = SignalModel.from_tensors(inputs, model.to_tensors())
        signals = random_signals(20)
        assert np.array_equal(again.predict(signals), model.predict(signals))
        tensors = model.to_tensors()
        follow(model, SignalModel(inputs), 5)
        assert np.array_equal(tensors["weights"].numpy(), again.weights)

    @each_kind
    def test_a_wrong_number_of_weights_is_refused(self, inputs):
        with pytest.raises(ValueError, match=f"{inputs.value} needs {NUM_WEIGHTS[inputs]} weights"):
            SignalModel(inputs, np.zeros(3))
        with pytest.raises(ValueError, match="weights"):
            SignalModel.from_tensors(inputs, {"weights": torch.zeros(NUM_WEIGHTS[inputs] + 1)})


def test_token_probabilities_are_clipped_at_the_smallest():
    model = law(Inputs.FREE)
    low = [
        Signals(*(np.array([value]) for value in (probability, 1.0, 0.5, 0.0, 0.0, 0.0)))
        for probability in (0.0, SMALLEST_TOKEN_PROB / 10, SMALLEST_TOKEN_PROB)
    ]
    assert len({float(model.predict(signals)[0]) for signals in low}) == 1
