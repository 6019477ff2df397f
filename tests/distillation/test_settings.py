"""Settings that belong to one kind of draft."""

import json

from draftwise.distillation.run import RECIPES
from draftwise.distillation.settings import KINDS, TrainingSettings
from draftwise.errors import InvalidParameterError

from ..refusals import error_of


def settings(kind, **own):
    return TrainingSettings(kind, "zoo:target", ("prompts.jsonl",), tokens=1, **own)


def test_every_kind_has_a_recipe():
    assert list(RECIPES) == list(KINDS)


def test_settings_of_other_kinds_are_refused():
    for kind, own, field in [
        ("head", {}, "kind"),
        ("model", {"start_from": "head"}, "start_from"),
        ("exit", {"exit": 2, "num_layers": 3}, "num_layers"),
        ("exit", {}, "exit"),
        ("eagle3", {"draft": "draft"}, "draft"),
        ("companion", {"hidden_size": 100}, "hidden_size"),
    ]:
        caught = error_of(settings, kind, **own, error=InvalidParameterError)
        assert caught.field == field


def test_settings_of_other_kinds_are_not_recorded():
    found = settings("model").recorded()
    assert {"num_layers", "hidden_size", "loss", "seed"} <= found.keys()
    assert not {"exit", "draft", "num_steps", "start_from"} & found.keys()
    json.dumps(found)


def test_a_head_that_is_trained_further_keeps_its_vocabulary_and_layers():
    assert {"draft_vocab", "layers"} <= settings("eagle3").recorded().keys()
    continued = settings("eagle3", start_from="head").recorded()
    assert not {"draft_vocab", "layers"} & continued.keys()
