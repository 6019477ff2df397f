"""Default models of commands."""

import pytest

from draftwise.cli.defaults import Zoo, choose_models
from draftwise.errors import InvalidParameterError

ZOO = Zoo("zoo:target", "zoo:draft", "zoo:companion", ("zoo:draft", "zoo:companion"))


def chosen(*names, **others):
    models = choose_models(ZOO, *names, **others)
    return models.target, models.draft, models.companion, models.models


def test_zoo_models_are_defaults_for_zoo_targets():
    whole = ("zoo:target", "zoo:draft", "zoo:companion", ("zoo:draft", "zoo:companion"))
    assert chosen(None, None) == whole
    assert chosen("zoo:target", None) == whole
    assert chosen(None, "zoo:draft", "zoo:companion") == whole
    assert chosen("zoo:target@200m", None)[:2] == ("zoo:target@200m", "zoo:draft")
    assert chosen(None, "zoo:companion", "draft:int8")[1:3] == ("zoo:companion", "draft:int8")
    assert chosen("zoo:target", "own")[:3] == ("zoo:target", "own", "zoo:companion")


def test_zoo_models_are_not_defaults_for_other_targets():
    assert chosen("own", None) == ("own", None, None, ())
    assert chosen("own", "d") == ("own", "d", None, ("d",))
    assert chosen("own", "d", "c") == ("own", "d", "c", ("d", "c"))
    assert chosen("own", "d", "draft:int8") == ("own", "d", "draft:int8", ("d",))
    assert chosen("own", "d", "c", models=("d", "e")) == ("own", "d", "c", ("d", "e"))


@pytest.mark.parametrize("draft", ["suffix", "ngram"])
def test_drafts_without_a_model(draft):
    """They are known without a target, and bring no companion."""
    assert chosen(None, draft)[:3] == ("zoo:target", draft, None)
    assert chosen("own", draft) == ("own", draft, None, ())
    models = choose_models(ZOO, "own", draft)
    assert models.require_draft("a") == draft
    with pytest.raises(InvalidParameterError, match=f"must be a model, got '{draft}'; a") as info:
        models.require_draft_model("a")
    assert info.value.field == "draft"


def test_draft_none_disables_the_draft():
    for target in (None, "zoo:target", "own"):
        models = choose_models(ZOO, target, "none")
        assert models.draft is None
        assert models.companion is None
        assert not models.draft_is_missing
    assert choose_models(ZOO, "own", None).draft_is_missing
    assert not choose_models(ZOO, None, None).draft_is_missing


@pytest.mark.parametrize(
    ("named", "flag"),
    [
        ({"draft": "own"}, "--draft"),
        ({"draft": None, "companion": "own"}, "--companion"),
        ({"draft": None, "models": ("zoo:draft", "own")}, "--models"),
    ],
)
def test_small_models_from_outside_the_zoo_need_a_target(named, flag):
    with pytest.raises(InvalidParameterError, match=rf"missing: {flag} .*'own'.*--target") as info:
        choose_models(ZOO, None, **named)
    assert info.value.field == "target"


def test_a_draft_can_be_required():
    assert choose_models(ZOO, "own", "d").require_draft("a") == "d"
    with pytest.raises(InvalidParameterError, match=r"missing: this needs one; .*--draft") as info:
        choose_models(ZOO, "own", None).require_draft("this needs one")
    assert info.value.field == "draft"
