"""Outputs with a grammar have exactly the distribution of the masked target."""

import collections
import functools
import itertools
import json
from dataclasses import replace

import pytest
import torch

from draftwise import LLM, SamplingParams, StructuredOutputs
from draftwise.engine import acceptance, companion
from draftwise.engine.parallel.pinned_threads import shares
from draftwise.errors import InvalidParameterError, NumericalError
from draftwise.outputs import FinishReason, TokenSource
from draftwise.policies.step_times import SCORED
from draftwise.values import MAX_NESTING

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..stand_ins import SOURCES_WITH_A_MODEL, unguarded, vary_choices
from ..tiny_models import Recipe
from .assembly import assemble_recipe, generate
from .exact import exact_distribution
from .grammars import CHOICE, END, LETTERS, RECIPE, TOKENIZER
from .test_failures import break_token
from .test_lossless import IMPOSSIBLE, NOT_UNLIKELY

PLAIN = SamplingParams(max_tokens=8)
COLD = SamplingParams(max_tokens=8, temperature=0.7, top_k=4)
BIASED = SamplingParams(
    max_tokens=8, top_p=0.95, repetition_penalty=1.2, logit_bias={11: 1.0, 20: 1.5, END: -0.5}
)
CUT = SamplingParams(max_tokens=2, temperature=1.4, min_p=0.02)
# All settings share every batch, including one without a grammar.
SETTINGS = (
    ([3, 4, 5], PLAIN, LETTERS),
    ([7], COLD, LETTERS),
    ([9, 2, 9, 4], BIASED, CHOICE),
    ([6, 6], CUT, LETTERS),
    ([5, 8], SamplingParams(max_tokens=2, ignore_eos=True), None),
)


def asked(number):
    """Prompt and parameters of a request."""
    prompt, params, grammar = SETTINGS[number % len(SETTINGS)]
    structure = None if grammar is None else grammar.asked
    return prompt, replace(params, seed=number, structured_outputs=structure)


def sampled(models, policy, num_requests, max_batch_size, **speculation):
    """Outputs of requests of all settings in turn."""
    engine = assemble_recipe(
        models,
        RECIPE,
        max_batch_size,
        0.3,
        policy=policy,
        **{"num_speculative_tokens": 3, **speculation},
    )
    prompts, params = zip(*map(asked, range(num_requests)), strict=True)
    outputs = generate(engine, prompts, params)
    engine.close()
    assert all(output.finish_reason is not FinishReason.ERROR for output in outputs)
    return outputs


@pytest.fixture(scope="module")
def laws(models):
    """The probability of every text, for each setting."""
    model = models.reference(RECIPE)
    return [
        None if grammar is None else grammar.law(model, prompt, params)
        for prompt, params, grammar in SETTINGS
    ]


def p_values(models, outputs, laws):
    for number, law in enumerate(laws):
        said = [tuple(output.token_ids) for output in outputs[number :: len(SETTINGS)]]
        if law is None:
            prompt, params, _ = SETTINGS[number]
            expected = exact_distribution(models.reference(RECIPE), prompt, params, 2).joint()
            yield chi_square_p_value(sequence_counts(torch.tensor(said), RECIPE.vocab), expected)
            continue
        counts = collections.Counter(said)
        assert counts.keys() <= law.keys()
        yield chi_square_p_value([counts[text] for text in law], list(law.values()))


CASES = [("fixed", "block", 3, False), ("staged", "token", 2, False), ("sv", "block", 3, True)]
CASES += [
    pytest.param(*case, marks=pytest.mark.exhaustive)
    for case in (
        ("none", "block", 0, False),
        ("fixed", "token", 2, False),
        ("svip", "block", 3, False),
        ("sv", "block", 3, False),
        ("sv", "token", 2, False),
        ("adaptive", "block", 3, False),
        ("tetris", "block", 3, False),
        ("staged", "block", 3, False),
        ("fixed", "block", 3, True),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "method", "gamma", "overlaps"), CASES)
def test_texts_follow_the_masked_target(models, laws, policy, method, gamma, overlaps, monkeypatch):
    # Drafts that are scored, and filtered by several prices.
    vary_choices(monkeypatch, [SCORED + gamma, gamma, SCORED + gamma], [0.3, 0.6])
    if overlaps and shares() is None:
        pytest.skip("the machine has a single core")
    outputs = sampled(
        models,
        policy,
        6_000,
        256,
        num_speculative_tokens=gamma,
        verification=method,
        overlaps=overlaps,
    )
    if policy != "none":
        bound = [output for number, output in enumerate(outputs) if SETTINGS[number % 5][2]]
        sources = {source for output in bound for source in output.token_sources}
        # Few texts continue after a fully accepted draft of three tokens.
        assert sources | {TokenSource.BONUS} == SOURCES_WITH_A_MODEL
        assert TokenSource.BONUS in sources or gamma == 3
        if policy in ("sv", "staged"):
            assert any(output.speculation.num_scored for output in bound)
        if policy in ("sv", "tetris"):
            stats = [output.speculation for output in bound]
            assert sum(each.num_verified for each in stats) < sum(
                each.num_drafted for each in stats
            )
    assert all(output.speculation.lossless for output in outputs)
    for p_value in p_values(models, outputs, laws):
        assert p_value > NOT_UNLIKELY


@pytest.mark.slow
@pytest.mark.covering("policy", "max_batch_size")
@pytest.mark.parametrize(("max_batch_size", "num_requests"), [(1, 1200), (16, 3000)])
@pytest.mark.parametrize("policy", ["fixed", "sv", "tetris", "staged"])
def test_texts_follow_the_masked_target_in_smaller_batches(
    models, laws, policy, max_batch_size, num_requests
):
    outputs = sampled(models, policy, num_requests, max_batch_size)
    for p_value in p_values(models, outputs, laws):
        assert p_value > NOT_UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed", "staged"])
def test_texts_follow_the_masked_target_without_native_kernels(models, laws, monkeypatch, policy):
    monkeypatch.setattr(acceptance, "library_for", lambda _: None)
    monkeypatch.setattr(companion, "library_for", lambda _: None)
    outputs = sampled(models, policy, 5000, 256)
    for p_value in p_values(models, outputs, laws):
        assert p_value > NOT_UNLIKELY


@pytest.mark.slow
def test_another_distribution_is_detected(models, laws):
    """The target's law conditioned on the whole text matching the grammar is different."""
    model = models.reference(RECIPE)
    prompt, params, grammar = SETTINGS[0]
    given = {}
    with torch.no_grad():
        for text in laws[0]:
            # No token follows a text that is complete.
            ids = torch.tensor([[*prompt, *text]])
            logp = model(input_ids=ids).logits[0].log_softmax(dim=-1)
            at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
            given[text] = float(logp[at, torch.tensor(text)].sum().exp())
    whole = sum(given.values())
    wrong = [{text: p / whole for text, p in given.items()}, *[None] * 4]
    outputs = sampled(models, "fixed", 10_000, 256)
    assert next(p_values(models, outputs, wrong)) < IMPOSSIBLE
    assert params is PLAIN
    assert grammar is LETTERS


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["svip", "staged"])
def test_requests_without_a_grammar_are_not_affected(models, policy):
    def free(number):
        prompt = [(number * 5 + i * 3) % 16 for i in range(1 + number % 7)]
        return prompt, SamplingParams(
            max_tokens=3 + number % 9, seed=number, temperature=float(number % 4 > 0)
        )

    engine = functools.partial(
        assemble_recipe, models, RECIPE, 9, policy=policy, num_speculative_tokens=3
    )
    alone = generate(engine(), *zip(*map(free, range(90)), strict=True))
    mixed = [each for number in range(90) for each in (free(number), asked(number - number % 5))]
    beside = generate(engine(), *zip(*mixed, strict=True))[::2]
    assert [output.token_ids for output in beside] == [output.token_ids for output in alone]


def json_schema(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["svip", "sv", "staged", "tetris"])
def test_greedy_texts_are_those_of_the_target_alone(models, policy):
    grammars = itertools.cycle(
        [
            StructuredOutputs(regex="([a-h]{2,5}[., ]){1,4}"),
            StructuredOutputs(choice=("abc", "bad", "cabbage", "ha", "haha")),
            StructuredOutputs(grammar='start: x+ "."\nx: "a" x "b" | "c" | "é"'),
            None,
        ]
    )
    prompts = [[(index * 7 + i) % 30 for i in range(1 + index % 5)] for index in range(48)]
    params = [
        SamplingParams(
            18,
            0.0,
            structured_outputs=grammar,
            presence_penalty=0.4 * (index % 3),
            ignore_eos=grammar is None,
        )
        for index, grammar in zip(range(48), grammars, strict=False)
    ]
    alone = generate(assemble_recipe(models, RECIPE, 7, policy="none"), prompts, params)
    engine = assemble_recipe(models, RECIPE, 7, 0.3, policy=policy, num_speculative_tokens=4)
    outputs = generate(engine, prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert [output.text for output in outputs] == [output.text for output in alone]
    assert any(output.speculation.num_accepted for output in outputs)
    reasons = {output.finish_reason for output in outputs}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def build(models, policy="fixed", draft_noise=0.3, recipe=RECIPE, **options):
    speculation = unguarded(
        models.folder(recipe.draft(draft_noise)), num_speculative_tokens=4, policy=policy
    )
    return LLM(models.folder(recipe), speculation, dtype="float32", **options)


def test_a_complete_text_ends_immediately(models):
    """No step is needed for the forced end, also if the draft continued after it."""
    llm = build(models, max_batch_size=4)
    grammar = StructuredOutputs(regex="[ab][gh]")
    outputs = llm.generate(
        [[index % 30] for index in range(40)],
        [SamplingParams(9, seed=index, structured_outputs=grammar) for index in range(40)],
    )
    for output in outputs:
        assert output.finish_reason is FinishReason.STOP
        assert len(output.text) == len(output.token_ids) == 2
    # The last of max_tokens completes the grammar, so the text is not cut off.
    exact = llm.generate([[3]], SamplingParams(2, structured_outputs=grammar))[0]
    assert exact.finish_reason is FinishReason.STOP


def test_the_end_token_ends_a_text_that_could_continue(models):
    llm = build(models, max_batch_size=8)
    grammar = StructuredOutputs(regex="[a-h]*")
    params = [SamplingParams(60, seed=index, structured_outputs=grammar) for index in range(40)]
    outputs = llm.generate([[index % 30] for index in range(40)], params)
    ended = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert ended
    for output in outputs:
        assert set(output.text) <= set("abcdefgh")
        assert (output.token_ids[-1] == END) == (output.finish_reason is FinishReason.STOP)
        assert END not in output.token_ids[:-1]


def test_a_stop_string_ends_a_text_before_the_grammar_is_complete(models):
    llm = build(models, draft_noise=0.0, max_batch_size=4)
    grammar = StructuredOutputs(regex="[a-h]{12}")
    params = [
        SamplingParams(20, seed=index, stop="e", structured_outputs=grammar) for index in range(30)
    ]
    outputs = llm.generate([[index % 30] for index in range(30)], params)
    stopped = [output for output in outputs if len(output.text) < 12]
    assert stopped
    assert all(output.finish_reason is FinishReason.STOP for output in outputs)
    assert all("e" not in output.text for output in outputs)
    assert any(output.token_sources[-1] is TokenSource.DRAFT for output in stopped)


def test_padding_tokens_are_never_generated(models):
    """The model's vocabulary is wider than its tokenizer's. Padding has a high bias."""
    llm = build(models, max_batch_size=4)
    padding = {len(TOKENIZER): 100.0, len(TOKENIZER) + 1: 100.0}
    grammar = StructuredOutputs(regex="(.|\n){8}")
    params = SamplingParams(30, logit_bias=padding, structured_outputs=grammar)
    outputs = llm.generate([[index] for index in range(8)], params)
    assert all(token < len(TOKENIZER) for output in outputs for token in output.token_ids)
    free = llm.generate([[1]], replace(params, structured_outputs=None))[0]
    assert set(free.token_ids) <= set(padding)


def test_a_draft_whose_vocabulary_has_no_allowed_token(models):
    """Its embedding does not contain the only letters that are allowed."""
    target = Recipe(vocab=RECIPE.vocab, seed=4, tokenizer=True, config=RECIPE.config)
    draft = Recipe(vocab=20, seed=4, tokenizer=True, config=RECIPE.config)
    speculation = unguarded(models.folder(draft), num_speculative_tokens=3, policy="fixed")
    llm = LLM(models.folder(target), speculation, dtype="float32", max_batch_size=4)
    assert min(TOKENIZER(" \n")["input_ids"]) >= draft.vocab
    grammar = StructuredOutputs(choice=("\n \n", "\n  ", " \n ", "  \n"))
    for temperature in (0.0, 1.0):
        params = SamplingParams(9, temperature, structured_outputs=grammar)
        outputs = llm.generate([[1], [2], [3]], params)
        for output in outputs:
            assert output.text in grammar.choice


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_fail_one_request(models, temperature):
    broken = 8
    llm = build(models, max_batch_size=4)
    grammar = StructuredOutputs(regex="[a-c]{4}")
    fine = SamplingParams(
        8, temperature, seed=1, structured_outputs=grammar, logit_bias={broken: -100.0}
    )
    expected = llm.generate([[3], [4]], fine)
    break_token(llm.target.model, broken)
    outputs = llm.generate([[3], [5, broken], [4]], fine)
    failed = outputs.pop(1)
    assert failed.finish_reason is FinishReason.ERROR
    assert isinstance(failed.error, NumericalError)
    assert failed.token_ids == []
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    # NaN logits during generation: the grammar forces the broken token.
    name = TOKENIZER.decode([broken])
    through = StructuredOutputs(choice=(f"hg{name}hghghg",))
    middle = llm.generate([[3], [4]], [replace(fine, structured_outputs=through), fine])
    assert isinstance(middle[0].error, NumericalError)
    assert middle[0].token_ids
    assert middle[1].token_ids == expected[1].token_ids


def test_minus_infinity_for_all_allowed_tokens_fails_the_request(models, monkeypatch):
    """The logits are not NaN, but minus infinity for every allowed token."""
    llm = build(models, max_batch_size=4)
    forward = llm.target.model.forward

    def one_sided(*args):
        logits = forward(*args)
        return (
            None
            if logits is None
            else logits.index_fill(1, torch.tensor(TOKENIZER("hg")["input_ids"]), -torch.inf)
        )

    monkeypatch.setattr(llm.target.model, "forward", one_sided)
    grammar = StructuredOutputs(choice=("hg", "gh"))
    for temperature in (0.0, 1.0):
        params = SamplingParams(6, temperature, seed=2, presence_penalty=0.5)
        bound = replace(params, structured_outputs=grammar)
        outputs = llm.generate([[3], [4], [5]], [params, bound, params])
        assert isinstance(outputs[1].error, NumericalError)
        assert outputs[0].token_ids
        assert outputs[2].token_ids


def test_an_invalid_grammar_is_refused_before_the_request_is_queued(models):
    llm = build(models, max_batch_size=4)
    bad = SamplingParams(6, structured_outputs=StructuredOutputs(regex="a("))
    with pytest.raises(InvalidParameterError) as caught:
        llm.engine.add(None, [1], bad)
    assert caught.value.field == "structured_outputs.regex"
    assert llm.engine.num_unfinished == 0
    outputs = llm.generate([[1], [2]], [bad, SamplingParams(6)])
    assert outputs[0].error.field == "structured_outputs.regex"
    assert outputs[1].error is None


def test_a_target_without_a_tokenizer_is_refused(models):
    llm = build(models, recipe=Recipe(vocab=16, config={"eos_token_id": 1}))
    with pytest.raises(InvalidParameterError, match="no tokenizer"):
        llm.generate([[1]], SamplingParams(4, structured_outputs=StructuredOutputs(regex="a")))


def test_a_grammar_that_the_tokens_cannot_spell_fails_the_request(models):
    llm = build(models, max_batch_size=4)
    grammar = StructuredOutputs(choice=("hgz",))
    outputs = llm.generate([[1], [2]], [SamplingParams(6, structured_outputs=grammar), PLAIN])
    assert outputs[0].error.field == "structured_outputs.choice"
    assert outputs[1].error is None


@pytest.mark.slow
def test_replicas_draft_nothing_for_requests_with_a_grammar(models, laws):
    """Other requests get drafts."""
    speculation = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
    llm = LLM(
        models.folder(RECIPE), speculation, dtype="float32", max_batch_size=32, draft_replicas=2
    )
    try:
        prompts, params = zip(*map(asked, range(2000)), strict=True)
        longer = [SamplingParams(12, ignore_eos=True)] * 8  # long enough to get drafts
        outputs = llm.generate([*prompts, *[[2, 3]] * 8], [*params, *longer])
    finally:
        llm.close()
    free = [outputs.pop() for _ in range(8)]
    assert all(output.speculation.num_drafted for output in free)
    for number, output in enumerate(outputs):
        assert SETTINGS[number % 5][2] is None or not output.speculation.num_drafted
    for p_value in p_values(models, outputs, laws):
        assert p_value > NOT_UNLIKELY


@pytest.mark.slow
def test_bundled_models_generate_valid_json():
    llm = LLM(
        "zoo:target",
        unguarded("zoo:draft", num_speculative_tokens=4, policy="fixed"),
        dtype="float32",
        max_batch_size=8,
    )
    schema = json_schema(
        name={"type": "string", "maxLength": 12},
        kind={"enum": ["cat", "dog", "Käfer"]},
        age={"type": "integer", "minimum": 0, "maximum": 30},
        tags={"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    )
    prompts = [f"Question: Describe animal {n} as JSON.\nAnswer:" for n in range(24)]
    params = [
        SamplingParams(160, 1.0, seed=n, structured_outputs=StructuredOutputs(json_schema=schema))
        for n in range(24)
    ]
    outputs = llm.generate(prompts, params)
    assert sum(output.speculation.num_accepted for output in outputs)
    for output in outputs:
        assert output.finish_reason is FinishReason.STOP
        value = json.loads(output.text)
        assert list(value) == ["name", "kind", "age", "tags"]
        assert len(value["name"]) <= 12
        assert value["kind"] in ("cat", "dog", "Käfer")
        assert isinstance(value["age"], int)
        assert 0 <= value["age"] <= 30
        assert all(isinstance(each, bool) for each in value["tags"])
        assert len(value["tags"]) <= 3
    free = llm.generate(
        prompts[:4],
        SamplingParams(300, 0.7, seed=1, structured_outputs=StructuredOutputs(json_object=True)),
    )
    for output in free:
        assert output.text.lstrip().startswith("{")
        if output.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(output.text), dict)


def test_schemas_of_the_maximum_depth_are_supported(models):
    """Deeper schemas are refused before they are parsed."""
    lists = {}
    constant = 1
    for _ in range(MAX_NESTING - 1):
        lists = {"type": "array", "items": lists}
        constant = [constant]
    llm = build(models, max_batch_size=4)
    for schema in (lists, {"const": constant}):
        grammar = StructuredOutputs(json_schema=schema)
        request = llm.engine.add(None, [1], SamplingParams(4, structured_outputs=grammar))
        assert request.matcher.error is None
        llm.engine.cancel(request)
