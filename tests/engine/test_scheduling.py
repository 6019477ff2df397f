"""Requests that join, wait, leave or are cancelled do not change other outputs."""

import pytest

from draftwise import LLM, SamplingParams
from draftwise.engine import scheduler
from draftwise.errors import CacheExhaustedError
from draftwise.outputs import FinishReason

from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .assembly import token_ids, varied_work

RECIPE = Recipe(vocab=16, seed=6)
GIB = 2**30


def build(models, **options):
    speculation = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
    return LLM(models.folder(RECIPE), speculation, dtype="float32", **options)


@pytest.fixture(scope="module")
def expected(models):
    """The outputs of 50 requests that all run at once."""
    return token_ids(build(models, max_batch_size=50).generate(*varied_work(50)))


def assert_idle(llm):
    """Every slot is free and nothing is reserved."""
    scheduler = llm.engine._scheduler
    assert llm.engine.num_unfinished == 0
    assert scheduler.num_reserved_tokens == 0
    assert sorted(scheduler._free_slots) == list(range(len(scheduler._free_slots)))
    assert len(scheduler._free_slots) == scheduler._target_cache.num_cache_slots


@pytest.mark.parametrize("max_batch_size", [1, 7])
def test_requests_beyond_the_batch_size_wait(models, expected, max_batch_size):
    llm = build(models, max_batch_size=max_batch_size, max_chunk_tokens=6)
    sizes = []
    outputs = llm.generate(*varied_work(50), on_step=lambda requests: sizes.append(len(requests)))
    assert token_ids(outputs) == expected
    assert max(sizes) == max_batch_size
    assert_idle(llm)


def test_requests_are_admitted_in_order_of_arrival(models):
    llm = build(models, max_batch_size=3)
    seen = []

    def note(requests):
        seen.extend(r.request_id for r in requests if r.request_id not in seen)

    llm.generate([[1]] * 12, SamplingParams(max_tokens=6), on_step=note)
    assert [sorted(seen[i : i + 3]) for i in range(0, 12, 3)] == [
        [i, i + 1, i + 2] for i in range(0, 12, 3)
    ]


def test_late_requests_give_the_same_texts(models, expected):
    llm = build(models, max_batch_size=5)
    prompts, params = varied_work(50)
    requests = []
    while len(requests) < 50 or llm.engine.num_unfinished:
        for _ in range(len(requests) % 3 + 1):
            if len(requests) < 50:
                index = len(requests)
                requests.append(llm.engine.add(None, prompts[index], params[index]))
        llm.engine.step()
    assert token_ids(request.output() for request in requests) == expected
    assert_idle(llm)


def bytes_per_token(models):
    engine = build(models, max_batch_size=1).engine
    caches = engine._scheduler._target_cache, engine._pipeline.proposer.cached_model.cache
    return sum(cache.bytes_per_token for cache in caches)


def test_a_small_cache_makes_requests_wait(models, expected):
    # Room for two or three of these requests, which need at most 11 + 14 tokens.
    size = 2.5 * 25 * bytes_per_token(models) / GIB
    llm = build(models, max_batch_size=50, cache_gib=size)
    running = []
    outputs = llm.generate(
        *varied_work(50),
        on_step=lambda _: running.append(llm.engine._scheduler.num_reserved_tokens),
    )
    assert token_ids(outputs) == expected
    assert 25 < max(running) <= 2.5 * 25
    assert_idle(llm)


def test_a_request_that_never_fits_is_refused(models, expected):
    size = 20 * bytes_per_token(models) / GIB
    llm = build(models, max_batch_size=50, cache_gib=size)
    with pytest.raises(CacheExhaustedError) as caught:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=18))
    assert caught.value.field == "max_tokens"
    assert "21 tokens" in str(caught.value)
    assert "20 in all" in str(caught.value)
    assert llm.generate([1, 2, 3], SamplingParams(max_tokens=17))[0].error is None
    outputs = llm.generate(*varied_work(50))
    for output, tokens, prompt, params in zip(outputs, expected, *varied_work(50), strict=True):
        if len(prompt) + params.max_tokens > 20:
            assert isinstance(output.error, CacheExhaustedError)
        else:
            assert output.token_ids == tokens
    assert_idle(llm)


def test_a_cache_that_holds_no_token_is_refused(models):
    with pytest.raises(CacheExhaustedError, match="holds no token") as caught:
        build(models, max_batch_size=50, cache_gib=1 / GIB)
    assert caught.value.field == "cache_gib"


def test_a_request_reserves_no_more_than_the_context(models):
    """``max_tokens`` beyond the context reserves no additional memory."""
    size = 64 * bytes_per_token(models) / GIB
    llm = build(models, cache_gib=size)
    (output,) = llm.generate([1], SamplingParams(max_tokens=10**6))
    assert len(output.token_ids) == RECIPE.context - 1


@pytest.mark.parametrize(
    ("after", "victims"), [(0, [0]), (1, [3, 4]), (2, [12]), (5, [0, 13, 14, 30]), (0, [49])]
)
def test_cancelled_requests_do_not_affect_others(models, expected, after, victims):
    """They are cancelled while they wait, during their prompt, or during generation."""
    llm = build(models, max_batch_size=12, max_chunk_tokens=8)
    requests = [llm.engine.add(None, *item) for item in zip(*varied_work(50), strict=True)]
    for _ in range(after):
        llm.engine.step()
    for victim in victims:
        llm.engine.cancel(requests[victim])
        llm.engine.cancel(requests[victim])
    while llm.engine.num_unfinished:
        llm.engine.step()
    for index, request in enumerate(requests):
        output = request.output()
        if index in victims and output.finish_reason is FinishReason.CANCELLED:
            assert output.token_ids == expected[index][: len(output.token_ids)]
            assert len(output.token_ids) < len(expected[index])
        else:
            assert output.finish_reason is FinishReason.LENGTH
            assert output.token_ids == expected[index]
    assert_idle(llm)


def test_a_callback_can_cancel_requests(models, expected):
    llm = build(models, max_batch_size=50)

    def cancel_odd(requests):
        for request in requests:
            if request.request_id % 2 and request.num_output_tokens >= 3:
                llm.engine.cancel(request)

    outputs = llm.generate(*varied_work(50), on_step=cancel_odd)
    for index, output in enumerate(outputs):
        if output.finish_reason is FinishReason.CANCELLED:
            assert index % 2
            assert 3 <= len(output.token_ids) < len(expected[index])
        assert output.token_ids == expected[index][: len(output.token_ids)]
    assert FinishReason.CANCELLED in {output.finish_reason for output in outputs}
    assert_idle(llm)


def test_an_exception_in_a_callback_cancels_the_call(models, expected):
    llm = build(models, max_batch_size=4)

    def fail(requests):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(*varied_work(50), on_step=fail)
    assert_idle(llm)
    assert token_ids(llm.generate(*varied_work(50))) == expected


def test_an_exception_in_a_model_leaves_the_engine_usable(models, expected, monkeypatch):
    llm = build(models, max_batch_size=4)
    forward = type(llm.target.model).forward
    calls = []

    def fail_once(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 7:
            raise MemoryError
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(llm.target.model), "forward", fail_once)
    with pytest.raises(MemoryError):
        llm.generate(*varied_work(50))
    assert_idle(llm)
    assert token_ids(llm.generate(*varied_work(50))) == expected


def test_two_streams_and_a_call_share_the_engine(models, expected):
    llm = build(models, max_batch_size=4)
    prompts, params = varied_work(50)
    streams = [llm.stream(prompts[i::2], params[i::2]) for i in range(2)]
    texts = [[[] for _ in prompts[i::2]] for i in range(2)]
    turn = 0
    while streams != [None, None]:
        turn += 1
        if turn == 30:
            assert token_ids(llm.generate(prompts[:8], params[:8])) == expected[:8]
        for which, stream in enumerate(streams):
            piece = None if stream is None else next(stream, None)
            if piece is None:
                streams[which] = None
            else:
                texts[which][piece.index] += piece.token_ids
    assert texts == [expected[0::2], expected[1::2]]
    assert_idle(llm)


def test_a_batch_is_closed_until_a_request_joins_running_ones(models, monkeypatch):
    monkeypatch.setattr(scheduler, "_STEPS_TO_CLOSE", 3)
    engine = build(models, max_batch_size=2).engine
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    seen = []
    next_batch = engine._scheduler.next_batch

    def noted(*arguments):
        batch = next_batch(*arguments)
        seen.append((batch.is_closed, [state.num_left for state in batch.states(lambda r: 3)]))
        return batch

    monkeypatch.setattr(engine._scheduler, "next_batch", noted)
    first = engine.add(None, [1, 2], params)
    engine.step()
    assert seen == [(True, [40])]
    engine.add(None, [3], params)
    engine.add(None, [4], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    assert seen[-1][0] is False  # a request joined, and another waits
    assert seen[-1][1] == [None, None]
    engine.cancel(first)
    for _ in range(4):
        engine.step()
    assert [is_closed for is_closed, _ in seen[2:]] == [False, False, False, True]
    assert all(left is not None for left in seen[-1][1])
