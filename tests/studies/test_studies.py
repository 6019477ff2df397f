"""Every study of the registry, on tiny models: measuring, drawing and describing."""

import json
from dataclasses import replace

import numpy as np
import pytest

from draftwise import zoo
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.studies.catalogue import STUDIES, study_class
from draftwise.studies.cost_ratio import CostRatio
from draftwise.studies.positions import Text, read_texts
from draftwise.studies.settings import StudySettings
from draftwise.studies.study import HOLDS, HOLDS_NOT, PARTLY, Finding
from draftwise.studies.tasks import file_tasks, load_tasks
from draftwise.studies.workbench import Workbench, same_distribution
from draftwise.studies.writing import about, read, redraw, write_page, write_study
from draftwise.zoo import bundled

from ..tiny_heads import HeadRecipe
from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

NAMES = ("target", "draft", "companion")
GROUP = "multi-turn conversation"
TARGET = Recipe(vocab=300, context=128, tokenizer=True)
HEAD = HeadRecipe(vocab=300, draft_vocab=40, layer={"max_position_embeddings": 128})
OTHERS = tuple(TARGET.draft(0.2, noise_seed=seed) for seed in (1, 2, 3))


def write_prompts(folder):
    lines = [
        {"question": text, "category": category}
        for category in ("letters", "writing", "math")
        for text in ("abc", "a bed", "hi", "fed a cab", "dad", "bee", "a cafe", "face")
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def settings(models, tmp_path_factory):
    draft, companion, other = (models.folder(recipe) for recipe in OTHERS)
    return StudySettings(
        prompts=(write_prompts(tmp_path_factory.mktemp("prompts")),),
        target=models.folder(TARGET),
        draft=draft,
        companion=companion,
        models=(draft, companion, other),
        head=HEAD.save(tmp_path_factory.mktemp("heads") / "head", "speculators"),
        num_prompts=3,
        max_tokens=12,
        long_text=24,
        batch_sizes=(1, 3),
        contexts=(8, 20),
        cost_ratios=(0.5, 0.2),
        rounds=2,
        turn=0.001,
        warm_up_steps=2,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def bench(settings):
    made = Workbench(settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bundled_bench(models, settings, tmp_path_factory):
    """A workbench with the tiny models as bundled ones, which a study inflates."""
    weights = tmp_path_factory.mktemp("weights")
    for name, recipe in zip(NAMES, (TARGET, *OTHERS[:2]), strict=True):
        (weights / name).symlink_to(models.folder(recipe))
    target, draft, companion = (zoo.PREFIX + name for name in NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundled, "_WEIGHTS", weights)
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(bundled, "cache_folder", lambda: cache)
        made = Workbench(replace(settings, target=target, draft=draft, companion=companion))
        yield made
        made.close()


@pytest.fixture(scope="module")
def bench_without_companion(settings):
    made = Workbench(replace(settings, companion=None, models=(settings.draft,)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def write(bench, bundled_bench, settings, results):
    """Measures a study and writes its results."""

    def written(name):
        study = study_class(name)()
        measured = study.measure(bundled_bench if name == CostRatio.name else bench)
        return write_study(results / name, study, measured, about(settings, 1.0, "a command"))

    return written


@pytest.mark.parametrize("name", STUDIES)
def test_a_study(name, write, settings, results):
    study = study_class(name)()
    description = write(name)
    assert len(description.text) > 60
    assert "nan" not in description.text
    for finding in description.findings:
        assert finding.verdict in (HOLDS, HOLDS_NOT, PARTLY)
        assert finding.source
        assert finding.ours
    content = read(results / name)
    assert content["study"] == name
    assert content["settings"]["prompts"] == ["questions.jsonl"]
    # Where files lie is nobody's business.
    assert str(settings.prompts[0].parent) not in json.dumps(content["settings"]["prompts"])
    svg = (results / name / "figure.svg").read_text()
    assert "<svg" in svg
    assert len(svg) < 200_000
    assert (results / name / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert study.title in (results / name / "text.md").read_text()


def test_long_texts_are_cut_only_where_they_are_asked_for(bench):
    """Also if long texts are no longer than the others."""
    num_tokens = bench.settings.max_tokens
    few = bench.texts(max_tokens=num_tokens)
    every = bench.texts()
    assert few is not every
    assert few is bench.texts(max_tokens=num_tokens)
    assert [len(text.tokens) for text in few] == [len(t.tokens) for t in every[: len(few)]]


@pytest.mark.parametrize(
    "name", [name for name, study in STUDIES.items() if not study.needs_companion]
)
def test_a_study_without_a_companion(name, bench_without_companion):
    """The target and a draft are enough."""
    study = study_class(name)
    study.check_models(bench_without_companion.settings)
    data = json.loads(json.dumps(study().measure(bench_without_companion)))
    assert "nan" not in study().describe(data).text


def test_studies_that_require_a_companion_check_it(settings):
    alone = replace(settings, companion=None)
    for name, study in STUDIES.items():
        if name != CostRatio.name:
            study.check_models(settings)
        if study.needs_companion:
            with pytest.raises(InvalidParameterError, match=f"{name} requires a companion"):
                study.check_models(alone)


def test_only_bundled_models_are_inflated_to_a_cost_ratio(settings, bundled_bench):
    CostRatio.check_models(bundled_bench.settings)
    for role in ("target", "draft", "companion"):
        own = replace(bundled_bench.settings, **{role: getattr(settings, role)})
        with pytest.raises(InvalidParameterError, match="inflates models of the zoo") as caught:
            CostRatio.check_models(own)
        assert caught.value.field == role


def test_redraw_reproduces_the_files(write, results):
    name = "bounds"
    folder = results / name
    if not folder.is_dir():  # another process ran its test
        write(name)
    before = {file: (folder / file).read_bytes() for file in ("data.json", "figure.svg", "text.md")}
    (folder / "figure.svg").unlink()
    (folder / "text.md").unlink()
    redraw(results, [name])
    assert {file: (folder / file).read_bytes() for file in before} == before


def test_one_page_of_all(write, results):
    for name in STUDIES:
        if not (results / name).is_dir():  # another process ran its test
            write(name)
    text = write_page(results).read_text()
    assert text.count("<svg") == len(STUDIES)
    for study in STUDIES.values():
        assert study.title.replace("'", "&#39;") in text


def test_docstrings_name_their_source():
    for study in STUDIES.values():
        module = __import__(study.__module__, fromlist=["__doc__"])
        assert "Recomputes" in module.__doc__ or "goes beyond the sources" in module.__doc__
        assert study.title
        assert study.source


def test_an_unknown_study_suggests_the_closest_name():
    with pytest.raises(InvalidParameterError, match="did you mean 'bounds'"):
        study_class("bound")


def test_a_verdict():
    assert Finding.of("a", "b", True).verdict == HOLDS
    assert Finding.of("a", "b", [True, False]).verdict == PARTLY
    assert Finding.of("a", "b", [False, False]).verdict == HOLDS_NOT


def test_distributions_equal_those_of_transformers(models, bench):
    """Whole texts in one pass, compared with the logits of transformers."""
    text = Text([3, 4, 5, 6], [7, 8, 9, 10, 11])
    (passage,) = read_texts(bench.models(), [text], temperature=0.7)
    ids = [*text.prompt, *text.tokens]
    for recipe, found in ((TARGET, passage.p), (OTHERS[0], passage.q), (OTHERS[1], passage.c)):
        reference = models.reference(recipe)
        logits = reference(input_ids=reference.dummy_inputs["input_ids"].new_tensor([ids])).logits
        expected = (logits[0, 3:8] / 0.7).softmax(dim=-1).detach()
        assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-5)


def test_acceptance_of_positions_equals_that_of_drafts(bench):
    """The mean acceptance computed from the target's texts equals that observed while drafting."""
    positions = bench.positions()
    records = bench.collection().records
    first = records.position == 0
    assert positions.acceptance.mean() == pytest.approx(records.acceptance[first].mean(), abs=0.1)


def test_an_inflated_model_is_replaced_by_its_origin():
    assert same_distribution("zoo:target@200m") == "zoo:target"
    assert same_distribution("org/model@main") == "org/model@main"


def test_prompts_of_a_length(bench):
    prompts = bench.prompts_of_length(50, 4)
    assert [len(prompt) for prompt in prompts] == [50] * 4
    assert len({tuple(prompt) for prompt in prompts}) > 1


def test_tasks_are_groups_of_spec_bench_or_files(bench, settings, tmp_path):
    assert [task.name for task in bench.tasks] == ["questions", GROUP]
    assert [len(task.prompts) for task in bench.tasks] == [3, 3]
    paths = [tmp_path / f"{name}.jsonl" for name in ("pack_java", "pack_cpp", "other_one")]
    assert list(file_tasks(paths).values()) == ["pack", "pack", "other_one"]


def test_prompts_that_are_all_too_long(bench, settings):
    with pytest.raises(PromptError, match="prompts: no prompt"):
        load_tasks(bench.quick(), settings.prompts, 2, 1, True, 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_prompts": 1}, "num_prompts"),
        ({"rounds": 0}, "rounds"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"num_speculative_tokens": 1000}, "num_speculative_tokens"),
        ({"turn": 0.0}, "turn"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"contexts": (0,)}, "contexts"),
        ({"prompts": ()}, "prompts"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_settings_out_of_range(changes, field, tmp_path):
    with pytest.raises(InvalidParameterError) as error:
        StudySettings(**({"prompts": (tmp_path,)} | changes))
    assert error.value.field == field


def test_overlap_with_the_target_is_the_mean_acceptance(bench, settings):
    """S of draft and target is the mean acceptance probability of tokens from the draft."""
    told = bench.collection(companion=settings.target).records
    assert np.allclose(told.agreement, told.acceptance, atol=1e-5)
