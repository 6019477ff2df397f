"""A proposer in one class is lossless at every batch size and temperature."""

import pytest
import torch

from draftwise import SamplingParams, SpeculationConfig
from draftwise.engine.assembly import Assembly, EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.proposers import PROPOSERS, TokenProposer, create_proposer, register
from draftwise.engine.proposers.several import SeveralProposers
from draftwise.errors import EngineError, InvalidParameterError
from draftwise.models.loading import load_model
from draftwise.policies import POLICIES, policy_class

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..levels import exhaustive_unless
from ..stand_ins import fixed_latency, profile
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


def build(models, recipe, policy, max_batch_size, draft=LastTokens.name, **speculation):
    """An engine without a draft model. Policies that price tokens get synthetic costs."""
    made = policy_class(policy)
    target = load_model(models.folder(recipe), "target", torch.float32, torch.device("cpu"), None)
    companion = None
    if made.uses_companion():
        folder = models.folder(recipe.draft(noise=0.2, noise_seed=2))
        companion = load_model(folder, "companion", torch.float32, torch.device("cpu"), None)
    return Engine(
        Models(target, None, companion),
        SpeculationConfig(draft, policy=policy, num_speculative_tokens=3, **speculation),
        EngineOptions(max_batch_size),
        fixed_latency() if made.needs_latency else None,
        profile() if made.needs_profile else None,
    )


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


def check_law(models, engine, params, count=6000):
    prompt = [1, 2, 3]
    outputs = generate(
        engine,
        [prompt] * count,
        [SamplingParams(**{**vars(params), "seed": seed}) for seed in range(count)],
    )
    expected = exact_distribution(models.reference(RECIPE), prompt, params, 3)
    counts = sequence_counts(torch.tensor(token_ids(outputs)), RECIPE.vocab)
    assert chi_square_p_value(counts, expected.joint()) > NOT_UNLIKELY
    assert sum(output.speculation.num_drafted for output in outputs) > 0
    assert all(output.speculation.lossless for output in outputs)


@pytest.mark.parametrize("max_batch_size", [1, 5, 16])
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


class TestSeveral:
    def engine(self, models, policy="fixed", max_batch_size=6):
        """A model drafts for even requests. The others get drafts from their own text."""
        folders = [models.folder(each) for each in (RECIPE, RECIPE.draft())]
        target, draft = (
            load_model(folder, role, torch.float32, torch.device("cpu"), None)
            for folder, role in zip(folders, ("target", "draft"), strict=True)
        )

        class Both(Assembly):
            def proposer(self):
                context = self.proposer_context()
                proposers = [create_proposer(name, context) for name in ("model", LastTokens.name)]
                return SeveralProposers(
                    context, proposers, lambda batch: [r.request_id % 2 for r in batch.generating]
                )

        return Engine(
            Models(target, draft),
            SpeculationConfig(folders[1], policy=policy, num_speculative_tokens=3),
            EngineOptions(max_batch_size),
            fixed_latency() if policy_class(policy).needs_latency else None,
            assemble=Both,
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("policy", ["fixed", "svip", "adaptive", "tetris"])
    def test_texts_follow_the_target(self, models, policy):
        check_law(models, self.engine(models, policy, 64), SamplingParams(max_tokens=3))

    def test_each_request_uses_its_own_proposer(self, models):
        outputs = generate(
            self.engine(models), [[1, 2, 3]] * 12, [SamplingParams(max_tokens=24, seed=1)] * 12
        )
        steps = [output.speculation.num_steps for output in outputs]
        assert len(set(steps[::2])) == len(set(steps[1::2])) == 1
        assert steps[0] != steps[1]


def test_a_name_cannot_be_registered_twice():
    class Other(LastTokens):
        pass

    with pytest.raises(ValueError, match="registered already"):
        register(Other)


def test_the_model_proposer_needs_a_draft_model(models):
    with pytest.raises(InvalidParameterError, match="needs a draft model"):
        create_proposer("model", build(models, RECIPE, "fixed", 2)._pipeline.proposer.context)
