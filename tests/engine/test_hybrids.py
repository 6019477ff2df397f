"""Targets and drafts with recurrent layers: the same texts however they are computed."""

import random
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from draftwise import LLM, SamplingParams
from draftwise.errors import InvalidParameterError
from draftwise.kernels.native.library import native_library
from draftwise.models import prefix_store
from draftwise.models.prefix_store import BLOCK_SIZE
from draftwise.models.recurrent.cache import RecurrentCache

from ..stand_ins import unguarded
from ..tiny_models import RECURRENT, Recipe
from ..tiny_mtp import CASES as MTP_CASES
from ..tiny_mtp import add_layer
from .test_lossless import (
    NOT_UNLIKELY,
    SETTINGS,
    Case,
    assert_kernels_draft_like_pytorch,
    assert_texts_follow_the_target,
)
from .test_other_vocabularies import DRAFT, TARGET

CONTEXT = 256
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def recipe(family, **changes):
    return Recipe(family, vocab=32, context=CONTEXT, seed=3, **changes)


def prompts(count, seed=0):
    """Prompts that begin alike, of lengths around those of chunks and blocks."""
    numbers = random.Random(seed)
    start = [numbers.randrange(32) for _ in range(70)]
    lengths = [1, 15, 16, 17, 33, 48, 63, 64, 65, 70]
    return [
        [*start[: lengths[index % len(lengths)]], index % 32, index // 32 % 32]
        for index in range(count)
    ]


@pytest.fixture(params=RECURRENT)
def family(request):
    return request.param


@pytest.fixture
def load(models, family):
    def loaded(speculation=None, **settings):
        return LLM(
            models.folder(recipe(family)),
            speculation,
            dtype="float32",
            **{"max_batch_size": 4, **settings},
        )

    return loaded


def texts(llm, asked=None, params=GREEDY):
    outputs = llm.generate(asked or prompts(20), params)
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def test_prompts_in_chunks_of_any_size(load):
    expected = texts(load(max_batch_size=1, enable_prefix_caching=False))
    for size in (1, 63, 64, 65):
        assert texts(load(max_chunk_tokens=size)) == expected


@pytest.mark.parametrize("policy", ["fixed", "svip", "adaptive"])
@pytest.mark.parametrize("draft", ["suffix", "model", "hybrid"])
def test_drafts_do_not_change_texts(load, models, family, draft, policy):
    names = {
        "suffix": "suffix",
        "model": models.folder(Recipe("llama", 32, CONTEXT)),
        "hybrid": models.folder(recipe(family).draft(0.1)),
    }
    settings = {"policy": policy, "num_speculative_tokens": 4}
    if policy == "adaptive":
        settings["policy"] = "fixed" if draft == "suffix" else policy
    speculation = unguarded(names[draft], **settings)
    expected = texts(load())
    llm = load(speculation)
    assert texts(llm) == expected
    assert texts(llm, prompts(20)[::-1]) == expected[::-1]


def test_the_longest_drafts_do_not_change_texts(load, models, family):
    """They need as many rows as are kept, or more after steps without drafts."""
    speculation = unguarded(
        models.folder(recipe(family).draft(0.1)), policy="fixed", num_speculative_tokens=64
    )
    assert texts(load(speculation), prompts(6)) == texts(load(), prompts(6))


def test_stored_prefixes_do_not_change_texts(load, models, family):
    speculation = unguarded(
        models.folder(recipe(family).draft(0.1)), policy="fixed", num_speculative_tokens=3
    )
    expected = texts(load(enable_prefix_caching=False))
    llm = load(speculation)
    assert texts(llm) == expected
    before = llm.engine.prefix_stats.num_hits
    assert texts(llm) == expected
    stats = llm.engine.prefix_stats
    assert stats.num_hits - before >= 0.6 * sum(map(len, prompts(20)))


def test_a_conversation_continues_from_its_answer(load):
    llm, fresh = load(), load(enable_prefix_caching=False)
    text = prompts(1)[0] * 8
    for turn in range(4):
        (answer,) = texts(llm, [text])
        assert [answer] == texts(fresh, [text])
        before = llm.engine.prefix_stats.num_hits
        text = [*text, *answer, turn, 3]
        texts(llm, [text])
        hits = llm.engine.prefix_stats.num_hits - before
        assert hits >= len(text) - 2 - len(answer) - BLOCK_SIZE
    assert hits % BLOCK_SIZE == 0


def test_few_stored_states_are_replaced(load, monkeypatch):
    monkeypatch.setattr("draftwise.engine.cache_memory._STATES_PER_REQUEST", 1)
    expected = texts(load(enable_prefix_caching=False))
    llm = load(max_batch_size=2)
    for _ in range(3):
        assert texts(llm) == expected


def test_a_state_of_a_draft_in_a_snapshot_is_noticed(load, monkeypatch):
    """Prefixes would continue from states that rejected tokens have changed."""
    wrong = prefix_store.Snapshots.take

    def take(self, place, cache_slot, position):
        wrong(self, place, cache_slot, position)
        for states in self._states:
            states[place] += 0.5
        for inputs in self._inputs:
            inputs[place] += 0.5

    expected = texts(load(enable_prefix_caching=False))
    monkeypatch.setattr(prefix_store.Snapshots, "take", take)
    llm = load()
    texts(llm)
    assert texts(llm) != expected


def test_interrupted_steps_are_repeated(load, monkeypatch):
    expected = texts(load(enable_prefix_caching=False))
    speculation = unguarded("suffix", policy="fixed", num_speculative_tokens=4)
    llm = load(speculation)
    check, calls = RecurrentCache.check, 0

    def interrupted(self, *arguments):
        nonlocal calls
        calls += 1
        if calls % 7 == 3:
            raise KeyboardInterrupt
        return check(self, *arguments)

    engine = llm.engine
    requests = [engine.add(None, prompt, GREEDY) for prompt in prompts(20)]
    monkeypatch.setattr(RecurrentCache, "check", interrupted)
    while engine.num_unfinished:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert [request.output().token_ids for request in requests] == expected


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_many_requests_with_cancellations_leave_no_trace(load, count):
    """Texts are those without drafts and stored prefixes, and memory does not grow."""
    expected = texts(load(enable_prefix_caching=False), prompts(count))
    engine = load(unguarded("suffix", policy="fixed", num_speculative_tokens=3)).engine
    numbers, requests = random.Random(5), []
    waiting, resident = list(enumerate(prompts(count))), []
    while waiting or engine.num_unfinished:
        resident.append(resident_bytes())
        for _ in range(min(len(waiting), numbers.randrange(3))):
            index, prompt = waiting.pop(0)
            requests.append((index, engine.add(None, prompt, GREEDY)))
        engine.step()
        running = [each for _, each in requests if each.finish_reason is None]
        if running and numbers.random() < 0.05:
            engine.cancel(numbers.choice(running))
    for index, request in requests:
        said = request.output().token_ids
        assert said == expected[index][: len(said)]
    # All places of the caches are in use after a quarter of the steps.
    assert max(resident) - resident[len(resident) // 4] < 2**24


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_token_trees_are_refused(load, models):
    speculation = unguarded(
        models.folder(Recipe("llama", 32, CONTEXT)), policy="eagle2", tree_width=2
    )
    with pytest.raises(InvalidParameterError, match="recurrent layers") as caught:
        load(speculation)
    assert caught.value.field == "tree_width"


def test_exits_are_refused(load):
    """Their layers are computed apart, and a pass computes all recurrences in order."""
    with pytest.raises(Exception, match="recurrent layers are computed together"):
        load({"draft": "target:exit=1", "policy": "fixed"})


def test_replicas_are_refused(load, models, family):
    draft = models.folder(recipe(family).draft(0.1))
    with pytest.raises(InvalidParameterError) as caught:
        load(unguarded(draft, policy="fixed"), draft_replicas=2)
    assert caught.value.field == "draft_replicas"


@pytest.mark.filterwarnings("ignore::draftwise.errors.VocabularyWarning")
def test_a_hybrid_with_other_tokens_drafts(models):
    """Its state is read again where the target's tokens have no counterpart."""
    target, draft = (replace(each, context=CONTEXT) for each in (TARGET, DRAFT))
    draft = replace(draft, family="qwen3_5")
    plain = LLM(models.folder(target), dtype="float32")
    llm = LLM(
        models.folder(target),
        unguarded(models.folder(draft), policy="fixed", num_speculative_tokens=4),
        dtype="float32",
    )
    assert llm.draft.translator is not None
    asked = [[2, 1, 4, 3] * count for count in (1, 5, 10, 20)]
    expected = texts(plain, asked)
    for _ in range(2):
        assert texts(llm, asked) == expected


@dataclass(frozen=True)
class HybridCase(Case):
    family: str = "qwen3_5"

    def __str__(self):
        return f"{self.family}-{super().__str__()}"

    @property
    def recipe(self):
        return Recipe(self.family, vocab=self.vocab, seed=3)


CASES = [
    HybridCase("fixed", "block", 3, num_requests=8000),
    HybridCase("fixed", "token", 2, num_requests=8000, family="granitemoehybrid"),
    HybridCase("svip", "block", 3, num_requests=6000, family="lfm2"),
    HybridCase("adaptive", "block", 3, num_requests=6000),
    HybridCase("sv", "block", 3, num_requests=6000),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_texts_follow_the_target(models, case):
    assert_texts_follow_the_target(models, case)


@pytest.mark.slow
def test_texts_after_a_shared_prefix_follow_the_target(models):
    """All requests but the first continue from stored states."""
    prompt = [1, 2, 3, 0] * 9
    own = Recipe("qwen3_5", vocab=8, seed=3)
    llm = LLM(
        models.folder(own),
        unguarded(models.folder(own.draft(0.1)), policy="fixed", num_speculative_tokens=3),
        dtype="float32",
        max_batch_size=256,
    )
    case = HybridCase("fixed", "block", 3, settings=((prompt, SamplingParams()),))
    tokens, _ = case.said_by(llm.engine, 8000)
    assert llm.engine.prefix_stats.num_hits > 7000 * 32
    assert min(case.p_values(models, tokens)) > NOT_UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "policy", "verification"),
    [("mtp", "fixed", "block"), ("mtp", "svip", "token"), (["suffix", "mtp"], "fixed", "block")],
)
def test_texts_drafted_by_an_mtp_layer_follow_the_target(
    models, tmp_path, draft, policy, verification
):
    folder, *_ = add_layer("qwen3_5", models, tmp_path / "target")
    speculation = unguarded(
        draft, policy=policy, num_speculative_tokens=3, verification=verification
    )
    llm = LLM(folder, speculation, dtype="float32", max_batch_size=256)
    assert (llm.draft.model.native is None) == (native_library() is None)
    settings = (*SETTINGS, ([2, 0, 1], SamplingParams(temperature=0.8)))
    case = HybridCase(policy, verification, 3, num_requests=10_000, settings=settings)
    tokens, requests = case.said_by(llm.engine)
    stats = [request.stats for request in requests]
    assert 0 < sum(each.num_accepted for each in stats) < sum(each.num_drafted for each in stats)
    reference = models.reference(MTP_CASES["qwen3_5"][0])
    assert min(case.p_values_of(reference, tokens)) > NOT_UNLIKELY


@dataclass(frozen=True)
class MtpCase(HybridCase):
    folder: str = ""

    def engine(self, models, max_batch_size=512):
        speculation = unguarded("mtp", policy=self.policy, num_speculative_tokens=4)
        return LLM(self.folder, speculation, dtype="float32", max_batch_size=4).engine


@pytest.mark.slow
@pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_kernels_of_an_mtp_layer_draft_like_pytorch(models, tmp_path, temperature, monkeypatch):
    folder, *_ = add_layer("qwen3_5", models, tmp_path / "target")
    case = MtpCase("svip", "block", 4, folder=str(folder))
    assert_kernels_draft_like_pytorch(models, case, temperature, monkeypatch)
