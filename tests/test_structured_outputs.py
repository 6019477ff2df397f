import copy
import pickle

import pytest

from draftwise import SamplingParams, StructuredOutputs
from draftwise.errors import InvalidParameterError
from draftwise.values import MAX_NESTING

from .refusals import error_of

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


def test_each_kind_is_stored_copied_and_read():
    for name, value in GOOD.items():
        grammar = StructuredOutputs(**{name: value})
        assert (grammar.kind, getattr(grammar, name)) == (name, value)
        params = SamplingParams(structured_outputs=grammar)
        for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
            assert other == params
        assert SamplingParams.from_dict({"structured_outputs": {name: value}}) == params
        assert hash(params) == hash(copy.copy(params))


def test_errors_name_the_field():
    for name, values in BAD.items():
        for value in values:
            error = error_of(StructuredOutputs, error=InvalidParameterError, **{name: value})
            assert error.field == f"structured_outputs.{name}", value


def test_exactly_one_field_is_required():
    for given in ({}, {"json_object": False}, {"regex": "a", "choice": ("a",)}, GOOD):
        error = error_of(StructuredOutputs, error=InvalidParameterError, **given)
        assert error.field == "structured_outputs"
        assert "exactly one" in error.message


def test_the_schema_is_a_copy():
    schema = {"type": "object", "properties": {}}
    grammar = StructuredOutputs(json_schema=schema)
    schema["properties"]["a"] = {"type": "string"}
    assert grammar.json_schema == {"type": "object", "properties": {}}


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


def test_a_schema_of_maximum_depth():
    """It can be pickled and formatted."""
    for make in [deep_schema, deep_list]:
        grammar = StructuredOutputs(json_schema=make(MAX_NESTING))
        params = SamplingParams(structured_outputs=grammar)
        assert pickle.loads(pickle.dumps(params)) == params, make
        assert copy.deepcopy(params) == params, make
        assert repr(params), make


def test_a_too_deep_schema():
    recursive = {}
    recursive["items"] = recursive
    made = [make(n) for make in (deep_schema, deep_list) for n in (MAX_NESTING + 1, 100_000)]
    for schema in (recursive, *made):
        caught = error_of(
            StructuredOutputs,
            json_schema=schema,
            error=InvalidParameterError,
            match="deeper than 100 levels",
        )
        assert caught.field == "structured_outputs.json_schema"


def test_values_too_deep_for_a_message():
    value = []
    for _ in range(100_000):
        value = [value]
    for name in ("choice", "json_schema", "regex"):
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
