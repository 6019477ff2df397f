"""An error of one request does not change the outputs of the others."""

import math

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.errors import InvalidParameterError, NumericalError, PromptError
from draftwise.outputs import FinishReason

from ..refusals import error_of
from ..stand_ins import SOURCES_WITH_A_MODEL, unguarded
from ..tiny_models import Recipe
from .assembly import token_ids, varied_work
from .test_lossless import NOT_UNLIKELY, Case

VOCAB = 32
RECIPE = Recipe(vocab=VOCAB, seed=8, tokenizer=True)
BROKEN = 17
# No other request contains the broken token, neither in its text nor in a draft.
AVOIDED = {BROKEN: -100.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
GREEDY = {"temperature": 0.0}
KINDS = {
    "greedy": [GREEDY],
    "sampled": [SAMPLED],
    "mixed": [GREEDY, SAMPLED, {**SAMPLED, "repetition_penalty": 1.2, "min_p": 0.01}],
}


def build(models, speculation=True, **options):
    config = None
    if speculation:
        config = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
    return LLM(models.folder(RECIPE), config, dtype="float32", **options)


@torch.no_grad()
def break_token(packed_model, token):
    """Give a loaded model a token whose embedding is NaN."""
    packed_model._model.get_input_embeddings().weight[token] = math.nan


def work(count, kinds):
    prompts, _ = varied_work(count)
    params = [
        SamplingParams(
            max_tokens=6 + index % 9, seed=index, logit_bias=AVOIDED, **kinds[index % len(kinds)]
        )
        for index in range(count)
    ]
    return prompts, params


@pytest.mark.slow
@pytest.mark.covering("own", "others", "speculation", "max_chunk_tokens")
@pytest.mark.parametrize("max_chunk_tokens", [512, 10])
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("others", KINDS)
@pytest.mark.parametrize("own", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nan_logits_of_a_prompt_fail_one_request(
    models, own, others, speculation, max_chunk_tokens
):
    options = {"max_batch_size": 5, "max_chunk_tokens": max_chunk_tokens}
    prompts, params = work(16, KINDS[others])
    expected = token_ids(build(models, speculation, **options).generate(prompts, params))

    llm = build(models, speculation, **options)
    break_token(llm.target.model, BROKEN)
    prompts.insert(3, [1, 2, BROKEN, *[4] * 20])
    params.insert(3, SamplingParams(max_tokens=9, **own))
    outputs = llm.generate(prompts, params)
    failed = outputs.pop(3)
    assert failed.finish_reason is FinishReason.ERROR
    assert isinstance(failed.error, NumericalError)
    assert failed.error.field == "target"
    assert failed.token_ids == []
    assert token_ids(outputs) == expected
    # Later requests use the same cache slots. No NaN values remain in them.
    assert token_ids(llm.generate(*work(16, KINDS[others]))) == expected


def test_nan_logits_during_generation_fail_one_request(models):
    prompts, params = work(16, KINDS["mixed"])
    expected = token_ids(build(models, max_batch_size=5).generate(prompts, params))
    llm = build(models, max_batch_size=5)
    break_token(llm.target.model, BROKEN)
    prompts.insert(3, [1, 2, 3])
    # Generates the broken token as soon as it is allowed.
    params.insert(3, SamplingParams(max_tokens=30, logit_bias={BROKEN: 3.0}, seed=0))
    outputs = llm.generate(prompts, params)
    failed = outputs.pop(3)
    assert isinstance(failed.error, NumericalError)
    assert BROKEN not in failed.token_ids[:-1]
    assert token_ids(outputs) == expected


def test_all_requests_failing_raises(models):
    llm = build(models)
    break_token(llm.target.model, BROKEN)
    with pytest.raises(NumericalError, match="not numbers"):
        llm.generate([[BROKEN], [3, BROKEN]])


def test_a_stream_reports_the_failure(models):
    llm = build(models)
    break_token(llm.target.model, BROKEN)
    last = {
        piece.index: piece
        for piece in llm.stream(
            [[1, BROKEN], [1, 2]], SamplingParams(max_tokens=4, logit_bias=AVOIDED)
        )
    }
    assert last[0].finish_reason is FinishReason.ERROR
    assert isinstance(last[0].error, NumericalError)
    assert last[1].finish_reason is FinishReason.LENGTH


def test_a_cancelled_request_leaves_no_nans_in_the_cache(models):
    """The request is cancelled during its prompt, before its logits are checked."""
    work_after = work(10, [SAMPLED])
    expected = token_ids(build(models, max_batch_size=2).generate(*work_after))
    llm = build(models, max_batch_size=2, max_chunk_tokens=8)
    break_token(llm.target.model, BROKEN)
    request = llm.engine.add(None, [BROKEN] * 30, SamplingParams())
    llm.engine.step()
    llm.engine.cancel(request)
    assert token_ids(llm.generate(*work_after)) == expected


class TestNanDraftModel:
    """A draft model with NaN logits drafts nothing. The outputs do not change."""

    @pytest.mark.parametrize("max_chunk_tokens", [512, 10])
    def test_greedy_texts_are_unchanged(self, models, max_chunk_tokens):
        prompts = [[1, BROKEN, 3], [4, 5], [BROKEN], list(range(25))]
        params = SamplingParams(max_tokens=30, temperature=0)
        expected = token_ids(build(models, False).generate(prompts, params))
        llm = build(models, max_chunk_tokens=max_chunk_tokens)
        break_token(llm.draft.model, BROKEN)
        assert token_ids(llm.generate(prompts, params)) == expected

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["block", "token"])
    def test_sampled_texts_follow_the_target(self, models, method, monkeypatch):
        """The draft model's logits become NaN in the middle of texts and of drafts."""
        case = Case("fixed", method, 3, num_requests=12_000)
        build_engine = Case.engine

        def broken_engine(case, models, max_batch_size=512):
            engine = build_engine(case, models, max_batch_size)
            break_token(engine._pipeline.proposer.cached_model.model, 5)
            return engine

        monkeypatch.setattr(Case, "engine", broken_engine)
        tokens, requests = case.sampled(models)
        sources = [request.output().token_sources for request in requests[:1000]]
        assert {source for each in sources for source in each} == SOURCES_WITH_A_MODEL
        for p_value in case.p_values(models, tokens):
            assert p_value > NOT_UNLIKELY

    def test_later_requests_get_drafts(self, models):
        """NaN values do not remain in the slots of the draft's cache."""
        prompts, params = work(12, [SAMPLED])
        fresh = build(models, max_batch_size=3).generate(prompts, params)
        llm = build(models, max_batch_size=3)
        break_token(llm.draft.model, BROKEN)
        llm.generate([[BROKEN] * 30] * 3, SamplingParams(max_tokens=8, logit_bias=AVOIDED))
        later = llm.generate(prompts, params)
        assert token_ids(later) == token_ids(fresh)
        assert [output.speculation for output in later] == [o.speculation for o in fresh]


BAD_PROMPTS = {
    "empty text": "",
    "empty ids": [],
    "too long": [1] * 64,
    "outside the vocabulary": [1, VOCAB],
    "negative": [1, -1],
    "not an integer": [1, 2.5],
    "a bool": [1, True],
    "not a prompt": 2.5,
    "bytes": b"abc",
    "none": None,
    "text among ids": [1, "a"],
    "messages without content": [{"role": "user"}],
    "messages of numbers": [{"role": "user", "content": "a"}, 5],
    "refused by the template": [{"role": "user", "content": "bad"}],
    "half a surrogate pair": "abc\ud83d",
    "half a surrogate pair in a message": [{"role": "user", "content": "a\ud83d"}],
}
FIELDS = {
    "messages without content": "messages[0]",
    "messages of numbers": "messages[1]",
    "refused by the template": "messages",
}
GOOD_PROMPTS = ["abc", [1, 2, 3], [{"role": "user", "content": "a b"}], "é€😀"]


def test_an_invalid_prompt_does_not_affect_valid_ones(models):
    llm = build(models)
    params = [SamplingParams(max_tokens=5, seed=seed) for seed in range(5)]
    expected = llm.generate(GOOD_PROMPTS, params[:2] + params[3:])
    for kind, bad in BAD_PROMPTS.items():
        prompts = [*GOOD_PROMPTS[:2], bad, *GOOD_PROMPTS[2:]]
        outputs = llm.generate(prompts, params)
        assert isinstance(outputs[2].error, PromptError), kind
        assert outputs[2].error.field == FIELDS.get(kind, "prompt"), kind
        assert outputs[2].finish_reason is FinishReason.ERROR, kind
        assert outputs[2].token_ids == [], kind
        assert [output.error for output in outputs].count(None) == 4, kind
        assert token_ids(outputs[:2] + outputs[3:]) == token_ids(expected), kind
        pieces = list(llm.stream(prompts, params))
        assert [piece.index for piece in pieces if piece.error is not None] == [2], kind
        tokens = [[t for p in pieces if p.index == i for t in p.token_ids] for i in range(5)]
        assert tokens == token_ids(outputs), kind


def test_a_call_with_only_invalid_prompts_raises(models):
    llm = build(models)
    for kind, bad in BAD_PROMPTS.items():
        for prompts in ([bad], [bad, bad]):
            caught = error_of(llm.generate, prompts, error=PromptError)
            assert caught.field == FIELDS.get(kind, "prompt"), kind
        assert llm.engine.num_unfinished == 0, kind


def test_invalid_types_of_prompts_are_refused(models):
    """A single message and bytes are iterable, but are not valid prompts."""
    llm = build(models)
    for prompts in [5, None, b"abc", {"role": "user", "content": "a"}]:
        error_of(
            llm.generate,
            prompts,
            error=PromptError,
            match="must be a string, token ids, messages or a list",
        )
        error_of(next, llm.stream(prompts), error=PromptError)


BAD_PARAMETERS = {
    "logit_bias": SamplingParams(max_tokens=5, logit_bias={VOCAB: 1.0}),
    "stop_token_ids": SamplingParams(max_tokens=5, stop_token_ids=(3, VOCAB)),
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_tokens_outside_the_vocabulary_are_refused(models, name):
    llm = build(models)
    outputs = llm.generate([[1], [2]], [BAD_PARAMETERS[name], SamplingParams(max_tokens=5)])
    assert isinstance(outputs[0].error, InvalidParameterError)
    assert outputs[0].error.field == name
    assert outputs[1].error is None
    with pytest.raises(InvalidParameterError, match="outside the vocabulary of 32"):
        llm.generate([1], BAD_PARAMETERS[name])


def test_stop_strings_need_a_tokenizer(models):
    llm = LLM(models.folder(Recipe()), dtype="float32")
    with pytest.raises(InvalidParameterError, match="use stop_token_ids") as caught:
        llm.generate([1], SamplingParams(stop="a"))
    assert caught.value.field == "stop"
