import numpy as np
import pytest
import torch

from draftwise.estimators.classifier import AcceptanceHead, features

from ..stand_ins import random_records

pytestmark = pytest.mark.slow


def columns(records):
    names = "entropy", "token_prob", "top_prob", "position", "history"
    return features(*(torch.from_numpy(getattr(records, name)) for name in names))


@pytest.fixture(scope="module")
def head():
    return AcceptanceHead.fit(random_records())


def log_loss(p, y):
    return -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()


def test_predicts_the_acceptance_of_held_out_tokens(head):
    held_out = random_records(seed=1)
    p = head.predict(columns(held_out)).numpy()
    y = held_out.acceptance
    assert log_loss(p, y) < 0.9 * log_loss(np.full_like(y, y.mean()), y)
    unexplained = ((p - y) ** 2).mean() / y.var()
    assert unexplained < 0.5
    # The head is calibrated: tokens with similar predictions have that mean acceptance.
    for part in np.array_split(np.argsort(p), 5):
        assert p[part].mean() == pytest.approx(y[part].mean(), abs=0.05)


def test_rejection_weight_lowers_predictions():
    records = random_records()
    x = columns(records)
    plain = AcceptanceHead.fit(records).predict(x)
    cautious = AcceptanceHead.fit(records, rejection_weight=6.0).predict(x)
    assert bool((cautious.mean() < plain.mean() - 0.1).all())
    # The optimum of the weighted loss is y/(y + 6·(1 − y)).
    expected = plain / (plain + 6 * (1 - plain))
    assert float((cautious - expected).abs().mean()) < 0.05


def test_tokens_are_weighted_by_reach_probability():
    records = random_records(num_chains=400, length=2)
    first = records.position == 0
    acceptance = np.where(first, 0.0, 1.0).astype(np.float32)
    acceptance[:8] = 0.5
    changed = type(records)(**{**vars(records), "acceptance": acceptance})
    p = AcceptanceHead.fit(changed).predict(columns(changed)).numpy()
    assert p[first].mean() < 0.1


def test_the_same_records_give_the_same_head(head):
    again = AcceptanceHead.fit(random_records())
    for name, tensor in head.to_tensors().items():
        assert torch.equal(tensor, again.to_tensors()[name])
    other = AcceptanceHead.fit(random_records(), seed=1)
    assert not torch.equal(head.weights[0], other.weights[0])


def test_round_trip_through_a_file(head):
    tensors = head.to_tensors()
    again = AcceptanceHead.from_tensors(tensors)
    x = torch.rand(7, 5)
    assert torch.equal(head.predict(x), again.predict(x))
    assert head.to(torch.device("cpu")) is head
    assert not any(tensor.requires_grad for tensor in tensors.values())
    del tensors["bias1"]
    with pytest.raises(KeyError):
        AcceptanceHead.from_tensors(tensors)


def test_features_are_finite_at_the_edges():
    zero = torch.zeros(2)
    assert bool(features(zero, zero, zero, zero, zero).isfinite().all())


def test_constant_features_do_not_break_the_head():
    records = random_records(length=1)
    head = AcceptanceHead.fit(records)
    far = columns(records)
    far[:, 3] = 9.0  # a position that does not occur in the training data
    assert bool(head.predict(far).isfinite().all())


def test_training_without_records_is_refused():
    with pytest.raises(ValueError, match="no records"):
        AcceptanceHead.fit(random_records().take(np.zeros(0, dtype=np.int64)))
