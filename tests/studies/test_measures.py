"""Computations of studies, on models with known closed-form results."""

import math

import numpy as np
import pytest
import torch

from draftwise.core.stage_cost import StageCost
from draftwise.errors import InvalidParameterError
from draftwise.outputs import SpeculationStats
from draftwise.studies import (
    acceptance_surface,
    bias,
    bounds,
    calibration,
    fairness,
    lenience,
    oracle_length,
    published_rules,
    rejection,
    speedup_by_context,
    verification_cost,
)
from draftwise.studies.positions import Passage, Positions, positions_of

from ..estimators.synthetic import smooth_law, smooth_records
from ..stand_ins import FixedLatency


def positions(accepted, text=None, **columns):
    """Positions of which only some columns matter."""
    size = len(accepted)
    zeros = np.zeros(size)
    text = np.zeros(size, dtype=np.int64) if text is None else np.asarray(text)
    index = np.array([int((text[:i] == text[i]).sum()) for i in range(size)])
    values = {
        "text": text,
        "index": index,
        "entropy": zeros,
        "target_entropy": zeros,
        "divergence": zeros,
        "acceptance": zeros,
        "p_kept": zeros,
        "accepted": np.asarray(accepted, dtype=bool),
        "draft_sorted": np.ones((size, 2)),
        "target_sorted": np.ones((size, 2)),
    }
    return Positions(**(values | columns))


def passage(p, q, tokens=None, c=None, text=None):
    p, q = torch.as_tensor(p).float(), torch.as_tensor(q).float()
    size = len(p)
    numbers = np.arange(size)
    return Passage(
        np.zeros(size, dtype=np.int64) if text is None else np.asarray(text),
        numbers,
        torch.zeros(size, dtype=torch.long) if tokens is None else torch.as_tensor(tokens),
        p,
        q,
        None if c is None else torch.as_tensor(c).float(),
    )


def distributions(rows, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).softmax(dim=1)


# -- positions -------------------------------------------------------------------------------


def test_mean_of_p_kept_is_the_acceptance():
    """The mean of min(1, q(y)/p(y)) over y ~ p is β."""
    p, q = distributions(1, 12), distributions(1, 12, seed=1)
    found = positions_of([passage(p.expand(12, 12), q.expand(12, 12), range(12))])
    beta = torch.minimum(p, q).sum().item()
    assert found.acceptance == pytest.approx(beta, abs=1e-6)
    assert (p[0].numpy() * found.p_kept).sum() == pytest.approx(beta, abs=1e-6)
    assert found.cross_entropy[0] == pytest.approx(-(q * p.log()).sum().item(), abs=1e-5)


def test_identical_models_accept_everything():
    p = distributions(5, 9)
    found = positions_of([passage(p, p)])
    assert found.accepted.all()
    assert found.divergence == pytest.approx(0.0, abs=1e-6)
    assert found.entropy == pytest.approx(found.target_entropy)


# -- SVIP ------------------------------------------------------------------------------------


def test_oracle_lengths_of_an_example():
    accepted = [1, 1, 0, 0, 1, 1, 1, 0, 1]
    text = [0, 0, 0, 0, 0, 1, 1, 1, 1]
    starts, lengths = oracle_length.oracle_lengths(np.array(text), np.array(accepted, dtype=bool))
    # The draft that the end of the first text cuts off is none.
    assert starts.tolist() == [0, 3, 5]
    assert lengths.tolist() == [2, 0, 2]


def test_independent_acceptance_has_geometric_oracle_lengths():
    alpha = 0.6
    accepted = np.random.default_rng(0).random(40_000) < alpha
    text = np.zeros(len(accepted), dtype=np.int64)
    index = np.arange(len(accepted))
    found = oracle_length.figures_of(_many(accepted, text, index))
    assert found["mean"] == pytest.approx(alpha / (1 - alpha), rel=0.03)
    assert found["variance"] == pytest.approx(alpha / (1 - alpha) ** 2, rel=0.08)
    assert found["variance"] == pytest.approx(found["variance_by_chance"], rel=0.08)


def _many(accepted, text, index):
    zeros = np.zeros(len(accepted))
    ones = np.ones((len(accepted), 1))
    return Positions(text, index, *(zeros,) * 5, accepted, ones, ones)


def test_around_a_rejection():
    accepted, text = [1, 0, 1, 1, 0], [0, 0, 0, 1, 1]
    found = positions(accepted, text)
    values = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    assert rejection.around(found, values, 0) == pytest.approx(35.0)
    assert rejection.around(found, values, -1) == pytest.approx(25.0)
    # Behind the second one its text ends.
    assert rejection.around(found, values, 1) == pytest.approx(30.0)
    assert math.isnan(rejection.around(found, values, 3))


def test_the_chance_of_a_higher_value():
    chosen = np.array([True, True, False, False])
    assert rejection.chance_of_higher(np.array([3.0, 4.0, 1.0, 2.0]), chosen) == 1.0
    assert rejection.chance_of_higher(np.array([1.0, 1.0, 1.0, 1.0]), chosen) == 0.5
    assert rejection.chance_of_higher(np.array([1.0, 4.0, 2.0, 3.0]), chosen) == 0.5


def test_bounds_lie_below_the_acceptance():
    p, q = distributions(400, 30), distributions(400, 30, seed=1)
    found = bounds.figures_of(positions_of([passage(p, q)]))
    for bound in found["bounds"].values():
        assert bound["holds"] == 1.0
        assert bound["mean"] < found["acceptance"]
    # c = 0 promises that everything is accepted; the probability that it holds rises with c.
    assert found["holds"][0] == 0.0
    assert np.all(np.diff(found["holds"]) >= 0)


def test_bounds_of_identical_models_are_the_acceptance():
    p = distributions(50, 30)
    found = bounds.figures_of(positions_of([passage(p, p)]))
    assert found["acceptance"] == pytest.approx(1.0, abs=1e-6)
    assert found["bounds"]["Pinsker"]["mean"] == pytest.approx(1.0, abs=1e-2)


def test_fits_recover_the_parameters_of_the_ratio():
    random = np.random.default_rng(0)
    ratio = 1.0 + random.gamma(2.0, 0.3, 20_000)
    gamma = bounds.ratio_fits(ratio)["gamma"]
    assert (gamma["shape"], gamma["scale"]) == pytest.approx((2.0, 0.3), rel=0.05)
    assert gamma["distance"] < 0.02 < bounds.ratio_fits(ratio)["gaussian"]["distance"]
    normal = bounds.ratio_fits(5.0 + 0.2 * random.standard_normal(20_000))["gaussian"]
    assert (normal["mean"], normal["standard_deviation"]) == pytest.approx((5.0, 0.2), rel=0.05)
    assert normal["distance"] < 0.02


def latency(target=1.0, draft=0.1):
    """Every pass takes the same time."""
    return FixedLatency(
        StageCost((1, 4096), (target, target)), StageCost((1, 4096), (draft, draft))
    )


@pytest.mark.parametrize("study", [oracle_length, rejection])
@pytest.mark.parametrize("accepted", [True, False])
def test_texts_without_both_kinds_of_tokens_are_refused(study, accepted):
    with pytest.raises(InvalidParameterError, match="too few for accepted and rejected") as caught:
        study.figures_of(positions([accepted] * 6))
    assert caught.value.field == "max_tokens"


# -- SV --------------------------------------------------------------------------------------


def test_a_surface_of_few_tokens_is_refused():
    with pytest.raises(InvalidParameterError, match="too few for 8 tokens in a bin"):
        acceptance_surface.surface(smooth_records(4), num_bins=5)


def test_prompts_must_fit_beside_the_answer():
    assert speedup_by_context.longest_prompt(70, 69) == 1
    with pytest.raises(InvalidParameterError, match="must be above 70") as caught:
        speedup_by_context.longest_prompt(70, 70)
    assert caught.value.field == "max_model_len"


def test_the_surface_equals_the_law():
    records = smooth_records(60_000)
    found = acceptance_surface.surface(records, num_bins=5)
    assert np.sum(found["counts"]) == found["num_tokens"] == 60_000
    for row in range(1, 5):
        for column in range(1, 4):
            if found["counts"][row][column] > 400:
                law = smooth_law((row + 0.5) / 5, (column + 0.5) / 5)
                assert found["means"][row][column] == pytest.approx(law, abs=0.04)
    assert acceptance_surface.share_rising(found["by_agreement"]) == 1.0


def test_operations_are_two_for_each_parameter_and_token():
    totals = {"steps": 10, "drafted": 50, "verified": 40, "scored": 30, "accepted": 20}
    spent = verification_cost.operations(totals, {"target": 100, "draft": 10, "companion": 20})
    assert spent == {"target": 2 * 100 * 50, "draft": 2 * 10 * 50, "companion": 2 * 20 * 30}


def test_shares_of_requests():
    def stats(verified):
        return SpeculationStats(num_steps=10, num_tokens=15, num_verified=verified)

    equal = fairness.figures_of([stats(20)] * 8)
    assert equal["gini"] == pytest.approx(0.0)
    assert equal["lowest"] == [2.0] * 5
    unfair = fairness.figures_of([stats(0)] * 7 + [stats(80)])
    assert unfair["gini"] == pytest.approx(7 / 8)
    assert unfair["fewest_tokens_per_step"] == 1.5


# -- lenience and bias -----------------------------------------------------------------------


def test_lenience_of_one_is_lossless():
    p, q = distributions(40, 20), distributions(40, 20, seed=1)
    output, acceptance = lenience.lenient_output(p, q, 1.0)
    assert lenience.total_variation(output, p).max() < 1e-12
    assert acceptance == pytest.approx(1 - lenience.total_variation(p, q))


def test_lenience_of_an_example():
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    output, acceptance = lenience.lenient_output(p, q, 0.5)
    # Accepted are (½, 0.2); the rest is corrected to the first token.
    assert acceptance.item() == pytest.approx(0.7)
    assert output[0].tolist() == pytest.approx([0.8, 0.2])


def test_less_lenience_is_closer_to_the_target():
    p, q = distributions(40, 20), distributions(40, 20, seed=1)
    found = lenience.divergences([passage(p, q)])
    distances = [row["total_variation"] for row in found.values()]
    assert distances == sorted(distances)
    assert distances[0] < 1e-6 < distances[1]
    assert np.all(np.diff([row["acceptance"] for row in found.values()]) > 0)


def test_the_published_rule_is_biased_as_the_proof_says():
    """q = (½, ½), p = c = (0.9, 0.1): dropping b for A(b) < ½ makes a come out with 0.95."""
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    keep = torch.tensor([[1.0, 0.0]])
    assert bias.published_output(p, q, keep)[0].tolist() == pytest.approx([0.95, 0.05])
    assert bias.filtered_output(p, q, keep)[0].tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("seed", range(3))
def test_filtered_proposals_and_predictable_cuts_are_lossless(seed):
    p, q = distributions(30, 25, seed), distributions(30, 25, seed + 10)
    keep = distributions(30, 25, seed + 20) > 0.02
    filtered = bias.filtered_output(p, q, keep.double())
    assert lenience.total_variation(filtered, p).max() < 1e-12
    assert lenience.total_variation(bias.published_output(p, q, keep.double()), p).mean() > 0.01
    # A cut that does not look at the token keeps all of a position or nothing.
    cut = (torch.arange(30) % 2).double().unsqueeze(1).expand(30, 25)
    assert lenience.total_variation(bias.published_output(p, q, cut), p).max() < 1e-12


def test_a_rule_that_keeps_everything_is_unbiased():
    p, q = distributions(12, 10), distributions(12, 10, seed=1)
    keeps = {"all": lambda part: torch.ones_like(part.q, dtype=torch.float64)}
    found = bias.figures_of([passage(p, q)], keeps, 100, 0)
    assert found["all"]["worst"] < 1e-6
    assert found["all"]["dropped"] == pytest.approx(0.0, abs=1e-6)
    assert found["lenience 0.5"]["total_variation"] > 0.01


def test_probabilities_of_the_published_rules():
    drafts = published_rules.RecordedDrafts(smooth_records(2000, chain_length=4), 4)
    random = np.random.default_rng(0)
    q = torch.tensor([0.0, 0.999], dtype=torch.float64)
    kept = published_rules.keep_of_tetris(q, drafts, 8, random)
    assert kept.tolist() == [0.0, 1.0]
    estimates = np.array([0.05, 0.5, 0.99])
    free = published_rules.keep_of_sv(estimates, drafts, 4, latency(), random)
    assert free.tolist() == [1.0, 1.0, 1.0]
    # Where a token costs as much as a whole pass nothing is worth it but what is almost certain.
    dear = FixedLatency(StageCost((1, 4096), (1.0, 4096.0)), StageCost((1, 2), (0.1, 0.1)))
    costly = published_rules.keep_of_sv(estimates, drafts, 4, dear, random)
    assert costly[0] == 0.0
    assert np.all(np.diff(costly) >= 0)


# -- beyond the sources ----------------------------------------------------------------------


def test_correct_predictions_have_no_calibration_error():
    records = smooth_records(3000)
    right = calibration.evaluate(records.acceptance.astype(float), records)
    assert right["error"] == pytest.approx(0.0, abs=1e-6)
    assert right["correlation"] == pytest.approx(1.0)
    for point in right["curve"]:
        assert point["predicted"] == pytest.approx(point["observed"], abs=1e-6)
    low = records.acceptance.astype(float) * 0.0
    assert calibration.evaluate(low, records)["error"] == pytest.approx(
        np.average(records.acceptance, weights=records.reach_probability()), abs=1e-3
    )


def test_online_estimators_predict_before_they_observe():
    """Different outcomes at the end do not change earlier predictions."""
    records = smooth_records(1000)
    changed = records.acceptance.copy()
    changed[-300:] = 0.0
    other = type(records)(**(vars(records) | {"acceptance": changed}))
    first, second = calibration.learning(records), calibration.learning(other)
    for name, predicted in first.items():
        assert len(predicted) == len(records)
        assert np.array_equal(predicted[:700], second[name][:700])
        assert not np.array_equal(predicted[-100:], second[name][-100:])


@pytest.mark.slow
def test_online_updates_compensate_for_a_change():
    """After the change all tokens are rejected, so the fit is wrong."""
    before = smooth_records(4000)
    after = smooth_records(8000, seed=1)
    after = type(after)(**(vars(after) | {"acceptance": after.acceptance * 0.1}))
    for errors in calibration.drift_of(before, after).values():
        assert errors["learning"] < 0.5 * errors["frozen"]
