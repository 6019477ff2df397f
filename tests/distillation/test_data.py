"""The time that the answers of a run take."""

import json

import pytest

from draftwise.distillation import data
from draftwise.distillation.answers import Answered
from draftwise.distillation.data import collect
from draftwise.distillation.settings import Machine, TrainingSettings
from draftwise.errors import InvalidParameterError

from ..tiny_models import Recipe

TARGET = Recipe(vocab=40, context=64, tokenizer=True)


@pytest.fixture
def settings(models, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in ("red", "sea", "a")))
    return TrainingSettings(
        "eagle3", models.folder(TARGET), (str(file),), minutes=10, max_tokens=24, length=48
    )


def collected(settings, tmp_path):
    machine = Machine("float32", "cpu", answers=tmp_path)
    return collect(settings, machine, lambda text: None)


def test_all_answers_share_one_budget(settings, monkeypatch, tmp_path):
    limits = []

    def answer(llm, jobs, cache, max_tokens, *, on_progress, **given):
        limits.append(given)
        return Answered([(job, (1, 2, 3)) for job in jobs], 50.0)

    monkeypatch.setattr(data, "answer", answer)
    assert collected(settings, tmp_path).seconds == 100.0
    # 30 % of ten minutes, at most a third of it for held-out prompts.
    assert limits == [{"seconds": pytest.approx(60)}, {"seconds": pytest.approx(130)}]


def test_a_run_needs_a_held_out_answer(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "answer", lambda *arguments, **limits: Answered([], 60.0))
    with pytest.raises(InvalidParameterError, match="no held-out prompt") as caught:
        collected(settings, tmp_path)
    assert caught.value.field == "minutes"
