"""A proposer in one class is lossless at every batch size and temperature."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwise import SamplingParams
from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import StepTimes
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.proposers import PROPOSERS, TokenProposer, register
from draftwise.engine.proposers.by_name import draft_model_name
from draftwise.engine.proposers.hybrid import HybridProposer
from draftwise.engine.step import Stopwatch
from draftwise.errors import EngineError, InvalidParameterError
from draftwise.models.loading import load_model
from draftwise.outputs import TokenSource
from draftwise.policies import POLICIES, policy_class
from draftwise.policies.router import PolicyRouter
from draftwise.speculation import RequestSpeculation

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..levels import exhaustive_unless
from ..stand_ins import fixed_latency, profile, unguarded
from ..tiny_models import Recipe
from .assembly import generate, token_ids, varied_work
from .exact import exact_distribution

RECIPE = Recipe(vocab=8, seed=3, config={"num_hidden_layers": 1})
VARIED = Recipe(vocab=16, seed=6)
NOT_UNLIKELY = 1e-4


class LastTokens(TokenProposer):
    """Proposes the last three tokens again."""

    name = "last-tokens"
    summary = "proposes the last three tokens again"

    def continuation(self, request, max_tokens):
        return request.tokens[-3:]


@pytest.fixture(autouse=True)
def registered():
    register(LastTokens)
    yield
    del PROPOSERS[LastTokens.name]


def build(
    models, recipe, policy, max_batch_size, draft=LastTokens.name, companion=True, **speculation
):
    """An engine without a draft model. Policies that price tokens get synthetic costs."""
    made = policy_class(policy)
    target = load_model(models.folder(recipe), "target", torch.float32, torch.device("cpu"), None)
    scorer = None
    if made.uses_companion() and companion:
        folder = models.folder(recipe.draft(noise=0.2, noise_seed=2))
        scorer = load_model(folder, "companion", torch.float32, torch.device("cpu"), None)
    return Engine(
        Models(target, None, scorer),
        unguarded(draft, policy=policy, num_speculative_tokens=3, **speculation),
        EngineOptions(max_batch_size),
        fixed_latency() if made.needs_latency else None,
        profile() if made.needs_profile else None,
    )


def test_the_policy_knows_the_cost_of_the_proposer(models):
    """Of a user's own proposer, in the default policy and in those that requests name."""
    costly = StageCost((1.0, 64.0), (0.5, 0.5))

    class Costly(LastTokens):
        name = "costly"

        @classmethod
        def cost_model(cls, latency):
            return LatencyModel(latency.target, costly)

    register(Costly)
    try:
        engine = build(models, Recipe(), "adaptive", 2, draft="costly")
    finally:
        del PROPOSERS["costly"]
    for name in (None, "adaptive", "smartspec"):
        policy = engine.policies.get(name)
        draft = policy._latency.draft if name == "smartspec" else policy.guard.draft
        assert draft(1) == pytest.approx(0.5)


LOSSLESS = [
    name
    for name, policy in POLICIES.items()
    if policy.lossless and policy.needs_draft and not policy.uses_target_oracle
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", exhaustive_unless(lambda name: name in ("fixed", "adaptive", "sv"), LOSSLESS)
)
def test_texts_follow_the_target_with_every_policy(models, policy):
    engine = build(models, RECIPE, policy, 64)
    check_law(models, engine, SamplingParams(max_tokens=3))


@pytest.mark.parametrize("policy", ["sv", "sv-predictable"])
def test_a_companion_that_would_score_nothing_is_refused(models, policy):
    with pytest.raises(InvalidParameterError, match="there is no draft model") as caught:
        build(models, RECIPE, policy, 4, draft="suffix")
    assert caught.value.field == "companion"


@pytest.mark.covering("method", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 3])
@pytest.mark.parametrize("method", ["block", "token"])
def test_texts_follow_the_target_at_small_batches(models, max_batch_size, method):
    engine = build(models, RECIPE, "fixed", max_batch_size, verification=method)
    check_law(models, engine, SamplingParams(max_tokens=3), count=1500)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=3, temperature=0.5),
        SamplingParams(max_tokens=3, temperature=1.5, top_p=0.9),
        SamplingParams(max_tokens=3, top_k=4, min_p=0.05),
        SamplingParams(max_tokens=3, repetition_penalty=1.3, presence_penalty=0.4),
    ],
    ids=["cold", "hot", "filtered", "penalised"],
)
def test_texts_follow_the_target_with_every_control(models, params):
    check_law(models, build(models, RECIPE, "fixed", 64), params)


def check_law(models, engine, params, count=6000, policies=(None,)):
    """Compare the texts of requests, whose policies take turns, with the target's distribution."""
    prompt = [1, 2, 3]
    requests = [
        engine.add(
            None,
            prompt,
            SamplingParams(**{**vars(params), "seed": seed}),
            RequestSpeculation(policy=policies[seed % len(policies)]),
        )
        for seed in range(count)
    ]
    while engine.num_unfinished:
        engine.step()
    outputs = [request.output() for request in requests]
    expected = exact_distribution(models.reference(RECIPE), prompt, params, 3)
    counts = sequence_counts(torch.tensor(token_ids(outputs)), RECIPE.vocab)
    assert chi_square_p_value(counts, expected.joint()) > NOT_UNLIKELY
    assert sum(output.speculation.num_drafted for output in outputs) > 0
    assert all(output.speculation.lossless for output in outputs)


@pytest.mark.parametrize("max_batch_size", [1, 16])
def test_greedy_texts_are_the_targets(models, max_batch_size):
    prompts, _ = varied_work(30)
    params = [SamplingParams(max_tokens=12, temperature=0)] * len(prompts)
    expected = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
    outputs = generate(build(models, VARIED, "fixed", max_batch_size), prompts, params)
    assert token_ids(outputs) == token_ids(expected)
    assert sum(output.speculation.num_accepted for output in outputs) > 0


def test_drafts_end_before_forbidden_tokens(models):
    """A token beyond the vocabulary, or an end token before ``min_tokens``."""

    class Odd(TokenProposer):
        name, summary = "odd", "proposes a token that does not exist"

        def continuation(self, request, max_tokens):
            return [1, 99]

    register(Odd)
    try:
        engine = build(models, RECIPE, "fixed", 4, draft="odd")
        (output,) = generate(engine, [[1, 2]], [SamplingParams(max_tokens=8, seed=0)])
    finally:
        del PROPOSERS["odd"]
    assert output.error is None
    assert 0 < output.speculation.num_drafted <= output.speculation.num_steps


class TestLifecycle:
    class Recorder(LastTokens):
        """Records its calls."""

        def __init__(self, context):
            super().__init__(context)
            self.texts, self.ended = {}, []

        def admit(self, request):
            assert request.request_id not in self.texts
            self.texts[request.request_id] = list(request.tokens)

        def commit(self, commit):
            for request, start in zip(commit.requests, commit.starts, strict=True):
                text = self.texts[request.request_id]
                assert len(text) == start
                text.extend(request.tokens[start:])

        def retire(self, request):
            self.ended.append(request.request_id)
            assert self.texts.pop(request.request_id) == request.tokens

    def build(self, models, max_batch_size=4):
        PROPOSERS[LastTokens.name] = self.Recorder
        return build(models, VARIED, "fixed", max_batch_size)

    def test_proposers_see_every_token_until_the_end(self, models):
        engine = self.build(models)
        generate(engine, *varied_work(20))
        proposer = engine._pipeline.proposer
        assert sorted(proposer.ended) == list(range(20))
        assert not proposer.texts

    def test_requests_retire_after_cancellation_and_failure(self, models, monkeypatch):
        engine = self.build(models)
        requests = [engine.add(None, [1, 2], SamplingParams(max_tokens=30)) for _ in range(6)]
        for _ in range(3):
            engine.step()
        engine.cancel(requests[0])
        monkeypatch.setattr(engine._verifier, "verify", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
        proposer = engine._pipeline.proposer
        assert not proposer.texts
        assert all(isinstance(request.error, EngineError) for request in requests[1:])


class Sure(LastTokens):
    """Proposes the last tokens again, and says how likely they are accepted."""

    name = "sure"
    estimates_acceptance = True

    def proposals(self, batch, limits):
        made = super().proposals(batch, limits)
        # High and low estimates, so that priced policies use both sources in one batch.
        is_even = np.array([request.tokens[-1] % 2 == 0 for request in batch.generating])
        return made._replace(
            acceptance=np.where(is_even[:, None], 0.999, 0.05) * np.ones_like(made.acceptance)
        )


class TestHybrid:
    """A draft model, and a proposer that knows its tokens before anything is drafted."""

    @pytest.fixture(autouse=True)
    def registered(self):
        register(Sure)
        yield
        del PROPOSERS[Sure.name]

    def engine(self, models, policy="fixed", max_batch_size=6, recipe=RECIPE, **settings):
        made = policy_class(policy)
        recipes = {"target": recipe, "draft": recipe.draft()}
        if made.uses_companion():
            recipes["companion"] = recipe.draft(noise=0.2, noise_seed=2)
        loaded = {
            role: load_model(models.folder(each), role, torch.float32, torch.device("cpu"), None)
            for role, each in recipes.items()
        }
        return Engine(
            Models(**loaded),
            unguarded(
                [Sure.name, models.folder(recipe.draft())],
                policy=policy,
                num_speculative_tokens=3,
                **settings,
            ),
            max_batch_size
            if isinstance(max_batch_size, EngineOptions)
            else EngineOptions(max_batch_size),
            fixed_latency() if made.needs_latency else None,
            profile() if made.needs_profile else None,
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "policy",
        exhaustive_unless(
            lambda name: name in ("fixed", "svip", "adaptive", "tetris", "sv", "staged"), LOSSLESS
        ),
    )
    def test_texts_follow_the_target(self, models, policy):
        check_law(models, self.engine(models, policy, 64), SamplingParams(max_tokens=3))

    @pytest.mark.slow
    @pytest.mark.parametrize("other", ["svip", "none", "staged"])
    def test_texts_follow_the_target_with_several_policies(self, models, other):
        engine = self.engine(models, "sv" if other == "staged" else "adaptive", 64)
        check_law(models, engine, SamplingParams(max_tokens=3), policies=(None, "fixed", other))

    @pytest.mark.slow
    @pytest.mark.covering("params", "max_batch_size")
    @pytest.mark.parametrize("max_batch_size", [1, 16])
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(max_tokens=3, temperature=1.5, top_p=0.9),
            SamplingParams(max_tokens=3, repetition_penalty=1.3, presence_penalty=0.4),
        ],
        ids=["filtered", "penalised"],
    )
    def test_texts_follow_the_target_with_controls(self, models, params, max_batch_size):
        engine = self.engine(models, "adaptive", max_batch_size)
        check_law(models, engine, params, 2000)

    @pytest.mark.slow
    def test_a_choice_after_the_draw_is_biased(self, models, monkeypatch):
        """Using the offer only where the model's drawn token differs from it."""
        draw = HybridProposer._joined

        def chosen_late(self, batch, policy, draft, made, copied):
            differs = [
                bool(n) and draft.host_tokens[row][0] != made.tokens[row, 0]
                for row, n in enumerate(draft.lengths)
            ]
            late = [int(made.lengths[row]) if each else 0 for row, each in enumerate(differs)]
            kept = replace(
                draft,
                lengths=tuple(
                    0 if each else n for each, n in zip(differs, draft.lengths, strict=True)
                ),
            )
            return draw(self, batch, policy, kept, made, late)

        plan = PolicyRouter.plan_drafts
        monkeypatch.setattr(HybridProposer, "_joined", chosen_late)
        engine = self.engine(models, "fixed", 64)
        monkeypatch.setattr(
            type(engine.policies),
            "plan_drafts",
            lambda self, requests: plan(self, requests)._replace(
                lengths=[7] * len(requests), copies=[False] * len(requests)
            ),
        )
        with pytest.raises(AssertionError):
            check_law(models, engine, SamplingParams(max_tokens=3))

    @pytest.mark.parametrize(
        ("policy", "max_batch_size"), [("fixed", 1), ("adaptive", 5), ("sv", 16)]
    )
    def test_greedy_texts_are_the_targets(self, models, policy, max_batch_size):
        prompts, _ = varied_work(30)
        params = [SamplingParams(max_tokens=16, temperature=0)] * len(prompts)
        expected = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
        engine = self.engine(models, policy, max_batch_size, VARIED)
        assert token_ids(generate(engine, prompts, params)) == token_ids(expected)

    @pytest.mark.parametrize("policy", ["none", "sv"])
    def test_a_step_may_only_read_prompts(self, models, policy):
        options = EngineOptions(3, max_chunk_tokens=2)
        prompts, params = varied_work(12)
        expected = generate(build(models, VARIED, "none", 3, draft="none"), prompts, params)
        outputs = generate(self.engine(models, policy, options, VARIED), prompts, params)
        for output, other, each in zip(outputs, expected, params, strict=True):
            assert output.finish_reason == other.finish_reason
            assert each.temperature or output.token_ids == other.token_ids

    def test_continuations_are_looked_for_where_the_policy_or_a_request_wants(
        self, models, monkeypatch
    ):
        turn = itertools.count()
        monkeypatch.setattr(PolicyRouter, "looks_for_offers", lambda *_: next(turn) % 3 == 0)
        engine = self.engine(models, "fixed", 4, VARIED)
        prompts, params = varied_work(20)
        outputs = generate(engine, prompts, params)
        expected = generate(build(models, VARIED, "none", 4, draft="none"), prompts, params)
        for output, other, each in zip(outputs, expected, params, strict=True):
            assert each.temperature or output.token_ids == other.token_ids
        sources = {source for output in outputs for source in output.token_sources}
        assert {TokenSource.DRAFT, TokenSource.COPY} <= sources
        monkeypatch.setattr(PolicyRouter, "looks_for_offers", lambda *_: False)
        own = {
            draft: [
                engine.add(
                    None, [1, 2, n], SamplingParams(max_tokens=24), RequestSpeculation(draft=draft)
                )
                for n in range(8)
            ]
            for draft in (None, Sure.name)
        }
        while engine.num_unfinished:
            engine.step()
        assert any(TokenSource.COPY in request.output().token_sources for request in own[Sure.name])

    def test_both_sources_are_used_and_reported(self, models, monkeypatch):
        # Prices come from the times of steps.
        monkeypatch.setattr(
            Stopwatch, "times", lambda self, rest, n: StepTimes(0.0005, 0, 0, 0.0105, 0, 0, n)
        )
        prompts, params = varied_work(30)
        for policy in ("fixed", "adaptive"):
            engine = self.engine(models, policy, 8, VARIED)
            sources = {
                source
                for _ in range(10)
                for output in generate(engine, prompts, params)
                for source in output.token_sources
            }
            assert {TokenSource.DRAFT, TokenSource.COPY, TokenSource.TARGET} <= sources, policy

    def test_the_model_catches_up_after_steps_without_it(self, models, monkeypatch):
        engine = self.engine(models, "fixed", 2, VARIED)
        turn = itertools.count()

        plan = PolicyRouter.plan_drafts

        def alternating(self, requests):
            uses_offer = next(turn) % 4 < 3
            begun = plan(self, requests)
            return begun._replace(lengths=[7] * len(requests), copies=[uses_offer] * len(requests))

        monkeypatch.setattr(type(engine.policies), "plan_drafts", alternating)
        prompts, params = varied_work(12)
        expected = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
        outputs = generate(engine, prompts, params)
        greedy = [each.temperature == 0 for each in params]
        for output, other, is_greedy in zip(outputs, expected, greedy, strict=True):
            assert not is_greedy or output.token_ids == other.token_ids
        assert sum(output.speculation.num_accepted for output in outputs) > 0

    def test_a_request_may_use_one_of_the_drafts(self, models):
        engine = self.engine(models, "fixed", 8, VARIED)
        model = models.folder(VARIED.draft())
        requests = {
            draft: [
                engine.add(
                    None,
                    [1, 2, number % 8],
                    SamplingParams(max_tokens=24, seed=number),
                    RequestSpeculation(draft=draft),
                )
                for number in range(16)
            ]
            for draft in (Sure.name, model)
        }
        while engine.num_unfinished:
            engine.step()
        sources = [
            {source for request in own for source in request.output().token_sources}
            for own in requests.values()
        ]
        assert TokenSource.DRAFT not in sources[0]
        assert TokenSource.COPY not in sources[1]
        assert {TokenSource.COPY, TokenSource.DRAFT} <= sources[0] | sources[1]
        params = SamplingParams(max_tokens=4)
        with pytest.raises(InvalidParameterError, match="must be one of the engine's drafts"):
            engine.add(None, [1], params, RequestSpeculation(draft="ngram"))

    def test_lenience_applies_to_offers(self, models):
        engine = self.engine(models, "fixed", 8, lenience=0.2)
        outputs = generate(engine, [[1, 2, 3]] * 20, [SamplingParams(max_tokens=12, seed=1)] * 20)
        assert not any(output.speculation.lossless for output in outputs)

    def test_drafts_that_cannot_be_combined_are_refused(self, models):
        folder = models.folder(RECIPE.draft())
        for drafts, words in (
            (["suffix", "ngram"], "cannot combine 'suffix' and 'ngram'"),
            (["ngram", folder], "'ngram' cannot be combined with a draft model"),
            ([folder, folder + "x"], "several draft models"),
        ):
            with pytest.raises(InvalidParameterError, match=words) as caught:
                draft_model_name(unguarded(drafts))
            assert caught.value.field == "draft"
