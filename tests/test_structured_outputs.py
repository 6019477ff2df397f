import copy
import pickle

import pytest

from draftwise import SamplingParams, StructuredOutputs
from draftwise.errors import InvalidParameterError
from draftwise.values import MAX_NESTING

GOOD = {
    "json_schema": {"type": "object", "properties": {"a": {"enum": [1, None, "é"]}}},
    "json_object": True,
    "regex": "[ab]+",
    "choice": ("yes", "no"),
    "grammar": 'start: "a"',
}
BAD = {
    "json_schema": ["object", "{}", True, [1], {"a": {1, 2}}, {"a": float("nan")}, {"a": object()}],
    "json_object": ["yes", 1],
    "regex": ["", 5, ["a"], "\ud800"],
    "choice": ["yes", (), [], [""], [1], ["a", None], ["\ud800"], {"a": 1}],
    "grammar": ["", 5, b"start"],
}


@pytest.mark.parametrize("name", GOOD)
def test_each_kind_is_stored(name):
    grammar = StructuredOutputs(**{name: GOOD[name]})
    assert grammar.kind == name
    assert getattr(grammar, name) == GOOD[name]
    assert grammar == StructuredOutputs(**{name: GOOD[name]})
    assert hash(grammar) == hash(StructuredOutputs(**{name: GOOD[name]}))


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_errors_name_the_field(name, value):
    with pytest.raises(InvalidParameterError) as caught:
        StructuredOutputs(**{name: value})
    assert caught.value.field == f"structured_outputs.{name}"


@pytest.mark.parametrize(
    "given", [{}, {"json_object": False}, {"regex": "a", "choice": ("a",)}, {**GOOD}]
)
def test_exactly_one_field_is_required(given):
    with pytest.raises(InvalidParameterError, match="exactly one") as caught:
        StructuredOutputs(**given)
    assert caught.value.field == "structured_outputs"


def test_the_schema_is_a_copy():
    schema = {"type": "object", "properties": {}}
    grammar = StructuredOutputs(json_schema=schema)
    schema["properties"]["a"] = {"type": "string"}
    assert grammar.json_schema == {"type": "object", "properties": {}}


@pytest.mark.parametrize("name", GOOD)
def test_parameters_with_a_grammar_are_copied_and_read(name):
    params = SamplingParams(structured_outputs=StructuredOutputs(**{name: GOOD[name]}))
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
    assert SamplingParams.from_dict({"structured_outputs": {name: GOOD[name]}}) == params
    assert hash(params) == hash(copy.copy(params))


def deep_schema(levels):
    """A value of nested arrays with the given depth."""
    schema = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def deep_list(levels):
    """A schema with the given nesting of objects and lists."""
    value = 1
    for _ in range(levels - 1):
        value = [value]
    return {"const": value}


@pytest.mark.parametrize("make", [deep_schema, deep_list])
def test_a_schema_of_maximum_depth(make):
    """It can be pickled and formatted."""
    grammar = StructuredOutputs(json_schema=make(MAX_NESTING))
    params = SamplingParams(structured_outputs=grammar)
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert repr(params)


@pytest.mark.parametrize("make", [deep_schema, deep_list])
@pytest.mark.parametrize("levels", [MAX_NESTING + 1, 1000, 100_000])
def test_a_too_deep_schema(make, levels):
    with pytest.raises(InvalidParameterError, match="deeper than 100 levels") as caught:
        StructuredOutputs(json_schema=make(levels))
    assert caught.value.field == "structured_outputs.json_schema"


def test_a_recursive_schema():
    schema = {}
    schema["items"] = schema
    with pytest.raises(InvalidParameterError, match="deeper than 100 levels"):
        StructuredOutputs(json_schema=schema)


@pytest.mark.parametrize("name", ["choice", "json_schema", "regex"])
def test_values_too_deep_for_a_message(name):
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidParameterError) as caught:
        StructuredOutputs(**{name: value})
    assert len(str(caught.value)) < 400


def test_unknown_keys_are_named():
    with pytest.raises(InvalidParameterError, match="did you mean 'regex'") as caught:
        SamplingParams.from_dict({"structured_outputs": {"regx": "a"}})
    assert caught.value.field == "structured_outputs.regx"


def test_ignore_eos_is_rejected():
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)
    assert caught.value.field == "ignore_eos"
