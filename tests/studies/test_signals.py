"""The study of signals: estimates, information and goodput against closed forms and enumeration."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from draftwise.core.stage_cost import StageCost
from draftwise.errors import InvalidParameterError
from draftwise.studies.sampling import Sampling
from draftwise.studies.signals import claims, kinds, price
from draftwise.studies.signals.estimate import (
    LOWEST,
    base_rates,
    code_length,
    fitted,
    folds,
    mean_over_prompts,
    predictions,
)
from draftwise.studies.signals.measuring import Measurement
from draftwise.studies.signals.pass_times import DraftTimes, PassTimes
from draftwise.studies.signals.recording import TARGET, companion_names, whole_drafts
from draftwise.studies.signals.study import Signals
from draftwise.studies.study import HOLDS, HOLDS_NOT

from ..estimators.synthetic import records_of

LENGTH = 4
TIMES = PassTimes(
    target=StageCost((1.0, 8.0, 64.0), (1.0, 1.2, 6.0)),
    draft=DraftTimes(StageCost((1.0, 8.0), (0.13, 0.17)), StageCost((1.0, 8.0), (0.11, 0.15))),
    draft_without_signals=DraftTimes(
        StageCost((1.0, 8.0), (0.11, 0.15)), StageCost((1.0, 8.0), (0.1, 0.14))
    ),
    companions={"c": StageCost((1.0, 32.0), (0.05, 0.2))},
    keep=StageCost((1.0, 32.0), (0.001, 0.01)),
)


def recording(num_drafts=400, seed=0, companion=None, num_prompts=20):
    """Drafts whose acceptance follows the entropy, and a companion that knows it in part."""
    random = np.random.default_rng(seed)
    size = num_drafts * LENGTH
    acceptance = random.beta(2, 1, size)
    blurred = np.clip(acceptance + random.normal(0, 0.1, size), 0.001, 0.999)
    records = records_of(np.zeros(size), np.zeros(size), acceptance, seed, LENGTH)
    records = replace(records, entropy=(3 * (1 - acceptance) ** 2).astype(np.float32))
    agreement = blurred if companion is None else companion(acceptance)
    scored = replace(
        records,
        overlap=blurred.astype(np.float32),
        agreement=np.asarray(agreement, dtype=np.float32),
    )
    prompts = np.repeat(np.arange(num_drafts) * num_prompts // num_drafts, LENGTH)
    return whole_drafts(records, {"c": scored, TARGET: scored}, prompts, LENGTH)


def weights_of(recorded):
    return recorded.records.reach_probability().astype(float)


def bits_of(recorded, columns, companion=None):
    records = recorded.records if companion is None else recorded.companions[companion]
    prompts = np.repeat(recorded.prompts, LENGTH)
    labels, weights = records.acceptance.astype(float), weights_of(recorded)
    base = code_length(base_rates(labels, prompts, weights), labels)
    told = code_length(predictions(records, prompts, weights, columns), labels)
    return mean_over_prompts(base - told, weights, prompts)


# -- estimates -------------------------------------------------------------------------------


def test_folds_keep_prompts_together():
    prompts = np.array([3, 3, 7, 7, 7, 9, 4, 4, 1, 1, 2])
    parts = list(folds(prompts, 3))
    assert len(parts) == 3
    assert np.array_equal(sum(held_out.astype(int) for _, held_out in parts), np.ones(11))
    for known, held_out in parts:
        assert not set(prompts[known]) & set(prompts[held_out])
        assert np.array_equal(known, ~held_out)
    assert len(list(folds(np.array([5, 6]), 5))) == 2


def test_a_fit_recovers_the_weights_of_a_law():
    random = np.random.default_rng(0)
    features = np.column_stack([np.ones(20_000), random.normal(size=(20_000, 2))])
    law = np.array([0.4, -1.2, 0.7])
    labels = 1 / (1 + np.exp(-features @ law))
    assert fitted(features, labels, np.ones(20_000), 1e-3) == pytest.approx(law, abs=1e-3)


def test_the_mean_over_prompts_is_a_ratio_of_sums():
    values, weights = np.array([1.0, 3.0, 2.0, 0.0]), np.array([1.0, 1.0, 2.0, 4.0])
    found = mean_over_prompts(values, weights, np.array([0, 0, 1, 2]))
    assert found.mean == pytest.approx(1.0)
    # Sums (4, 4, 0) less the mean times (2, 2, 4): residuals 2, 2 and -4.
    assert found.error == pytest.approx(np.sqrt(3 / 2 * (4 + 4 + 16)) / 8)


def test_information_of_the_acceptance_itself_is_what_an_oracle_has():
    recorded = recording(companion=lambda acceptance: acceptance)
    a, w = recorded.records.acceptance.astype(float), weights_of(recorded)
    a = np.clip(a, LOWEST, 1 - LOWEST)
    rate = np.average(a, weights=w)
    exact = code_length(np.full(1, rate), np.full(1, rate))[0]
    exact -= np.average(code_length(a, a), weights=w)
    assert bits_of(recorded, ("acceptance",)).mean == pytest.approx(exact, abs=0.01)
    # A companion whose A is the acceptance probability is as good, without being told.
    assert bits_of(recorded, ("agreement",), "c").mean == pytest.approx(exact, abs=0.02)


@pytest.mark.slow
def test_signals_that_know_nothing_have_no_information():
    recorded = recording()
    found = bits_of(recorded, ("token_prob", "history", "top_prob"))
    assert found.mean < 2 * found.error
    assert found.mean > -0.02


@pytest.mark.slow
def test_information_increases_with_what_the_signals_know():
    recorded = recording()
    entropy = bits_of(recorded, ("entropy",)).mean
    blurred = bits_of(recorded, ("overlap",), "c").mean
    assert entropy > blurred > 0.05
    assert bits_of(recorded, ("entropy", "overlap"), "c").mean == pytest.approx(entropy, abs=0.02)


# -- goodput ---------------------------------------------------------------------------------


def costs(kind=kinds.NONE, companion=None, batch=2, greedy=False):
    return price.Costs.of(TIMES, kind, companion, batch, LENGTH, greedy)


def random_steps(batch=2, seed=0, num_drafts=8):
    random = np.random.default_rng(seed)
    acceptance = random.random((num_drafts, LENGTH))
    survival = random.random((num_drafts, LENGTH)).cumprod(axis=1)
    going = random.random((num_drafts, LENGTH)).cumprod(axis=1)
    return price.Steps(np.arange(num_drafts), batch, acceptance, survival, going), (
        acceptance,
        survival,
        going,
    )


@pytest.mark.parametrize("rule", [(4, 0.3, 0.2), (2, 0.0, 0.5), (3, 0.6, 0.0), (0, 0.0, 0.0)])
def test_the_total_of_single_requests_is_that_of_a_loop(rule):
    """One request after the other, token by token, with the latency model."""
    steps, (acceptance, survival, going) = random_steps(batch=1)
    rule = price.Rule(*rule)
    found = steps.total(rule, costs(kinds.TOKEN, "c", batch=1))
    tokens = seconds = 0.0
    for a, s, g in zip(acceptance, survival, going, strict=True):
        drafted = 0
        while drafted < rule.length:
            drafted += 1
            if g[drafted - 1] < rule.stop:
                break
        verified = 0
        while verified < drafted and s[verified] >= rule.keep:
            verified += 1
        tokens += 1 + sum(np.prod(a[: i + 1]) for i in range(verified))
        seconds += 0.13 + 0.11 * (drafted - 1) if drafted else 0.0
        seconds += TIMES.target(1 + verified)
        seconds += TIMES.companions["c"](drafted) + TIMES.keep(drafted)
    assert found.tokens == pytest.approx(tokens)
    assert found.seconds == pytest.approx(seconds)
    assert found.steps == len(acceptance)


def test_a_batch_shares_its_passes():
    ones = np.ones((2, LENGTH))
    going = np.array([[1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1]])
    steps = price.Steps(np.arange(2), 2, ones, ones, going)
    steps_of_one = price.Steps(np.arange(1, 2), 2, ones, ones, going)
    # Batches are drawn at random; with one draft only, both requests are the same.
    alone = steps_of_one.total(price.Rule(4, 0.5, 0.0), costs())
    one_step = TIMES.draft_without_signals.first(2) + TIMES.target(4)
    assert alone.seconds / alone.steps == pytest.approx(one_step)
    assert alone.tokens / alone.steps == pytest.approx(4.0)
    both = steps.total(price.Rule(4, 0.5, 0.0), costs())
    assert both.drafted / both.steps == pytest.approx(5.0, abs=3.0)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_rule_is_that_of_an_enumeration(seed):
    steps, _ = random_steps(seed=seed, num_drafts=20)
    own = costs(kinds.ENTROPY)
    found = steps.best(own, price.THRESHOLDS, price.THRESHOLDS)
    every = itertools.product((0, 1, 2, 3, 4), price.THRESHOLDS, price.THRESHOLDS)
    best = max(steps.total(price.Rule(*rule), own).goodput for rule in every)
    assert steps.total(found, own).goodput == pytest.approx(best)


def test_what_a_signal_is_charged_for():
    assert costs(kinds.NONE).first[1] == TIMES.draft_without_signals.first(1)
    assert costs(kinds.HISTORY).keep.max() == 0
    assert costs(kinds.ENTROPY).later[2] == TIMES.draft.later(2)
    # A selection by the drawn token filters whole distributions, unless tokens are not drawn.
    assert costs(kinds.ENTROPY).keep.max() == 0
    assert costs(kinds.TOKEN).keep.max() > 0
    assert costs(kinds.TOKEN, greedy=True).keep.max() == 0
    assert costs(kinds.SCORES, "c").companion[4] == TIMES.companions["c"](4)
    assert costs(kinds.SCORES).companion.max() == 0
    assert costs(kinds.ORACLE).keep.max() == 0


def test_decisions_that_may_look_at_the_drawn_token():
    """A draft cannot be stopped by a companion, which reads complete drafts."""
    for has_confidence in (False, True):
        every = [
            *kinds.without_companion(has_confidence),
            *kinds.with_companion(has_confidence),
        ]
        for kind in every:
            assert not {"overlap", "agreement"} & set(kind.while_drafting), kind.name
            expected = {"token_prob", "agreement", "acceptance"} & set(kind.columns)
            assert kind.sees_token == bool(expected), kind.name
        assert ("confidence head" in [kind.name for kind in every]) == has_confidence


# -- the whole measurement --------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    measurement = Measurement(recording(), Sampling(1.0), TIMES)
    return measurement.knowledge(), {str(size): measurement.goodput(size) for size in (1, 8)}


@pytest.mark.slow
def test_what_a_measurement_knows(measured):
    knowledge, _ = measured
    assert list(knowledge["signals"]) == [
        *("none (position)", "history", "largest q", "entropy", "q(x)"),
        *("draft's own, without x", "draft's own", "oracle"),
    ]
    assert knowledge["num_prompts"] == 20
    told = knowledge["companions"]
    assert list(told) == ["c"]
    bits = {name: own["bits"]["mean"] for name, own in knowledge["signals"].items()}
    assert bits["oracle"] >= bits["draft's own"] > told["c"]["signals"]["S"]["bits"]["mean"]
    assert told["c"]["overlap_correlation"] == pytest.approx(1.0)
    # The entropy tells everything, so the companion adds nothing.
    assert abs(told["c"]["beyond_own"]["mean"]) < 0.02
    assert knowledge["signals"]["entropy"]["calibration_error"] < 0.05


@pytest.mark.slow
def test_goodput_of_a_measurement(measured):
    _, batches = measured
    for found in batches.values():
        gains = {name: own["goodput"]["mean"] for name, own in found["signals"].items()}
        assert gains["oracle"] > gains["none (position)"] * 1.001
        assert found["signals"]["none (position)"]["over_static"]["mean"] == pytest.approx(1.0)
        own = found["companions"]["c"]
        # A pass that is charged costs what it takes.
        charged, free = (own[part]["goodput"]["mean"] for part in ("best", "free"))
        assert charged <= free + 1e-9
        # The draft's signals know more, so no companion is worth anything.
        assert own["affordable"] < 0.05
        assert own["cost"] > 0.01


@pytest.mark.slow
def test_the_companion_that_knows_everything_may_take_long():
    recorded = recording(companion=lambda acceptance: acceptance)
    blind = replace(recorded.records, entropy=np.zeros_like(recorded.records.entropy))
    scored = replace(recorded.companions["c"], entropy=blind.entropy)
    recorded = replace(recorded, records=blind, companions={"c": scored})
    cheap = StageCost((1.0, 8.0), (0.01, 0.02))
    draft = DraftTimes(cheap, cheap)
    times = replace(TIMES, draft=draft, draft_without_signals=draft)
    found = Measurement(recorded, Sampling(0.0), times).goodput(8)["companions"]["c"]
    assert found["affordable"] > 0.05
    assert found["free"]["over_own"]["mean"] > 1.03


def test_affordable_time_is_what_makes_both_equal():
    def total(tokens, seconds):
        return price.Total(tokens, seconds, 1, 0.0, 2.0, 0.0, 0.0)

    share = price.affordable_companion([total(12, 4)], [total(10, 4)])
    assert 12 / (4 + share * 2.0) == pytest.approx(10 / 4)


# -- inputs and outputs ------------------------------------------------------------------------


def test_drafts_that_ended_early_are_left_out():
    one = records_of(np.zeros(7), np.zeros(7), np.full(7, 0.5), 0, LENGTH)
    one = replace(one, position=np.array([0, 1, 2, 3, 0, 1, 2]))
    both = type(one).join([one, one])
    prompts = np.repeat([0, 1], 7)
    found = whole_drafts(both, {}, prompts, LENGTH)
    assert found.num_drafts == 2
    assert found.prompts.tolist() == [0, 1]
    with pytest.raises(InvalidParameterError, match="too few for whole drafts") as caught:
        whole_drafts(one, {}, np.zeros(7, dtype=np.int64), LENGTH)
    assert caught.value.field == "max_tokens"


def test_pass_times_are_written_and_read(tmp_path):
    path = tmp_path / "times.json"
    TIMES.save(path)
    assert PassTimes.load(path, ["c"]) == TIMES
    for names, content in ((["d"], None), (["c"], "{}"), (["c"], "no JSON")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(InvalidParameterError, match="name a new file") as caught:
            PassTimes.load(path, names)
        assert caught.value.field == "pass_times"
    with pytest.raises(InvalidParameterError, match="cannot write"):
        TIMES.save(tmp_path / "nowhere" / "times.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Sampling(0.0)),
        ("0.7:0.8:20", Sampling(0.7, 0.8, 20)),
        ("1:0.9", Sampling(1.0, 0.9)),
    ],
)
def test_sampling_settings(text, expected):
    assert Sampling.parse(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1:2:3:4", "1:0.9:b", "-1", "1:1.5"])
def test_sampling_settings_that_are_refused(text):
    with pytest.raises(InvalidParameterError):
        Sampling.parse(text)


def test_names_of_sampling_settings():
    paper = Sampling(0.7, 0.8, 20)
    assert paper.name == "T=0.7, top-p 0.8, top-k 20"
    assert paper.slug == "t0.7-p0.8-k20"
    assert [Sampling(0.0).is_greedy, paper.is_greedy] == [True, False]
    assert [Sampling(1.0).is_plain, paper.is_plain, Sampling(1.0, 0.9).is_plain] == [
        *(True, False, False)
    ]


def test_companions_are_those_of_the_settings_and_further_models():
    settings = SimpleNamespace(
        target="zoo:target@200m",
        draft="zoo:draft",
        companion="zoo:companion@4m",
        models=("zoo:draft", "zoo:companion", "target:exit=3"),
    )
    bench = SimpleNamespace(settings=settings)
    assert companion_names(bench) == ["zoo:companion@4m", "target:exit=3"]
    settings.companion, settings.models = None, ("zoo:draft",)
    assert companion_names(bench) == []


@pytest.mark.slow
def test_claims_follow_from_the_figures(measured):
    knowledge, batches = measured
    data = {
        "companions": ["c"],
        "samplings": {"T=1": {"knowledge": knowledge, "batches": batches}},
    }
    verdicts = {each.source: each.verdict for each in claims.findings(data)}
    assert verdicts[
        "S and A have information about acceptance in every combination of models."
    ] == (HOLDS)
    ours = "The companion earns its pass: it is faster than what needs no companion (ours)."
    assert verdicts[ours] == HOLDS_NOT
    assert verdicts["Draft and companion agree where draft and target do."] == HOLDS
    text = Signals().describe(data).text
    assert "adds" in text
    assert "is worth at most this share of the target's pass" in text
