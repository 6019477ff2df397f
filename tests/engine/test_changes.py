"""Requests with their own speculation settings, and engines whose settings change at run time."""

import pytest

from draftwise import LLM, RequestSpeculation, SamplingParams
from draftwise.errors import InvalidParameterError
from draftwise.policies import POLICIES

from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .assembly import assemble_recipe
from .test_lossless import NOT_UNLIKELY, NUM_REQUESTS_OF_EACH_POLICY, SETTINGS, Case

RECIPE = Recipe(vocab=32, seed=3)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13, 14]]
WITHOUT_MORE = [
    name
    for name, policy in POLICIES.items()
    if not (policy.needs_profile or policy.uses_target_oracle)
]


@pytest.fixture
def engine(models):
    return assemble_recipe(models, RECIPE, 16, policy="sv", num_speculative_tokens=4)


def finish(engine):
    while engine.num_unfinished:
        engine.step()


def test_requests_of_a_batch_use_different_policies(models, engine):
    """Greedy texts in a mixed batch are the target's under every policy."""
    plain = LLM(models.folder(RECIPE), dtype="float32")
    requests = [
        (prompt, engine.add(None, prompt, GREEDY, RequestSpeculation(policy=name)))
        for name in WITHOUT_MORE
        for prompt in PROMPTS[:2]
    ]
    finish(engine)
    for prompt, request in requests:
        assert request.output().token_ids == plain.generate([prompt], GREEDY)[0].token_ids
    drafted = [request.stats.num_drafted for _, request in requests]
    assert drafted[2 * WITHOUT_MORE.index("none")] == 0
    assert drafted[2 * WITHOUT_MORE.index("fixed")] > 0


@pytest.mark.slow
def test_a_mixed_batch_is_lossless(models):
    names = ("fixed", "tetris", "staged", "svip")
    case = Case("sv", "block", 3, num_requests=NUM_REQUESTS_OF_EACH_POLICY)
    engine = case.engine(models)
    add = engine.add

    def add_with_policy(prompt, ids, params):
        # Settings alternate. Policies alternate too, shifted by one in each round.
        turn = (params.seed + params.seed // len(SETTINGS)) % len(names)
        return add(prompt, ids, params, RequestSpeculation(policy=names[turn]))

    engine.add = add_with_policy
    tokens, requests = case.said_by(engine)
    assert all(request.stats.lossless for request in requests)
    assert min(case.p_values(models, tokens)) > NOT_UNLIKELY


def test_a_request_limits_its_draft_length(engine):
    params = SamplingParams(max_tokens=30, temperature=0)
    settings = [
        RequestSpeculation(policy="fixed", enabled=False),
        RequestSpeculation(policy="fixed", num_speculative_tokens=1),
        RequestSpeculation(policy="fixed"),
    ]
    requests = [engine.add(None, [1, 2], params, way) for way in settings]
    finish(engine)
    longest = [r.stats.num_drafted / r.stats.num_steps for r in requests]
    assert longest[0] == 0
    assert 0 < longest[1] <= 1 < longest[2] <= 4


def test_a_request_cannot_draft_more_than_the_engine(engine):
    longer = RequestSpeculation(policy="fixed", num_speculative_tokens=5)
    params = SamplingParams(max_tokens=60, temperature=0)
    with pytest.raises(InvalidParameterError, match="at most the engine's, 4, got 5") as caught:
        engine.add(None, [1, 2], params, longer)
    assert caught.value.field == "speculation.num_speculative_tokens"
    engine.change_speculation(num_speculative_tokens=5)
    request = engine.add(None, [1, 2], params, longer)
    for _ in range(6):  # the first one reads the prompt
        engine.step()
    assert request.stats.num_drafted == 25


def test_a_request_sets_its_lenience(engine):
    params = SamplingParams(max_tokens=12, seed=1)
    requests = [
        engine.add(None, [1, 2], params, RequestSpeculation(policy="fixed", lenience=value))
        for value in (None, 0.6, 1.0)
    ]
    finish(engine)
    assert [request.stats.lossless for request in requests] == [True, False, True]


def test_a_biased_policy_reports_that_it_is_not_lossless(engine):
    settings = RequestSpeculation(policy="tetris-published")
    sampled = engine.add(None, [1, 2], SamplingParams(max_tokens=5, seed=1), settings)
    greedy = engine.add(None, [1, 2], GREEDY, settings)
    finish(engine)
    assert not sampled.stats.lossless
    assert greedy.stats.lossless


def test_an_unavailable_policy_fails_only_its_request(models):
    llm = LLM(
        models.folder(RECIPE),
        unguarded(models.folder(RECIPE.draft()), policy="fixed"),
        dtype="float32",
    )
    settings = [
        RequestSpeculation(policy=name)
        for name in ("fixed", "sv", "staged", "disco", "oracle", "nothing like it", "svip")
    ]
    outputs = llm.generate([[1, 2]] * len(settings), GREEDY, speculation=settings)
    fields = [None if o.error is None else o.error.field for o in outputs]
    assert fields == [*(None, "latency_profile", "companion", "profile", "policy", "policy", None)]


class TestChangingWhileItRuns:
    def test_policy_and_draft_length_change(self, engine):
        request = engine.add(None, [1, 2], SamplingParams(max_tokens=60, temperature=0))
        engine.step()
        engine.change_speculation(policy="fixed", num_speculative_tokens=2)
        for _ in range(5):
            engine.step()
        assert request.stats.num_drafted == 10
        now = engine.change_speculation(policy="none")
        assert (now.policy_name, now.num_speculative_tokens) == ("none", 2)
        drafted = request.stats.num_drafted
        for _ in range(5):
            engine.step()
        assert request.stats.num_drafted == drafted
        engine.change_speculation(policy="fixed", num_speculative_tokens=6)
        engine.step()
        assert request.stats.num_drafted == drafted + 6
        finish(engine)

    def test_greedy_text_is_unchanged(self, models, engine):
        plain = LLM(models.folder(RECIPE), dtype="float32")
        params = SamplingParams(max_tokens=40, temperature=0)
        requests = [engine.add(None, prompt, params) for prompt in PROMPTS]
        names = [name for name in WITHOUT_MORE if name != "sv"]
        while engine.num_unfinished:
            engine.change_speculation(policy=names[0], num_speculative_tokens=1 + len(names) % 5)
            names = names[1:] + names[:1]
            engine.step()
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert request.output().token_ids == plain.generate([prompt], params)[0].token_ids

    def test_lenience_changes(self, engine):
        request = engine.add(None, [1, 2], SamplingParams(max_tokens=30, seed=1))
        engine.step()
        assert request.stats.lossless
        engine.change_speculation(lenience={0: 0.7})
        engine.step()
        assert not request.stats.lossless

    def test_invalid_changes_are_refused(self, engine):
        for changes, field in [
            ({"policy": "nothing like it"}, "policy"),
            ({"policy": "oracle"}, "policy"),
            ({"policy": "disco"}, "profile"),
            ({"policy": "svip", "policy_options": {"threshold": -1}}, "policy_options.threshold"),
            ({"num_speculative_tokens": 1000}, "num_speculative_tokens"),
            ({"lenience": 0}, "lenience"),
            ({"draft": "another"}, "speculation.draft"),
        ]:
            before = engine.policies.default
            caught = error_of(engine.change_speculation, **changes, error=InvalidParameterError)
            assert caught.field == field
            assert engine.policies.default is before

    def test_change_by_the_llm(self, models):
        config = unguarded(models.folder(RECIPE.draft()), policy="fixed")
        llm = LLM(models.folder(RECIPE), config, dtype="float32")
        expected = llm.generate([1, 2], GREEDY)[0].token_ids
        llm.change_speculation(policy="none")
        (output,) = llm.generate([1, 2], GREEDY)
        assert output.token_ids == expected
        assert output.speculation.num_drafted == 0
        assert llm.speculation.policy == "none"


def test_invalid_request_speculation_names_the_field():
    for values, field in [
        ({"enabled": 1}, "enabled"),
        ({"policy": ""}, "policy"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"lenience": 0.0}, "lenience"),
        ({"lenience": 1.5}, "lenience"),
        ({"gamma": 3}, "speculation.gamma"),
    ]:
        caught = error_of(RequestSpeculation.from_dict, values, error=InvalidParameterError)
        assert caught.field == field


def test_models_missing_at_the_start_stay_missing(models):
    """An engine that drafts nothing has no cache for a draft, even if a draft model is loaded."""
    engine = assemble_recipe(models, RECIPE, 4, policy="none")
    with pytest.raises(InvalidParameterError) as caught:
        engine.add(None, [1, 2], GREEDY, RequestSpeculation(policy="fixed"))
    assert caught.value.field == "draft"
    engine = assemble_recipe(models, RECIPE, 4, policy="fixed")
    with pytest.raises(InvalidParameterError) as caught:
        engine.change_speculation(policy="staged")
    assert caught.value.field == "companion"


def test_scored_tokens_are_counted(engine):
    params = SamplingParams(max_tokens=40, seed=1)
    settings = (RequestSpeculation(policy="staged"), RequestSpeculation(policy="none"))
    scored, plain = [engine.add(None, [1, 2], params, way) for way in settings]
    finish(engine)
    assert scored.stats.num_scored == scored.stats.num_drafted > 0
    assert plain.stats.num_scored == 0
