import math
from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

from draftwise.training.loop import Runtime
from draftwise.training.schedule import Schedule
from draftwise.zoo.evaluation import by_source, mean_acceptance, mean_loss
from draftwise.zoo.recipe import MIXTURE, STAGES
from draftwise.zoo.tokens import PackedStream, held_out_rows
from draftwise.zoo.train import _parser, configure_stage
from draftwise.zoo.training import (
    distillation_trainer,
    forward_kl,
    sample_continuations,
    text_trainer,
)

from .conftest import TINY_SCHEDULE, new_model, random_source, tiny_stage

pytestmark = pytest.mark.slow

RUNTIME = Runtime(torch.device("cpu"), compile=False)


def trainer(folder, corpus, stage):
    stream = PackedStream(corpus.training, stage.mixture, stage.seed)
    return text_trainer(new_model(stage), stage.schedule, stream, folder, RUNTIME)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path, corpus):
    stage = tiny_stage("target", 1)
    whole = trainer(tmp_path / "whole", corpus, stage)
    whole.run()
    for _ in range(3):
        part = trainer(tmp_path / "parts", corpus, stage)
        part.run(max_steps=1)
    assert part.progress == whole.progress == 1.0
    assert part.num_steps == whole.num_steps == 3
    again = trainer(tmp_path / "whole", corpus, stage)
    again.run()
    assert again.num_steps == 3
    for name, weight in whole.task.model.state_dict().items():
        assert torch.equal(weight, part.task.model.state_dict()[name]), name
    for name, weight in new_model(stage).named_parameters():
        assert not torch.equal(weight, whole.task.model.state_dict()[name]), name


def test_distillation_resumes(tmp_path, corpus):
    stage = tiny_stage("draft", 2, distilled=True)
    results = []
    for folder, steps in (("whole", [None]), ("parts", [1, 1, 1])):
        teacher = new_model(tiny_stage("target", 1))
        for max_steps in steps:
            part = distillation_trainer(
                new_model(stage),
                teacher,
                stage,
                stage.distillation,
                corpus,
                tmp_path / folder,
                RUNTIME,
            )
            part.run(max_steps)
        results.append(part.task.model.state_dict())
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name]), name


def test_forward_kl():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    assert forward_kl(student, teacher) == pytest.approx(expected.item(), rel=1e-5)
    assert forward_kl(teacher, teacher).abs() < 1e-6


def test_continuations_keep_their_prompts():
    model = new_model(tiny_stage("target", 1))
    prompts = held_out_rows(random_source(5), 8, 40)
    rows = sample_continuations(model, prompts, 6, seed=0)
    assert rows.shape == (len(prompts), 9 + 6)
    assert (rows[:, :9] == prompts).all()
    assert (rows == sample_continuations(model, prompts, 6, seed=0)).all()


def test_scores(corpus):
    draft, target = (new_model(tiny_stage("m", seed)) for seed in (1, 2))
    losses = by_source("loss", partial(mean_loss, draft), corpus.held_out, MIXTURE, 1000, 16)
    assert set(losses) == {"loss", *(f"loss/{name}" for name in MIXTURE)}
    assert all(math.isfinite(loss) for loss in losses.values())
    score = partial(mean_acceptance, draft, target)
    values = by_source("acceptance", score, corpus.held_out, MIXTURE, 1000, 16)
    assert all(0 < value < 1 for value in values.values())
    rows = held_out_rows(corpus.held_out["docs"], 16, 100)
    assert mean_acceptance(draft, draft, rows, first=3) == pytest.approx(1.0, abs=1e-5)


def test_schedule():
    schedule = Schedule(tokens=1000, warmup_fraction=0.1, decay_fraction=0.5, long_fraction=0.2)
    factors = [schedule.learning_rate_factor(progress / 20) for progress in range(21)]
    assert 0 < factors[0] < factors[1] < 1
    assert factors[3:11] == [1.0] * 8
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == 0
    assert [schedule.row_length(p) for p in (0.0, 0.79, 0.81)] == [512, 512, 2048]


def test_minutes_bound_the_schedule():
    schedule = Schedule(tokens=1000, minutes=2.0)
    assert schedule.progress(500, 30.0) == 0.5
    assert schedule.progress(500, 90.0) == 0.75
    assert schedule.progress(500, 1e6) == 1.0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (192, 192)),
        (["--tokens", "768"], (384, 384)),
        (["--tokens", "1"], (1, 1)),
    ],
)
def test_tokens_of_the_command_line_are_the_whole_stage(options, expected):
    arguments = _parser().parse_args(["--data", "d", "--out", "o", "--minutes", "6", *options])
    stage = configure_stage(tiny_stage("draft", 1, distilled=True), arguments)
    schedules = (stage.schedule, stage.distillation.schedule)
    assert tuple(schedule.tokens for schedule in schedules) == expected
    assert [schedule.minutes for schedule in schedules] == [3, 3]


@pytest.mark.parametrize("name", [name for name in STAGES if name != "hybrid"])
def test_shapes_of_the_family(name):
    with torch.device("meta"):
        model = LlamaForCausalLM(STAGES[name].shape.config())
    assert model.config.vocab_size == 4096
    assert model.config.tie_word_embeddings
    largest = {"target": 9e6, "mid": 2.6e6, "companion": 1.2e6, "draft": 9e5, "spare": 8e5}
    assert 0.6 * largest[name] < model.num_parameters() <= largest[name]


def test_small_models_differ():
    small = [STAGES[name] for name in ("draft", "companion", "spare")]
    assert len({stage.shape for stage in small}) == len({stage.seed for stage in small}) == 3


def test_steps_are_logged(tmp_path, corpus, capsys):
    stage = tiny_stage("target", 1)
    stream = PackedStream(corpus.training, stage.mixture, 1)
    runtime = Runtime(torch.device("cpu"), compile=False, log_seconds=0, evaluate_seconds=0)
    text_trainer(
        new_model(stage),
        TINY_SCHEDULE,
        stream,
        tmp_path,
        runtime,
        evaluate=lambda model: {"validation": 1.0},
    ).run()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert capsys.readouterr().out.splitlines() == lines
