import numpy as np
import pytest
import torch

from draftwise.errors import InvalidParameterError
from draftwise.estimators.combined import Inputs, SignalModel, Signals
from draftwise.estimators.pair import ModelPair


def signals(token_prob):
    token_prob = np.asarray(token_prob)
    zeros = np.zeros(len(token_prob))
    return Signals(token_prob, zeros + 1.0, zeros + 0.6, zeros, zeros, zeros)


def test_sampled_and_greedy_requests_have_their_own_model():
    pair = ModelPair.of(Inputs.FREE, {})
    pair[True].weights = pair[True].weights + 1.0
    some = signals([0.1, 0.5, 0.9])
    sampled, greedy = pair[False].predict(some), pair[True].predict(some)
    assert np.array_equal(pair.predict(some, np.zeros(3, bool)), sampled)
    assert np.array_equal(pair.predict(some, np.ones(3, bool)), greedy)
    mixed = pair.predict(some, np.array([False, True, False]))
    assert mixed.tolist() == [sampled[0], greedy[1], sampled[2]]


def test_each_model_learns_from_its_own_requests():
    pair, alone = ModelPair.of(Inputs.FREE, {}), SignalModel(Inputs.FREE)
    some, reach_probability = signals([0.1, 0.5, 0.9]), np.array([1.0, 0.4, 1.0])
    acceptance, greedy = np.array([0.2, 0.9, 0.4]), np.array([True, False, True])
    start = pair[False].weights.copy()
    pair.observe(some, greedy, acceptance, reach_probability)
    alone.observe(signals([0.1, 0.9]), acceptance[greedy], reach_probability[greedy])
    assert np.array_equal(pair[True].weights, alone.weights)
    assert not np.array_equal(pair[False].weights, start)
    before = pair[False].weights.copy()
    pair.observe(some, np.ones(3, bool), acceptance, reach_probability)
    assert np.array_equal(pair[False].weights, before)


def test_both_models_start_from_the_profile():
    model = SignalModel(Inputs.FREE, np.arange(8.0))
    pair = ModelPair.of(Inputs.FREE, {"free": model.to_tensors()})
    assert all(np.array_equal(each.weights, model.weights) for each in pair.values())
    pair[False].weights += 1
    assert np.array_equal(pair[True].weights, model.weights)


@pytest.mark.parametrize("tensors", [{}, {"weights": torch.zeros(3)}])
def test_a_profile_that_does_not_fit_is_refused(tensors):
    with pytest.raises(InvalidParameterError) as caught:
        ModelPair.of(Inputs.FREE, {"free": tensors})
    assert caught.value.field == "profile"
