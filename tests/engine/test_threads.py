"""Threads that share an engine do not change each other's outputs, even after failures."""

import gc
import random
import threading
from collections import Counter

import pytest

from draftwise import LLM, SamplingParams, StructuredOutputs
from draftwise.engine.request import Request
from draftwise.errors import ClosedError, EngineError, PromptError
from draftwise.outputs import FinishReason

from ..stand_ins import unguarded
from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

RECIPE = Recipe(vocab=32, seed=11, tokenizer=True, config={"eos_token_id": 1})
LONG = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=10, seed=2, ignore_eos=True)
SOON = 60.0  # a limit against hanging, not a measurement


def build(models, **options):
    speculation = unguarded(
        models.folder(RECIPE.draft()),
        num_speculative_tokens=3,
        policy=options.pop("policy", "fixed"),
        companion=options.pop("companion", None),
    )
    return LLM(models.folder(RECIPE), speculation, dtype="float32", **options)


def varied_work(count):
    """Prompts and parameters of many kinds, all with seeds."""
    draw = random.Random(5)
    work = []
    for index in range(count):
        prompt = [draw.randrange(3, 32) for _ in range(draw.choice((1, 2, 9, 30)))]
        options = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_k": 9}
        if index % 5 == 0:
            options["repetition_penalty"] = 1.3
        params = SamplingParams(max_tokens=draw.choice((1, 5, 20, 33)), seed=index, **options)
        work.append((prompt, params))
    return work


def together(*runs):
    """Run each function in its own thread. Raises an exception that one of them raised."""
    problems = []

    def guarded(run):
        try:
            run()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive(), "it hangs"
    if problems:
        raise problems[0]


def rest_of(stream):
    return [token for piece in stream for token in piece.token_ids]


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 3},
        {"max_batch_size": 16, "max_chunk_tokens": 8},
        {"max_batch_size": 6, "overlap": True},
        {"max_batch_size": 6, "policy": "svip"},
    ],
    ids=["few rows", "small chunks", "overlap", "asked while drafting"],
)
def test_eight_threads_get_the_same_texts_as_one(models, options):
    llm = build(models, **options)
    work = varied_work(40)
    expected = [llm.generate([prompt], params)[0] for prompt, params in work]
    done = Counter()

    def caller(seed):
        draw = random.Random(seed)
        for _ in range(12):
            chosen = draw.sample(range(len(work)), draw.choice((1, 2, 4)))
            prompts, params = zip(*(work[index] for index in chosen), strict=True)
            kind = draw.choice(("generate", "on_step", "stream", "closed", "dropped"))
            if kind in ("generate", "on_step"):
                told = (lambda requests: None) if kind == "on_step" else None
                outputs = llm.generate(list(prompts), list(params), told)
                texts = [output.token_ids for output in outputs]
            else:
                texts, stream = [[] for _ in prompts], llm.stream(list(prompts), list(params))
                for count, piece in enumerate(stream):
                    texts[piece.index] += piece.token_ids
                    if kind != "stream" and count == draw.choice((0, 2, 4)):
                        break
                if kind == "closed":
                    stream.close()
                del stream
            for index, text in zip(chosen, texts, strict=True):
                whole = expected[index].token_ids
                assert text == (whole[: len(text)] if kind in ("closed", "dropped") else whole)
            done[kind] += 1

    together(*(lambda seed=seed: caller(seed) for seed in range(8)))
    assert sum(done.values()) == 96
    assert len(done) == 5
    assert llm.engine.num_unfinished == 0
    again = [output.token_ids for output in llm.generate(*map(list, zip(*work, strict=True)))]
    assert again == [output.token_ids for output in expected]


def test_a_step_of_one_thread_advances_another(models):
    llm = build(models)
    alone = rest_of(llm.stream([1, 2], LONG))
    stream = llm.stream([1, 2], LONG)
    first = next(stream)
    together(lambda: llm.generate([3, 4], SHORT))
    second = next(stream)
    assert len(second.token_ids) > 4  # more than one step generates
    assert first.token_ids + second.token_ids + rest_of(stream) == alone


def test_requests_of_two_threads_are_in_one_batch(models):
    llm = build(models)
    sizes = []

    def told(requests):
        sizes.append(llm.engine.num_unfinished)

    both = threading.Barrier(2, timeout=SOON)

    def caller(prompt):
        met = []

        def on_step(requests):
            if not met:
                met.append(both.wait())
            told(requests)

        llm.generate(prompt, LONG, on_step)

    together(lambda: caller([1, 2]), lambda: caller([3, 4]))
    assert max(sizes) == 2


class TestClosingAStream:
    def test_within_a_step_of_the_same_thread(self, models, monkeypatch):
        """Garbage collection may close a stream at this point."""
        llm = build(models)
        expected = llm.generate([3, 4], LONG)[0].token_ids
        stream = llm.stream([1, 2], LONG)
        next(stream)
        next_batch, seen = llm.engine._scheduler.next_batch, []

        def closing(*arguments):
            batch = next_batch(*arguments)
            stream.close()
            seen.append(len(batch.generating))
            return batch

        monkeypatch.setattr(llm.engine._scheduler, "next_batch", closing)
        assert llm.generate([3, 4], LONG)[0].token_ids == expected
        assert llm.engine.num_unfinished == 0
        assert seen[0] == 2  # the current step still contains it
        assert seen[-1] == 1

    def test_in_another_thread(self, models):
        llm = build(models)
        stream = llm.stream([1, 2], LONG)
        next(stream)
        together(stream.close)
        assert llm.engine.num_unfinished == 0

    def test_by_the_garbage_collector(self, models):
        llm = build(models)
        stream = llm.stream([1, 2], LONG)
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
        assert llm.engine.num_unfinished == 0


PLACES = {
    "admission": ("_scheduler", "_admit"),
    "batch": ("_scheduler", "next_batch"),
    "verification": ("_verifier", "verify"),
    "acceptance": ("_acceptance", "accept"),
    "commit": ("_scheduler", "commit"),
}


class Interrupts:
    """Raises an exception at the first call of a function, before or after the call."""

    def __init__(self, owner, name, error, after=False):
        self._run = getattr(owner, name)
        self._error, self._after = error, after
        self.raised = False

    def __call__(self, *arguments, **options):
        if not self._after and not self.raised:
            self.raised = True
            raise self._error
        result = self._run(*arguments, **options)
        if not self.raised:
            self.raised = True
            raise self._error
        return result


class TestInterruptions:
    """A KeyboardInterrupt ends only the requests of the thread that it interrupts."""

    @pytest.mark.covering("options", "place", "after")
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["whole", "overlap"])
    def test_at_any_point_of_a_step(self, models, monkeypatch, options, place, after):
        llm = build(models, max_chunk_tokens=8, **options)
        work = varied_work(6)
        expected = [llm.generate([prompt], params)[0].token_ids for prompt, params in work]
        streams = [llm.stream([prompt], params) for prompt, params in work]
        texts = [list(next(stream).token_ids) for stream in streams]
        owner, name = PLACES[place]
        part = getattr(llm.engine, owner)
        interrupts = Interrupts(part, name, KeyboardInterrupt(), after)
        monkeypatch.setattr(part, name, interrupts)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 20, [3, 4]], LONG)
        assert interrupts.raised
        for stream, text in zip(streams, texts, strict=True):
            text += rest_of(stream)
        assert texts == expected
        assert llm.engine.num_unfinished == 0
        assert llm.engine._scheduler.num_reserved_tokens == 0

    @pytest.mark.parametrize("number", [0, 2])
    def test_a_request_that_was_being_changed_fails(self, models, monkeypatch, number):
        """Its state may be inconsistent between two steps. All other requests continue."""
        llm = build(models)
        work = varied_work(12)[6:9]
        work = [(prompt, LONG) for prompt, _ in work]
        expected = [llm.generate([prompt], params)[0].token_ids for prompt, params in work]
        streams = [llm.stream([prompt], params) for prompt, params in work]
        texts = [list(next(stream).token_ids) for stream in streams]
        append, calls = Request.append, []

        def interrupted(request, *arguments):
            calls.append(request)
            if len(calls) == number + 1:
                raise KeyboardInterrupt
            return append(request, *arguments)

        monkeypatch.setattr(Request, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([5], LONG)
        monkeypatch.undo()
        errors = []
        for stream, text, whole in zip(streams, texts, expected, strict=True):
            last = None
            for last in stream:
                text += last.token_ids
            if last.finish_reason is FinishReason.ERROR:
                errors.append(last.error)
                assert text == whole[: len(text)]
            else:
                assert text == whole
        assert len(errors) <= 1
        assert all(isinstance(error, EngineError) for error in errors)
        assert llm.engine.num_unfinished == 0
        assert llm.generate([work[0][0]], LONG)[0].token_ids == expected[0]

    def test_an_exception_in_a_callback_ends_only_its_call(self, models):
        llm = build(models)
        expected = rest_of(llm.stream([1, 2], LONG))
        stream = llm.stream([1, 2], LONG)
        text = list(next(stream).token_ids)

        def told(requests):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            llm.generate([3, 4], LONG, told)
        assert llm.engine.num_unfinished == 1
        assert text + rest_of(stream) == expected


@pytest.mark.covering("options", "place")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["whole", "overlap"])
def test_a_failed_step_ends_all_running_requests(models, monkeypatch, options, place):
    llm = build(models, **options)
    expected = llm.generate([3, 4], LONG)[0].token_ids
    stream = llm.stream([1, 2], LONG)
    next(stream)
    owner, name = PLACES[place]
    part = getattr(llm.engine, owner)
    monkeypatch.setattr(part, name, Interrupts(part, name, RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        llm.generate([3, 4], LONG)
    *_, last = stream
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, EngineError)
    assert "no memory" in last.error.message
    assert llm.engine.num_unfinished == 0
    assert llm.generate([3, 4], LONG)[0].token_ids == expected


def test_all_threads_get_an_error_after_a_failed_step(models, monkeypatch):
    """No thread hangs, and the engine remains usable."""
    llm = build(models)
    all_in = threading.Barrier(4, timeout=SOON)
    verify, errors = llm.engine._verifier.verify, []

    def failing(*arguments):
        raise RuntimeError("no memory")

    def caller(number):
        stream = llm.stream([1, number], LONG)
        next(stream)
        if all_in.wait() == 0:
            monkeypatch.setattr(llm.engine._verifier, "verify", failing)
        all_in.wait()
        try:
            pieces = list(stream)
            errors.append(pieces[-1].error)
        except RuntimeError as error:
            errors.append(error)

    together(*(lambda number=number: caller(number) for number in range(4)))
    assert sorted(type(error).__name__ for error in errors) == [
        *["EngineError"] * 3,
        "RuntimeError",
    ]
    monkeypatch.setattr(llm.engine._verifier, "verify", verify)
    assert llm.generate([1, 2], SHORT)[0].error is None


def test_other_methods_run_concurrently_with_generate(models):
    llm = build(models, max_batch_size=4)
    grammars = [StructuredOutputs(regex=f"[ab]{{{n}}}") for n in range(1, 9)]
    stop = threading.Event()
    expected = llm.generate(["ab", "abc d"], [LONG, SHORT])

    def generating():
        try:
            for _ in range(8):
                outputs = llm.generate(["ab", "abc d"], [LONG, SHORT])
                assert [o.prompt_token_ids for o in outputs] == [
                    o.prompt_token_ids for o in expected
                ]
                assert [len(o.token_ids) for o in outputs] == [len(o.token_ids) for o in expected]
        finally:
            stop.set()

    def repeat(run):
        def repeating():
            run()
            while not stop.is_set():
                run()

        return repeating

    def changing():
        for number in (1, 4, 0, 3):
            llm.change_speculation(num_speculative_tokens=number)

    def with_forms():
        for grammar in grammars:
            (output,) = llm.generate("ab", SamplingParams(structured_outputs=grammar, seed=1))
            assert set(output.text) <= {"a", "b"}

    def refused():
        with pytest.raises(PromptError):
            llm.generate([[99]])

    together(
        generating,
        generating,
        repeat(changing),
        repeat(lambda: llm.tokenize("abc d" * 9)),
        repeat(with_forms),
        repeat(refused),
    )


def test_llms_that_share_a_target_share_the_lock(models):
    llm = build(models)
    plain = llm.with_speculation(None)
    work = varied_work(12)
    both = [
        [each.generate([prompt], params)[0].token_ids for prompt, params in work]
        for each in (llm, plain)
    ]
    assert llm.engine.turns is plain.engine.turns

    def caller(each, expected):
        for (prompt, params), text in zip(work, expected, strict=True):
            assert each.generate([prompt], params)[0].token_ids == text

    together(*(lambda i=i: caller((llm, plain)[i % 2], both[i % 2]) for i in range(6)))


def test_independent_llms_run_concurrently(models):
    work = varied_work(16)
    expected = {}
    lock = threading.Lock()

    def caller(number):
        llm = build(models)
        texts = [llm.generate([prompt], params)[0].token_ids for prompt, params in work]
        with lock:
            expected[number] = texts

    together(*(lambda number=number: caller(number) for number in range(3)))
    alone = build(models)
    texts = [alone.generate([prompt], params)[0].token_ids for prompt, params in work]
    assert list(expected.values()) == [texts] * 3


def test_closing_ends_the_calls_of_other_threads(models):
    llm = build(models)
    stream = llm.stream([1, 2], LONG)
    next(stream)
    started = threading.Event()

    def caller():
        with pytest.raises(ClosedError):
            llm.generate([[3, 4]] * 500, LONG, lambda requests: started.set())

    def closing():
        assert started.wait(SOON)
        llm.close()

    together(caller, closing)
    assert isinstance(list(stream)[-1].error, ClosedError)


def test_a_custom_step_loop_runs_beside_other_threads(models):
    """A request holds its own result, whichever thread ran the step."""
    llm = build(models)
    expected = llm.generate([1, 2], LONG)[0].token_ids

    def looping():
        engine = llm.engine
        request = engine.add(None, [1, 2], LONG)
        text = []
        while request.finish_reason is None:
            with engine.turns:
                engine.step()
                text += request.take_new().token_ids
        with engine.turns:
            text += request.take_new().token_ids
        assert text == expected

    def caller():
        assert llm.generate([1, 2], LONG)[0].token_ids == expected

    together(looping, looping, caller, caller)
