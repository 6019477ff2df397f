"""Overlapping the halves of a batch does not change any output."""

import itertools
import threading

import pytest
import torch

from draftwise import LLM, RequestSpeculation, SamplingParams
from draftwise.core.latency import Interference, LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.engine.assembly import EngineOptions
from draftwise.engine.parallel import overlap, pinned_threads
from draftwise.engine.parallel.overlap import OverlapDecision, OverlappedEngine
from draftwise.engine.parallel.pinned_threads import PinnedThread, shares
from draftwise.engine.verification import TargetVerifier
from draftwise.errors import InvalidParameterError
from draftwise.openmp import usable_cores
from draftwise.outputs import FinishReason
from draftwise.profiling.latency import measure_profile

from ..stand_ins import fixed_latency, unguarded
from ..tiny_models import Recipe
from .assembly import assert_same_with_cancellations, token_ids, varied_work

pytestmark = pytest.mark.skipif(shares() is None, reason="the machine has a single core")
RECIPE = Recipe(vocab=16, seed=6)


def build(models, overlaps=True, **options):
    speculation = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
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


def test_an_output_is_remembered_once(models, halves):
    speculation = unguarded(
        ["suffix", models.folder(RECIPE.draft())], policy="fixed", remember_outputs=True
    )
    stored = []
    for overlaps in (False, True):
        llm = LLM(models.folder(RECIPE), speculation, dtype="float32", overlap=overlaps)
        llm.generate(*varied_work(6))
        stored.append(llm.engine.corpus.num_tokens)
    assert len(halves) > 0
    assert stored[0] == stored[1] > 0


def test_drafting_and_verification_run_at_the_same_time(models, monkeypatch):
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


def test_requests_can_join_and_be_cancelled(models, expected):
    llm = build(models, max_batch_size=6)
    assert_same_with_cancellations(llm.engine, expected)
    scheduler = llm.engine._scheduler
    assert scheduler.num_reserved_tokens == 0
    assert len(scheduler._free_slots) == 6


def test_every_finished_request_is_reported_once(models):
    """This includes steps that finish outside of :meth:`step` after a cancellation."""
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
    assert sorted(ended) == [r.request_id for r in requests[1:]]


def test_a_request_that_ends_as_overlap_stops_to_pay_is_reported_once(models, monkeypatch):
    llm = build(models, max_batch_size=6)
    engine = llm.engine
    steps = itertools.count()
    # In every third step the prepared half is finished, and the whole batch advances.
    monkeypatch.setattr(engine.overlap, "is_faster", lambda num_requests: next(steps) % 3 != 2)
    params = [SamplingParams(max_tokens=2 + i, ignore_eos=True) for i in range(12)]
    requests = [engine.add(None, [1 + i], each) for i, each in enumerate(params)]
    ended = []
    while engine.num_unfinished:
        advanced = [r.request_id for r in engine.step()]
        assert len(advanced) == len(set(advanced))
        done = {r.request_id for r in requests if r.finish_reason is FinishReason.LENGTH}
        ended += [each for each in advanced if each in done]
    ended += [r.request_id for r in engine._advanced]
    assert sorted(ended) == [r.request_id for r in requests]


def test_the_times_of_each_step_are_reported_once(models, monkeypatch):
    """Also of those that a cancellation or a whole step finishes."""
    llm = build(models, max_batch_size=6)
    engine = llm.engine
    steps, commit, committed = itertools.count(), OverlappedEngine._commit, []
    monkeypatch.setattr(engine.overlap, "is_faster", lambda num_requests: next(steps) % 5 != 4)

    def counting(self, step):
        advanced = commit(self, step)
        committed.append(self.times)
        return advanced

    monkeypatch.setattr(OverlappedEngine, "_commit", counting)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [engine.add(None, [1 + i], params) for i in range(6)]
    reported = []
    while engine.num_unfinished:
        engine.step()
        reported += engine.step_times
        if len(reported) == 4:
            engine.cancel(requests[0])
    assert list(map(id, reported)) == list(map(id, committed[: len(reported)]))
    assert len(committed) - len(reported) <= 1


def test_requests_of_one_half_advance_in_every_other_step(models):
    llm = build(models, max_batch_size=4)
    engine = llm.engine
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [engine.add(None, [1 + i], params) for i in range(4)]
    engine.step()
    for request in requests[1::2]:
        engine.cancel(request)
    assert {request.cache_slot % 2 for request in requests[::2]} == {0}
    idle = 0
    while engine.num_unfinished:
        idle = 0 if engine.step() else idle + 1
        assert idle < 2
    assert all(len(request.tokens) == 41 for request in requests[::2])


def test_the_policy_can_change_between_steps(models, expected):
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


def test_requests_of_a_batch_use_different_policies(models, expected):
    llm = build(models, max_batch_size=6)
    settings = [RequestSpeculation(policy=("fixed", "svip", "none")[i % 3]) for i in range(40)]
    outputs = llm.generate(*varied_work(40), speculation=settings)
    for output, said, params in zip(outputs, expected, varied_work(40)[1], strict=True):
        if params.temperature == 0:
            assert output.token_ids == said


def test_a_failure_in_one_thread_ends_only_the_step(models, expected, monkeypatch):
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


class TestDecision:
    """Costs are ``seconds(n)`` of the target, and a constant for each drafted token."""

    def overlap(self, target, draft, interference, lengths=(4,) * 16, tokens_each=5):
        latency = LatencyModel(target, StageCost((1, 4096), (draft, draft)))
        made = OverlapDecision(latency, interference)
        drafting = [sum(length > place for length in lengths) for place in range(max(lengths))]
        for _ in range(100):
            made.observe(tokens_each * len(lengths), 0, len(lengths), drafting)
        return made

    LINEAR = StageCost((1, 4096), (0.0001, 0.4096))
    FLAT = StageCost((1, 4096), (0.010, 0.011))

    def test_overlap_is_faster_only_if_drafting_is_expensive_and_passes_scale(self):
        gpu = Interference(1.05, 1.2)
        # The target takes 8 ms and the draft 4 times 1 ms. Half a batch takes 4 ms and 4 ms.
        assert self.overlap(self.LINEAR, 0.001, gpu).is_faster(16)
        # A target limited by reading weights takes as long for half a batch.
        assert not self.overlap(self.FLAT, 0.001, gpu).is_faster(16)
        # Overlap hides the time of the draft, and this draft takes almost none.
        assert not self.overlap(self.LINEAR, 0.00001, gpu).is_faster(16)
        # Overlap is slower if the passes slow each other down.
        assert not self.overlap(self.LINEAR, 0.001, Interference(1.9, 1.9)).is_faster(16)

    def test_a_single_request_is_never_overlapped(self):
        assert not OverlapDecision(fixed_latency(), None).is_faster(1)
        assert OverlapDecision(fixed_latency(), None).is_faster(2)

    def test_the_decision_follows_recent_draft_lengths(self):
        made = self.overlap(self.LINEAR, 0.001, Interference(1.05, 1.2), lengths=(0,) * 16)
        assert not made.is_faster(16)
        for _ in range(100):
            made.observe(80, 0, 16, [16] * 4)
        assert made.is_faster(16)


class TestPinnedThreads:
    def test_each_thread_has_its_own_cores(self):
        large, small = shares()
        assert not set(large) & set(small)
        before = torch.get_num_threads()
        thread = PinnedThread("one", small)
        assert thread.submit(torch.get_num_threads).result() == 1
        assert (
            thread.submit(lambda: sorted(pinned_threads.os.sched_getaffinity(0))).result() == small
        )
        assert torch.get_num_threads() == before
        assert len(usable_cores()) >= len(large) + 1
        thread.close()

    def test_a_single_core_is_refused(self, models, monkeypatch):
        monkeypatch.setattr(overlap, "shares", lambda: None)
        with pytest.raises(InvalidParameterError, match="two cores") as caught:
            build(models)
        assert caught.value.field == "overlap"


class TestOverlapOption:
    def test_other_values_than_true_false_and_none_are_refused(self, models):
        with pytest.raises(InvalidParameterError, match="must be true, false or None") as caught:
            build(models, overlaps="yes")
        assert caught.value.field == "overlap"

    def test_an_oracle_is_refused(self, models):
        llm = build(models, overlaps=False)
        speculation = unguarded(models.folder(RECIPE.draft()), policy="oracle")
        with pytest.raises(InvalidParameterError, match="leaves no target") as caught:
            OverlappedEngine(
                llm.load_models(speculation),
                speculation,
                EngineOptions(4),
                fixed_latency(),
            )
        assert caught.value.field == "overlap"

    @pytest.mark.filterwarnings("ignore:latency_profile")  # the machine may be busier by now
    @pytest.mark.parametrize("interference", [False, True])
    def test_the_latency_profile_decides_by_default(self, models, tmp_path, interference):
        path = tmp_path / "latency.json"
        plain = build(models, overlaps=False)
        loaded = plain.load_models(plain.speculation)
        measure_profile(loaded, 2, [8], 3, interference=interference).save(path)
        speculation = unguarded(
            models.folder(RECIPE.draft()),
            num_speculative_tokens=3,
            policy="fixed",
            latency_profile=str(path),
        )
        for asked in (None, False):
            llm = LLM(models.folder(RECIPE), speculation, dtype="float32", overlap=asked)
            assert isinstance(llm.engine, OverlappedEngine) == (interference and asked is None)

    def test_without_a_draft_nothing_overlaps(self, models):
        llm = LLM(models.folder(RECIPE), dtype="float32", overlap=True)
        assert not isinstance(llm.engine, OverlappedEngine)
