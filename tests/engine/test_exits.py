"""Exits draft with the target's first layers, and verification continues from what they leave."""

import pytest
import torch

from draftwise import LLM
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.models import pretrained
from draftwise.models.model_part import ModelPart
from draftwise.outputs import TokenSource
from draftwise.policies import POLICIES
from draftwise.policies.step_times import SCORED

from ..refusals import error_of
from ..stand_ins import unguarded, vary_choices
from ..tiny_models import Recipe
from .assembly import generate, sampled, token_ids
from .exits import (
    DEEPER,
    DRAFT,
    TARGET,
    assert_drafts_of_exit,
    engine_with_exit,
    exit_logits,
    recorded_passes,
)
from .heads import recorded_drafts
from .target_readers import PREFIX, PROMPTS

GAMMA = 4
LONG = TARGET.draft(0.0, context=256)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("num_layers", [1, 3])
def test_drafts_are_those_of_the_exit(models, num_layers):
    """In batches, with prompts in chunks, before and after partial acceptances."""
    engine = engine_with_exit(
        models,
        draft=f"target:exit={num_layers}",
        num_speculative_tokens=GAMMA,
        max_chunk_tokens=9,
        max_batch_size=3,
    )
    drafts = recorded_drafts(engine)
    outputs = generate(engine, PROMPTS, sampled(4))
    accepted = [output.speculation.num_accepted for output in outputs]
    verified = [output.speculation.num_verified for output in outputs]
    assert 0 < sum(accepted) < sum(verified)
    assert_drafts_of_exit(models, drafts, num_layers=num_layers)


@pytest.mark.slow
@pytest.mark.covering("kernels", "max_batch_size")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("max_batch_size", [1, 16])
def test_greedy_texts_are_the_target_s(models, max_batch_size):
    count = 4 if max_batch_size == 1 else 16
    greedy = sampled(count, temperature=0.0)
    prompts = [[at % 12, *PREFIX[: at * 3]] for at in range(0, 16, 16 // count)]
    options = {"max_batch_size": max_batch_size, "max_chunk_tokens": 16}
    expected = None
    for settings in (
        {"policy": "none"},
        {},
        {"num_speculative_tokens": 1, "draft": "target:exit=3"},
        {"policy": "sv", "companion": TARGET.draft(0.2)},
        {"policy": "staged", "draft": TARGET.draft(0.2)},
    ):
        engine = engine_with_exit(models, LONG, **options, **settings)
        # Twice, so that prefixes are restored.
        outputs = generate(engine, prompts, greedy)
        again = generate(engine, prompts, greedy)
        expected = expected or token_ids(outputs)
        assert token_ids(outputs) == token_ids(again) == expected
        if max_batch_size > 1:
            assert sum(output.num_cached_tokens for output in again) > 100


@pytest.mark.usefixtures("kernels")
def test_a_deeper_exit_judges_from_where_the_draft_left(models, monkeypatch):
    engine = engine_with_exit(models, policy="staged", num_speculative_tokens=GAMMA)
    with recorded_passes(monkeypatch) as passes:
        requests = [engine.add(None, [at, 3], each) for at, each in enumerate(sampled(3))]
        while not any(request.finish_reason for request in requests):
            engine.step()
    layers = {each for each, _ in passes}
    # Drafting, judging, verification of what was judged; and of each last token from the start.
    assert {(2, 3), (3, 4), (0, 3)} <= layers <= {(0, 2), (2, 3), (3, 4), (0, 3)}
    judged = [count for each, count in passes if each == (2, 3)]
    assert max(judged) == 3 * GAMMA


def test_scores_of_a_deeper_exit(models):
    """The overlap of both exits, by Hugging Face's own modules."""
    engine = engine_with_exit(models, policy="staged", num_speculative_tokens=GAMMA)
    pipeline, reference = engine._pipeline, models.reference(TARGET)
    score, compared = pipeline.score, []

    def checked(batch, draft):
        scores = score(batch, draft)
        if scores is None:
            return scores
        for index, request in enumerate(batch.generating):
            length = draft.lengths[index]
            if not length:
                continue
            text = [*request.tokens, *draft.host_tokens[index][: length - 1]]
            q, c = (exit_logits(reference, exit, text)[-length:].softmax(dim=-1) for exit in (2, 3))
            overlap = torch.minimum(q, c).sum(dim=-1)
            torch.testing.assert_close(scores.overlap[index, :length], overlap, atol=1e-4, rtol=0)
            compared.append(length)
        return scores

    pipeline.score = checked
    generate(engine, PROMPTS, sampled(4))
    assert len(compared) > 10


def test_policies_verify_any_part_of_a_draft(models):
    """What a policy drops loses its states, and greedy texts stay the same."""
    greedy = sampled(6, temperature=0.0)
    prompts = [[at, 3, 5] for at in range(6)]
    expected = token_ids(generate(engine_with_exit(models, policy="none"), prompts, greedy))
    for name, policy in POLICIES.items():
        if policy.needs_draft and not policy.uses_target_oracle:
            engine = engine_with_exit(models, policy=name, num_speculative_tokens=GAMMA)
            assert token_ids(generate(engine, prompts, greedy)) == expected, name


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "gpt2"])
def test_greedy_texts_with_other_targets(models, family, monkeypatch):
    """Targets of Draftwise's own passes and of Hugging Face's modules, and windows."""
    target = Recipe(family, vocab=12, seed=2, config={"num_hidden_layers": 3})
    if family == "gemma3_text":
        target = Recipe(family, vocab=12, seed=2)
    greedy = sampled(4, temperature=0.0, max_tokens=40)
    prompts = [[1], [2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 0]]
    settings = {"draft": "target:exit=1", "companion": "target:exit=2"}
    plain = generate(engine_with_exit(models, target, policy="none"), prompts, greedy)
    vary_choices(monkeypatch, [3, SCORED + 3, SCORED + 2], [0.3, 0.1])
    for policy in ("fixed", "sv"):
        engine = engine_with_exit(models, target, policy=policy, **settings)
        outputs = generate(engine, prompts, greedy)
        assert token_ids(outputs) == token_ids(plain)
        assert sum(output.speculation.num_verified for output in outputs)
        drafts = recorded_drafts(engine)
        generate(engine, prompts, sampled(4))
        assert_drafts_of_exit(models, drafts, target, num_layers=1)


def test_with_known_continuations(models):
    """The hybrid of copied text and an exit."""
    prompts = [[*([1, 2, 3, 4, 5] * 4), at] for at in range(6)]
    greedy = sampled(6, temperature=0.0, max_tokens=40)
    expected = token_ids(generate(engine_with_exit(models, policy="none"), prompts, greedy))
    engine = engine_with_exit(models, draft=("suffix", DRAFT))
    outputs = generate(engine, prompts, greedy)
    assert token_ids(outputs) == expected
    sources = {source for output in outputs for source in output.token_sources}
    assert {TokenSource.COPY, TokenSource.DRAFT} <= sources


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("settings", [{}, {"policy": "staged", "companion": DEEPER}])
def test_an_interrupt_between_the_parts_of_a_pass_leaves_no_half_read_prompt(
    models, monkeypatch, settings
):
    """Prompts join in chunks while other requests decode. Their prefixes are used again."""
    prompts = [[1, 4], [2, 5, 3], [3, *PREFIX[:90]], [4, *PREFIX[:70]], [5, *PREFIX[:80]]]
    params = sampled(5, max_tokens=60)

    def texts(broken):
        """Of an engine, the first time and again, with some passes that are interrupted."""
        engine = engine_with_exit(models, LONG, max_batch_size=5, max_chunk_tokens=16, **settings)
        work = list(zip(prompts, params, strict=True))
        requests = [engine.add(None, *each) for each in work[:2]]
        engine.step()
        engine.step()
        requests += [engine.add(None, *each) for each in work[2:]]
        forward, raised = ModelPart.forward, [0]

        def failing(self, cache, tokens, segments, *arguments, **named):
            has_chunk = max(count for _, _, count in segments) > 8
            if broken and self.layers.start and has_chunk and raised[0] < 4:
                raised[0] += 1
                raise KeyboardInterrupt
            return forward(self, cache, tokens, segments, *arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(ModelPart, "forward", failing)
            while engine.num_unfinished:
                try:
                    engine.step()
                except KeyboardInterrupt:
                    continue
        assert raised[0] == 4 * broken
        again = generate(engine, prompts, params)
        assert sum(output.num_cached_tokens for output in again) > 100
        return token_ids([request.output() for request in requests]), token_ids(again)

    assert texts(broken=True) == texts(broken=False)


IMPOSSIBLE = [
    ({"draft": "target:exit=0"}, {}, "draft", "at least 1"),
    ({"draft": "target:exit=4"}, {}, "draft", "before its last layer, and .* has 4 layers"),
    ({"draft": "target:exit=99"}, {}, "draft", "before its last layer"),
    ({"draft": "target:exit=two"}, {}, "draft", "a number of layers"),
    ({"draft": "target:exit=-1"}, {}, "draft", "a number of layers"),
    ({"draft": "target:exit="}, {}, "draft", "a number of layers"),
    ({"draft": "target:exit"}, {}, "draft", "a number of layers"),
    ({"draft": "target:exit=2:int8"}, {}, "draft", "is not quantised"),
    ({"draft": "FOLDER:exit=2"}, {}, "draft", "an exit is always one of the target"),
    ({"draft": "zoo:draft:exit=2"}, {}, "draft", "'target:exit=2'"),
    ({"draft": DRAFT, "companion": "draft:int8"}, {}, "companion", "is not quantised"),
    ({"draft": DRAFT, "companion": DRAFT}, {}, "companion", "later than the draft"),
    ({"draft": DEEPER, "companion": DRAFT}, {}, "companion", "later than the draft"),
    ({"draft": DRAFT, "companion": "target:exit=4"}, {}, "companion", "before its last"),
    ({"draft": (DRAFT, DEEPER)}, {}, "draft", "several draft models"),
    ({"draft": DRAFT}, {"draft_replicas": 2}, "draft_replicas", "needs a draft model"),
    ({"draft": DRAFT}, {"overlap": True}, "overlap", "leaves no target to an exit"),
]


def test_what_exits_cannot_do_is_refused(models):
    for settings, options, field, message in IMPOSSIBLE:
        folder = models.folder(TARGET)
        if isinstance(settings["draft"], str):
            settings = {**settings, "draft": settings["draft"].replace("FOLDER", folder)}
        settings = {"policy": "staged" if "companion" in settings else "fixed", **settings}
        caught = error_of(
            LLM,
            folder,
            unguarded(**settings),
            dtype="float32",
            **options,
            error=InvalidParameterError,
            match=message,
        )
        assert caught.field == field, settings


def test_targets_whose_layers_are_no_list_are_refused(models, monkeypatch):
    def none(model):
        raise UnsupportedModelError("draft", "not found")

    monkeypatch.setattr("draftwise.models.module_parts.decoder_layers", none)
    target = Recipe("gpt2", vocab=12, config={"num_hidden_layers": 3})
    with pytest.raises(UnsupportedModelError, match="no exits in gpt2 models"):
        LLM(models.folder(target), unguarded(DRAFT, policy="fixed"), dtype="float32")


def test_targets_whose_layers_depend_on_others_are_refused(models, monkeypatch):
    """Continuing from the exit gives other logits than a whole pass."""
    monkeypatch.setattr(pretrained, "native_pass", lambda _: None)
    forward = pretrained.PackedModel.forward_part

    def different(self, *arguments):
        logits, stream = forward(self, *arguments)
        return logits, stream * 1.5

    monkeypatch.setattr(pretrained.PackedModel, "forward_part", different)
    with pytest.raises(UnsupportedModelError, match="depend on more than the layer before"):
        LLM(models.folder(TARGET), unguarded(DRAFT, policy="fixed"), dtype="float32")
