"""Overlapping the halves of a batch does not change any output."""

import threading

import pytest
import torch

from draftwise import LLM, RequestSpeculation, SamplingParams, SpeculationConfig
from draftwise.core.latency import LatencyModel, StageCost
from draftwise.engine.assembly import EngineOptions
from draftwise.engine.parallel import overlap, pinned_threads
from draftwise.engine.parallel.overlap import (
    Interference,
    OverlapDecision,
    OverlapOptions,
    OverlappedEngine,
)
from draftwise.engine.parallel.pinned_threads import PinnedThread, shares
from draftwise.engine.verification import TargetVerifier
from draftwise.errors import InvalidParameterError
from draftwise.outputs import FinishReason
from draftwise.profiling.latency import measure_profile

from ..stand_ins import fixed_latency
from ..tiny_models import Recipe
from .assembly import assert_same_with_cancellations, token_ids, varied_work

pytestmark = pytest.mark.skipif(shares() is None, reason="the machine has a single core")
RECIPE = Recipe(vocab=16, seed=6)


def build(models, overlaps=True, **options):
    speculation = SpeculationConfig(
        models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed"
    )
    return LLM(models.folder(RECIPE), speculation, dtype="float32", overlap=overlaps, **options)


@pytest.fixture(scope="module")
def expected(models):
    """The outputs of 40 requests without overlap."""
    return token_ids(build(models, overlaps=False, max_batch_size=8).generate(*varied_work(40)))


@pytest.fixture
def halves(monkeypatch):
    """For each step, the prepared requests and those verified at the same time."""
    seen, half_step = [], OverlappedEngine._half_step

    def ahead_of(engine):
        ahead = engine._ahead
        return set() if ahead is None else {r.request_id for r in ahead.batch.generating}

    def spied(self):
        verified = ahead_of(self)
        advanced = half_step(self)
        seen.append((ahead_of(self), verified))
        return advanced

    monkeypatch.setattr(OverlappedEngine, "_half_step", spied)
    return seen


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 8, 40])
def test_texts_are_the_same(models, expected, halves, max_batch_size):
    llm = build(models, max_batch_size=max_batch_size, max_chunk_tokens=16)
    assert token_ids(llm.generate(*varied_work(40))) == expected
    assert any(prepared and verified for prepared, verified in halves) == (max_batch_size > 1)
    assert not any(prepared & verified for prepared, verified in halves)


def test_they_run_at_the_same_time(models, monkeypatch):
    """Each thread waits until the other has started."""
    begun = {name: threading.Event() for name in ("prepare", "verify")}
    threads = {name: set() for name in begun}
    met = []

    def meeting(name, other, function):
        def together(*args):
            threads[name].add(threading.current_thread().name)
            begun[name].set()
            met.append(begun[other].wait(0.5))
            try:
                return function(*args)
            finally:
                begun[name].clear()

        return together

    llm = build(models, max_batch_size=4)
    prepare = staticmethod(meeting("prepare", "verify", OverlappedEngine._prepare))
    monkeypatch.setattr(OverlappedEngine, "_prepare", prepare)
    monkeypatch.setattr(
        TargetVerifier, "verify", meeting("verify", "prepare", TargetVerifier.verify)
    )
    llm.generate([[1, 2]] * 4, SamplingParams(max_tokens=12, ignore_eos=True))
    assert sum(met) >= 8
    assert any(name.startswith("target") for name in threads["verify"])
    assert any(name.startswith("draft") for name in threads["prepare"])


def test_requests_join_and_are_cancelled_meanwhile(models, expected):
    llm = build(models, max_batch_size=6)
    assert_same_with_cancellations(llm.engine, expected)
    scheduler = llm.engine._scheduler
    assert scheduler.num_reserved_tokens == 0
    assert len(scheduler._free_slots) == 6


def test_what_is_said_is_reported_once(models):
    """Including steps that are finished outside of :meth:`step` after a cancellation."""
    llm = build(models, max_batch_size=6)
    engine = llm.engine
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [engine.add(None, [1 + i], params) for i in range(6)]
    ended = []
    for number in range(200):
        ended += [r.request_id for r in engine.step() if r.finish_reason is FinishReason.LENGTH]
        if number == 4:
            engine.cancel(requests[0])
        if not engine.num_unfinished:
            break
    ended += [r.request_id for r in engine._advanced]
    assert sorted(set(ended)) == [r.request_id for r in requests[1:]]


def test_the_policy_is_changed_between_two_steps(models, expected):
    llm = build(models, max_batch_size=6)
    changes = iter([{"policy": "svip"}, {"num_speculative_tokens": 1}, {"policy": "none"}] * 40)
    steps = []

    def change(requests):
        steps.append(len(requests))
        if len(steps) % 3 == 0:
            llm.change_speculation(**next(changes))

    outputs = llm.generate(*varied_work(40), on_step=change)
    assert [len(each) for each in token_ids(outputs)] == [len(each) for each in expected]
    for output, said, params in zip(outputs, expected, varied_work(40)[1], strict=True):
        if params.temperature == 0:
            assert output.token_ids == said


def test_each_request_may_have_its_own_policy(models, expected):
    llm = build(models, max_batch_size=6)
    ways = [RequestSpeculation(policy=("fixed", "svip", "none")[i % 3]) for i in range(40)]
    outputs = llm.generate(*varied_work(40), speculation=ways)
    for output, said, params in zip(outputs, expected, varied_work(40)[1], strict=True):
        if params.temperature == 0:
            assert output.token_ids == said


def test_a_failure_on_one_side_ends_the_step_and_not_the_engine(models, expected, monkeypatch):
    llm = build(models, max_batch_size=4)
    verify, calls = TargetVerifier.verify, []

    def failing(self, batch, plan):
        calls.append(batch)
        if len(calls) == 5:
            raise RuntimeError("a bit fell over")
        return verify(self, batch, plan)

    monkeypatch.setattr(TargetVerifier, "verify", failing)
    with pytest.raises(RuntimeError, match="fell over"):
        llm.generate(*varied_work(40))
    assert llm.engine.num_unfinished == 0
    assert token_ids(llm.generate(*varied_work(40))) == expected


class TestDeciding:
    """By costs: ``seconds(n)`` of the target, and so much for each token drafted."""

    def overlap(self, target, draft, interference, lengths=(4,) * 16, tokens_each=5):
        latency = LatencyModel(target, StageCost((1, 4096), (draft, draft)))
        made = OverlapDecision(latency, interference)
        for _ in range(100):
            made.observe(tokens_each * len(lengths), 0, lengths)
        return made

    LINEAR = StageCost((1, 4096), (0.0001, 0.4096))
    FLAT = StageCost((1, 4096), (0.010, 0.011))

    def test_it_pays_where_drafting_is_dear_and_the_target_busy(self):
        gpu = Interference(1.05, 1.2)
        # 8 ms of the target and 4 times 1 ms of the draft; halves of 4 ms beside 4 of the draft.
        assert self.overlap(self.LINEAR, 0.001, gpu).is_faster(16)
        # Halves of a target that reads its weights take as long as the whole.
        assert not self.overlap(self.FLAT, 0.001, gpu).is_faster(16)
        # A draft that costs nothing leaves nothing to hide.
        assert not self.overlap(self.LINEAR, 0.00001, gpu).is_faster(16)
        # Overlap is not worthwhile either if the passes slow each other down.
        assert not self.overlap(self.LINEAR, 0.001, Interference(1.9, 1.9)).is_faster(16)

    def test_a_single_request_has_no_halves(self):
        assert not OverlapDecision(fixed_latency(), None).is_faster(1)
        assert OverlapDecision(fixed_latency(), None).is_faster(2)

    def test_what_steps_look_like_is_followed(self):
        made = self.overlap(self.LINEAR, 0.001, Interference(1.05, 1.2), lengths=(0,) * 16)
        assert not made.is_faster(16)
        for _ in range(100):
            made.observe(80, 0, (4,) * 16)
        assert made.is_faster(16)


class TestPinnedThreads:
    def test_each_has_its_cores(self):
        large, small = shares()
        assert not set(large) & set(small)
        before = torch.get_num_threads()
        thread = PinnedThread("one", small)
        assert thread.submit(torch.get_num_threads).result() == 1
        assert (
            thread.submit(lambda: sorted(pinned_threads.os.sched_getaffinity(0))).result() == small
        )
        assert torch.get_num_threads() == before
        assert len(pinned_threads.usable_cores()) >= len(large) + 1
        thread.close()

    def test_a_single_core_cannot_overlap(self, models, monkeypatch):
        monkeypatch.setattr(overlap, "shares", lambda: None)
        with pytest.raises(InvalidParameterError, match="two cores") as caught:
            build(models)
        assert caught.value.field == "overlap"


class TestAsking:
    def test_only_yes_no_or_by_the_profile(self, models):
        with pytest.raises(InvalidParameterError, match="must be true, false or None") as caught:
            build(models, overlaps="yes")
        assert caught.value.field == "overlap"

    def test_an_oracle_needs_the_target_itself(self, models):
        llm = build(models, overlaps=False)
        speculation = SpeculationConfig(models.folder(RECIPE.draft()), policy="oracle")
        with pytest.raises(InvalidParameterError, match="leaves no target") as caught:
            OverlappedEngine(
                llm.load_models(speculation),
                speculation,
                EngineOptions(4),
                fixed_latency(),
                overlap=OverlapOptions(),
            )
        assert caught.value.field == "overlap"

    def test_a_policy_that_is_made_is_one(self, models):
        llm = build(models, overlaps=False)
        with pytest.raises(InvalidParameterError, match="for each half"):
            OverlappedEngine(
                llm.load_models(llm.speculation),
                llm.speculation,
                EngineOptions(4),
                policy=llm.engine.policies.default,
                overlap=OverlapOptions(),
            )

    @pytest.mark.filterwarnings("ignore:latency_profile")  # the machine may be busier by now
    @pytest.mark.parametrize("interference", [False, True])
    def test_the_profile_decides(self, models, tmp_path, interference):
        path = tmp_path / "latency.json"
        plain = build(models, overlaps=False)
        loaded = plain.load_models(plain.speculation)
        measure_profile(loaded, 2, [8], 3, interference=interference).save(path)
        speculation = SpeculationConfig(
            models.folder(RECIPE.draft()),
            num_speculative_tokens=3,
            policy="fixed",
            latency_profile=str(path),
        )
        for asked in (None, False):
            llm = LLM(models.folder(RECIPE), speculation, dtype="float32", overlap=asked)
            assert isinstance(llm.engine, OverlappedEngine) == (interference and asked is None)

    def test_without_a_draft_there_is_nothing_to_overlap(self, models):
        llm = LLM(models.folder(RECIPE), dtype="float32", overlap=True)
        assert not isinstance(llm.engine, OverlappedEngine)
