"""After an exception in the middle of a step, requests go on as if it had not come."""

import pytest

from draftwise import LLM, SamplingParams
from draftwise.engine import verification
from draftwise.errors import EngineError
from draftwise.models.packed_model import PackedModel

from ..stand_ins import unguarded
from ..tiny_models import Recipe

RECIPE = Recipe(vocab=32, context=256, seed=8)
WINDOW = Recipe("gemma3_text", vocab=32, context=256, seed=8)


def interrupted_once(monkeypatch, owner, name, when):
    """Make a function end with an interrupt the first time that a condition holds."""
    original, interrupts = getattr(owner, name), []

    def function(*args, **kwargs):
        yet_to_come = not interrupts and when(*args, **kwargs)
        result = original(*args, **kwargs)
        if yet_to_come:
            interrupts.append(True)
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, function)
    return interrupts


def finish(llm, request):
    """The output of a request, and how often its steps were interrupted."""
    num_interrupts = 0
    while request.finish_reason is None:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    return request.output(), num_interrupts


@pytest.mark.parametrize("chunk", [0, 1, 4], ids=["first chunk", "second chunk", "last chunk"])
def test_prompt_logprobs_are_complete(models, monkeypatch, chunk):
    llm = LLM(models.folder(RECIPE), dtype="float32", max_chunk_tokens=8)
    prompt = [(7 * i * i + i) % 32 for i in range(40)]
    params = SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=1)
    expected = llm.generate(prompt, params)[0]
    original, calls = verification.prompt_logprobs, []

    def part(logits, tokens, num_top):
        calls.append(tokens)
        entries = list(original(logits, tokens, num_top))
        if len(calls) == chunk + 1:
            yield from entries[: len(entries) // 2]
            raise KeyboardInterrupt
        yield from entries

    monkeypatch.setattr(verification, "prompt_logprobs", part)
    request = llm.engine.add(None, prompt, params)
    output, num_interrupts = finish(llm, request)
    assert num_interrupts == 1
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.token_ids == expected.token_ids


def test_a_draft_that_catches_up_in_its_rings_reads_everything_again(models, monkeypatch):
    """What its rings have dropped cannot be taken back."""
    speculation = unguarded(models.folder(WINDOW.draft()), policy="fixed")
    llm = LLM(models.folder(WINDOW), speculation, dtype="float32", max_chunk_tokens=16)
    params = SamplingParams(max_tokens=180, temperature=0)
    expected = llm.generate([1, 2, 3], params)[0].token_ids
    request = llm.engine.add(None, [1, 2, 3], params)
    llm.engine.step()
    llm.change_speculation(policy="none")
    while len(request.tokens) < 150:
        llm.engine.step()
    llm.change_speculation(policy="fixed")
    cache = llm.engine._pipelines[0].proposer.cached_model.cache
    assert cache.lengths[0] < 20

    def ends_catching_up(model, own_cache, *_):
        return own_cache is cache and cache.lengths[0] > 60

    interrupts = interrupted_once(monkeypatch, PackedModel, "forward", ends_catching_up)
    output, num_interrupts = finish(llm, request)
    assert interrupts
    assert num_interrupts == 1
    assert output.token_ids == expected
    assert output.speculation.num_accepted > 5


def test_an_engine_whose_state_is_lost_says_so(models, monkeypatch):
    llm = LLM(models.folder(RECIPE), dtype="float32")
    request = llm.engine.add(None, [1, 2, 3], SamplingParams(max_tokens=5))

    def fail(*_, **__):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(PackedModel, "forward", fail)
    monkeypatch.setattr(type(llm.engine._scheduler), "recover", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.engine.step()
    assert isinstance(request.error, EngineError)
    with pytest.raises(EngineError, match="state was lost after an error"):
        llm.generate([1, 2], SamplingParams(max_tokens=1))
