"""Collection of records: exact values, resuming, and errors."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.engine.assembly import Models
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.estimators.information import was_tested
from draftwise.estimators.profile import AcceptanceProfile, fit_profile
from draftwise.profiling.acceptance import collect
from draftwise.profiling.checkpoint import load_checkpoint, save_checkpoint

from ..engine.blocks import HEAD
from ..engine.blocks import TARGET as HEAD_TARGET
from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_models import Recipe, bigram_model, chain_logits, save

TARGET = Recipe(vocab=8, seed=5)
DRAFT = TARGET.draft(0.4)
COMPANION = TARGET.draft(0.2, noise_seed=2)
PROMPTS = [[1], [2, 3], [4, 5, 6], [7], [1, 1], [3, 0, 2, 4], [5], [6, 2]]
SAMPLING = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def load(models, target=TARGET, draft=DRAFT, companion=COMPANION):
    speculation = unguarded(
        models.folder(draft),
        companion=None if companion is None else models.folder(companion),
        policy="fixed",
    )
    llm = LLM(models.folder(target), dtype="float32", max_batch_size=1)
    return llm.load_models(speculation)


@pytest.fixture(scope="module")
def trio(models):
    return load(models)


def gather(trio, sampling=SAMPLING, prompts=PROMPTS, **options):
    return collect(trio, prompts, sampling, **{"num_speculative_tokens": 3, **options})


@pytest.fixture(scope="module")
def collection(trio):
    return gather(trio)


def columns(records):
    return {item.name: getattr(records, item.name) for item in fields(records)}


def assert_same(ours, theirs):
    for name, column in columns(ours).items():
        np.testing.assert_allclose(column, columns(theirs)[name], atol=1e-4, err_msg=name)


class TestRecords:
    def test_chains(self, collection):
        records = collection.records
        assert collection.num_prompts == len(PROMPTS)
        assert collection.errors == []
        starts = records.position == 0
        assert np.array_equal(np.cumsum(starts) - 1, records.chain)
        assert np.array_equal(
            records.position[1:][~starts[1:]], records.position[:-1][~starts[1:]] + 1
        )
        assert records.position.max() == 2

    def test_values_are_in_range(self, collection):
        records = collection.records
        for name in ("token_prob", "top_prob", "overlap", "agreement", "acceptance", "history"):
            column = columns(records)[name]
            assert column.dtype == np.float32
            assert ((column >= 0) & (column <= 1.00001)).all(), name
        assert (records.token_prob <= records.top_prob + 1e-6).all()
        assert (records.entropy > 0).all()
        assert (records.entropy <= np.log(8) + 1e-5).all()

    def test_accepted_tokens_are_a_prefix_of_their_chain(self, collection):
        records = collection.records
        later = records.position > 0
        assert not (records.accepted[1:] & ~records.accepted[:-1] & later[1:]).any()
        assert not records.accepted[records.acceptance == 0].any()
        # Tokens after a rejection are recorded too, with their acceptance probabilities.
        assert (records.acceptance[~records.accepted] > 0.3).any()

    def test_acceptance_frequency_equals_the_mean_probability(self, trio):
        records = gather(trio, SAMPLING, PROMPTS * 12).records
        tested = was_tested(records)
        probability, kept = records.acceptance[tested], records.accepted[tested]
        deviation = np.sqrt((probability * (1 - probability)).sum())
        assert deviation > 5
        assert abs((kept - probability).sum()) < 4 * deviation

    def test_without_companion(self, trio, collection):
        records = gather(Models(trio.target, trio.draft)).records
        assert not records.overlap.any()
        assert not records.agreement.any()
        assert np.allclose(records.acceptance, collection.records.acceptance, atol=1e-4)

    def test_tokens_after_the_end_of_a_text_are_ignored(self, tmp_path):
        """The draft continues after an end token, but those tokens would not be verified."""
        folder = save(bigram_model(chain_logits(8, [0, 1, 2, 3, 4, 5])), tmp_path / "model")
        llm = LLM(folder, dtype="float32", max_batch_size=1)
        trio = llm.load_models(unguarded(folder, policy="fixed"))
        for stop, expected in [((), 3), ((2,), 1), ((3,), 2), ((2, 3), 1)]:
            sampling = SamplingParams(max_tokens=6, stop_token_ids=stop, seed=0)
            # The target says 1, and the draft of the first step is 2, 3, 4.
            records = gather(trio, sampling, [[0]]).records
            assert (records.chain == 0).sum() == expected, stop
            assert records.accepted.all(), stop


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    base, *noise = torch.randn(3, 8, 8, generator=generator)
    logits = base, base + noise[0], base + noise[1]
    folders = [
        save(bigram_model(each), tmp_path_factory.mktemp("bigram") / "model") for each in logits
    ]
    target = LLM(folders[0], dtype="float32", max_batch_size=1)
    speculation = unguarded(folders[1], companion=folders[2], policy="fixed")
    return target.load_models(speculation), logits


class TestAgainstExactDistributions:
    """Models whose next token depends only on the last one, so there are 8 distributions."""

    def check(self, records, p, q, c, believed):
        """Each record is one of 8 · 8: a last token, and a token drafted after it."""
        ratio = np.minimum(1, p / np.where(q > 0, q, np.inf))
        tables = {
            "entropy": np.broadcast_to(
                -(believed * np.log(believed)).sum(1, keepdims=True), (8, 8)
            ),
            "token_prob": believed,
            "top_prob": np.broadcast_to(believed.max(1, keepdims=True), (8, 8)),
            "overlap": np.broadcast_to(np.minimum(believed, c).sum(1, keepdims=True), (8, 8)),
            "agreement": np.minimum(1, c / believed),
            "acceptance": ratio,
        }
        fits = np.ones((len(records), 8, 8), dtype=bool)
        for name, table in tables.items():
            fits &= np.isclose(columns(records)[name][:, None, None], table, atol=1e-4)
        assert len(records) > 50
        assert (fits & (q > 0)).any(axis=(1, 2)).all()

    def test_sampled(self, exact):
        trio, logits = exact
        records = gather(trio, SamplingParams(max_tokens=12, temperature=0.7, seed=0)).records
        p, q, c = (torch.softmax(each / 0.7, 1).numpy() for each in logits)
        self.check(records, p, q, c, q)

    def test_greedy(self, exact):
        """Signals are those at temperature 1; tokens equal to the target's argmax are accepted."""
        trio, logits = exact
        records = gather(trio, GREEDY).records
        p, q = (np.eye(8)[each.argmax(1)] for each in logits[:2])
        believed, c = (torch.softmax(each, 1).numpy() for each in logits[1:])
        self.check(records, p, q, c, believed)
        assert set(records.acceptance) == {0.0, 1.0}


class TestOrder:
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_the_batch_does_not_matter(self, trio, collection, batch_size):
        assert_same(gather(trio, batch_size=batch_size).records, collection.records)

    def test_seeds_differ_between_prompts(self, trio):
        records = gather(trio, prompts=[[1], [1]]).records
        half = len(records) // 2
        assert not np.allclose(records.token_prob[:half], records.token_prob[half : 2 * half])

    def test_without_a_seed_the_seed_is_fixed(self, trio):
        unset, zero = (SamplingParams(max_tokens=5, seed=seed) for seed in (None, 0))
        assert_same(gather(trio, unset).records, gather(trio, zero).records)


class InterruptionError(Exception):
    pass


class TestResuming:
    def interrupted(self, trio, path, num_steps, **options):
        steps = iter(range(num_steps))

        def on_step(_):
            if next(steps, None) is None:
                raise InterruptionError

        with pytest.raises(InterruptionError):
            gather(trio, batch_size=3, checkpoint=path, on_step=on_step, **options)

    @pytest.mark.parametrize("every", [1, 100])
    def test_the_same_records_as_without_interruption(self, trio, collection, tmp_path, every):
        path = tmp_path / "partial"
        self.interrupted(trio, path, 9, prompts_per_checkpoint=every)
        saved = load_checkpoint(path, collection.provenance)
        assert 0 < len(saved) < len(PROMPTS)
        served = set()
        resumed = gather(
            trio,
            checkpoint=path,
            on_step=lambda requests: served.update(r.request_id for r in requests),
        )
        assert len(served) == len(PROMPTS) - len(saved)
        assert resumed.num_resumed == len(saved)
        assert resumed.num_prompts == len(PROMPTS)
        assert_same(resumed.records, collection.records)

    def test_a_finished_collection_is_not_done_again(self, trio, collection, tmp_path):
        path = tmp_path / "partial"
        gather(trio, checkpoint=path)
        served = []
        assert_same(
            gather(trio, checkpoint=path, on_step=served.append).records, collection.records
        )
        assert served == []

    def test_no_checkpoint_without_a_finished_prompt(self, trio, tmp_path):
        self.interrupted(trio, tmp_path / "partial", 1)
        assert not list(tmp_path.iterdir())

    def test_other_settings_are_refused(self, trio, tmp_path):
        path = tmp_path / "partial"
        gather(trio, checkpoint=path)
        for change, names in [
            ({"sampling": SamplingParams(max_tokens=12, temperature=0.5, seed=3)}, ["temperature"]),
            ({"sampling": SamplingParams(max_tokens=12, top_p=0.9, seed=4)}, ["top_p", "seed"]),
            ({"prompts": [[1], *PROMPTS[1:-1], [6, 3]]}, ["prompts"]),
            ({"num_speculative_tokens": 2}, ["num_speculative_tokens"]),
        ]:
            caught = error_of(gather, trio, checkpoint=path, **change, error=InvalidParameterError)
            assert caught.field == "output"
            assert str(path) in caught.message
            listed = caught.message.partition("settings: ")[2].partition("; ")[0]
            assert listed.count("now") == len(names)
            for name in names:
                assert f"{name} (" in listed

    def test_another_companion_is_refused(self, models, trio, tmp_path):
        path = tmp_path / "partial"
        gather(trio, checkpoint=path)
        other = Models(trio.target, trio.draft, trio.draft)
        with pytest.raises(InvalidParameterError, match="companion"):
            gather(other, checkpoint=path)

    def test_a_damaged_file_is_refused(self, trio, tmp_path):
        path = tmp_path / "partial"
        gather(trio, checkpoint=path)
        content = path.read_bytes()
        for share in [0, 0.1, 0.9]:
            path.write_bytes(content[: int(share * len(content))])
            error_of(
                gather,
                trio,
                checkpoint=path,
                error=InvalidParameterError,
                match="cannot resume from",
            )

    def test_a_profile_is_not_a_checkpoint(self, trio, tmp_path):
        AcceptanceProfile({}).save(tmp_path / "partial")
        with pytest.raises(InvalidParameterError, match="it is not a checkpoint"):
            gather(trio, checkpoint=tmp_path / "partial")

    def test_a_checkpoint_that_cannot_be_written(self, collection, tmp_path):
        with pytest.raises(InvalidParameterError, match="cannot write"):
            save_checkpoint(tmp_path / "no" / "partial", {0: collection.records}, {})


class TestErrors:
    def test_no_draft(self, trio):
        with pytest.raises(InvalidParameterError) as caught:
            gather(Models(trio.target))
        assert caught.value.field == "draft"

    def test_too_few_tokens_for_a_draft(self, trio):
        with pytest.raises(InvalidParameterError) as caught:
            gather(trio, SamplingParams(max_tokens=2))
        assert caught.value.field == "max_tokens"
        assert len(gather(trio, SamplingParams(max_tokens=3)).records) > 0

    def test_prompts_that_cannot_be_served_are_skipped(self, trio, collection):
        got = gather(trio, prompts=[*PROMPTS, [1] * 64, []])
        assert got.num_prompts == len(PROMPTS)
        assert [error.field for error in got.errors] == ["prompt", "prompt"]
        assert_same(got.records, collection.records)

    def test_no_prompt_can_be_served(self, trio):
        with pytest.raises(PromptError):
            gather(trio, prompts=[[1] * 64, []])


class TestProvenance:
    def test_contents(self, trio, collection):
        provenance = collection.provenance
        assert provenance["target"] == trio.target.fingerprint
        assert provenance["draft"] == trio.draft.fingerprint
        assert provenance["companion"] == trio.companion.fingerprint
        assert provenance["temperature"] == "1.0"
        assert provenance["num_prompts"] == "8"
        assert provenance["num_speculative_tokens"] == "3"
        assert provenance["torch"] == torch.__version__
        for name in ("top_p", "top_k", "min_p", "repetition_penalty", "prompts", "draftwise"):
            assert provenance[name]

    def test_without_companion(self, trio):
        assert gather(Models(trio.target, trio.draft)).provenance["companion"] == "none"


class TestUse:
    """A profile can only be used with the models it was made with."""

    @pytest.fixture
    def file(self, collection, tmp_path):
        fit_profile(collection.records, collection.provenance).save(tmp_path / "profile")
        return str(tmp_path / "profile")

    def use(self, models, file, policy, draft=DRAFT, companion=COMPANION, target=TARGET):
        speculation = unguarded(
            models.folder(draft),
            companion=None if companion is None else models.folder(companion),
            policy=policy,
            profile=file,
            num_speculative_tokens=3,
        )
        return LLM(models.folder(target), speculation, dtype="float32", max_batch_size=1)

    def test_the_same_models(self, models, file):
        llm = self.use(models, file, "fixed", companion=None)
        assert len(llm.generate([1], GREEDY)[0].token_ids) == 12

    def test_another_draft_or_target(self, models, file):
        with pytest.raises(InvalidParameterError, match="for another draft: file") as caught:
            self.use(models, file, "fixed", draft=COMPANION, companion=None)
        assert caught.value.field == "profile"
        with pytest.raises(InvalidParameterError, match="for another target: file"):
            self.use(models, file, "fixed", companion=None, target=COMPANION)


class TestJudges:
    """Several companions score the same drafts."""

    def test_each_judge_scores_as_it_does_alone(self, trio, models):
        other = load(models, companion=TARGET.draft(0.5, noise_seed=4))
        both = replace(trio, judges=(other.companion, trio.target))
        found, alone = gather(both), gather(other)
        assert_same(found.records, gather(trio).records)
        assert len(found.judged) == 2
        assert_same(found.judged[0], alone.records)
        # The target's own judgement is the acceptance.
        told = found.judged[1]
        np.testing.assert_allclose(told.agreement, told.acceptance, atol=1e-4)

    def test_an_interrupted_collection_goes_on(self, trio, models, tmp_path):
        other = load(models, companion=TARGET.draft(0.5, noise_seed=4))
        both, file = replace(trio, judges=(other.companion,)), tmp_path / "part.safetensors"
        whole = gather(both)
        gather(both, checkpoint=file)
        part = dict(list(load_checkpoint(file, whole.provenance).items())[:3])
        save_checkpoint(file, part, whole.provenance)
        again = gather(both, checkpoint=file)
        assert again.num_resumed == 3
        assert_same(again.records, whole.records)
        assert_same(again.judged[0], whole.judged[0])
        assert np.array_equal(again.prompts, whole.prompts)

    def test_prompts_of_tokens(self, collection):
        assert len(collection.prompts) == len(collection.records)
        assert set(collection.prompts) <= set(range(len(PROMPTS)))
        assert (np.diff(collection.prompts) >= 0).all()


@pytest.mark.parametrize("has_confidence", [True, False])
def test_what_a_confidence_head_estimates_is_recorded(models, tmp_path, has_confidence):
    head = HEAD.changed(markov="vanilla", confidence=has_confidence, discards_anchor=False)
    llm = LLM(models.folder(HEAD_TARGET), dtype="float32", max_batch_size=1)
    trio = llm.load_models(unguarded(head.save(tmp_path / "head", "deepspec"), policy="fixed"))
    confidence = gather(trio).records.confidence
    assert ((confidence > 0) & (confidence < 1)).all() == has_confidence
    assert confidence.any() == has_confidence
