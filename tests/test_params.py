import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise import RequestSpeculation, SamplingParams, SpeculationConfig, StructuredOutputs
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.speculation import MAX_SPECULATIVE_TOKENS, MAX_TREE_WIDTH

from .refusals import error_of

NOT_NUMBERS = ["1", b"1", None, True, [1], math.nan, math.inf, -math.inf, np.bool_(True), 10**400]
NOT_INTEGERS = ["1", b"1", None, True, [1], 1.0, math.nan, np.float32(1), np.bool_(True)]


def nested(levels):
    """A list nested to a given depth."""
    value = 1
    for _ in range(levels):
        value = [value]
    return value


# Per field: values outside its range, values of another kind, and values at its ends.
BAD_SAMPLING = {
    "max_tokens": [-1, *NOT_INTEGERS],
    "temperature": [-0.1, 1e-9, 1e5, *NOT_NUMBERS],
    "top_p": [0, -0.5, 1.01, *NOT_NUMBERS],
    "top_k": [-2, *NOT_INTEGERS],
    "min_p": [-0.01, 1.5, *NOT_NUMBERS],
    "repetition_penalty": [0, -1.0, 1e-9, 1e9, *NOT_NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "logit_bias": [
        {-1: 1.0},
        {"1": 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {1: 101.0},
        {1: -101},
        {1: math.nan},
        {1: "a"},
        [1, 2],
        "ab",
        5,
        None,
    ],
    "stop": ["", ("a", ""), (1,), ["a", None], 5, None, {"a": 1}, b"ab"],
    "stop_token_ids": [(-1,), (1.0,), ("1",), (True,), 5, None, "12", {1: 2}],
    "ignore_eos": [1, 0, "yes", None],
    "seed": [1.5, "1", True, 2**64, -(2**63) - 1],
    "logprobs": [-1, 21, 1.0, "1", True],
    "min_tokens": [-1, 129, *NOT_INTEGERS],
    "prompt_logprobs": [-1, 21, 1.0, "1", True],
    "structured_outputs": ["json", {"regex": "a"}, True],
    "cache_salt": [None, 5, b"salt", ["salt"]],
}
GOOD_SAMPLING = {
    "max_tokens": [0, 1, 10**9],
    "temperature": [0, 0.0, 1e-4, 1, 2.5, 100.0],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [0, 1, 10**9],
    "min_p": [0, 0.0, 0.3, 1],
    "repetition_penalty": [1e-3, 1, 2.0],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "logit_bias": [{}, {0: 100}, {3: -100.0, 7: 0.5}],
    "stop": ["a", (), ("a", "bc"), ["a", "bc"]],
    "stop_token_ids": [(), (0,), [1, 2]],
    "ignore_eos": [True, False],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "logprobs": [None, 0, 20],
    "min_tokens": [0, 1, 128],
    "prompt_logprobs": [None, 0, 20],
    "structured_outputs": [None, StructuredOutputs(regex="a"), StructuredOutputs(choice=["a"])],
    "cache_salt": ["", "salt"],
}
BAD_SPECULATION = {
    "draft": ["", 5, [], ["a", 5], ["a", ""], {"a": 1}],
    "corpus": ["", 5, ["a", 5], None],
    "corpus_tokens": [0, 2**30 + 1, *NOT_INTEGERS],
    "remember_outputs": [1, "yes", None],
    "guard": [1, "yes", None],
    "companion": ["", 5, ["a"], "draft:int7", "draft:", "draft:INT8"],
    "policy": ["", 5],
    "profile": ["", 5],
    "latency_profile": ["", 5],
    "num_speculative_tokens": [-1, MAX_SPECULATIVE_TOKENS + 1, *NOT_INTEGERS],
    "tree_width": [0, MAX_TREE_WIDTH + 1, *NOT_INTEGERS],
    "policy_options": [5, "ab", None, [1], {1: 2}, {"a": nested(100)}, {"a": nested(100_000)}],
    "lenience": [0, -0.5, 1.01, *NOT_NUMBERS, {}, {1: 0.5}],
    "verification": ["", "tokens", None, 1, ["block"], np.array(["block", "token"])],
    "proposals": ["", "greedy", 1, ["sampled"], np.array(["one-hot", "sampled"])],
    "method": ["", "draft_model", "eagle2", 3, ["eagle"], np.array(["eagle", "eagle3"])],
}
GOOD_SPECULATION = {
    "draft": [None, "suffix", "zoo:draft", "/a/b", "/a,b", ("suffix", "zoo:draft")],
    "corpus": [(), ("a.jsonl", "b")],
    "corpus_tokens": [1, 2**30],
    "remember_outputs": [True, False],
    "guard": [True, False],
    "companion": [None, "zoo:companion", "draft:int8"],
    "policy": [None, "none", "fixed"],
    "profile": [None, "profile.safetensors"],
    "latency_profile": [None, "latency.json"],
    "num_speculative_tokens": [0, MAX_SPECULATIVE_TOKENS],
    "tree_width": [1, MAX_TREE_WIDTH],
    "policy_options": [{}, {"a": 1}],
    "lenience": [1, 1.0, 0.01, {0: 1.0, 16: 0.8}],
    "verification": ["block", "token"],
    "proposals": [None, "one-hot", "sampled"],
    "method": [None, "eagle", "eagle3", "dflash", "dspark"],
}


def each(cases):
    return [(name, value) for name, values in cases.items() for value in values]


def names(cls):
    return {field.name for field in dataclasses.fields(cls)}


def test_the_tables_above_contain_every_field():
    assert BAD_SAMPLING.keys() == GOOD_SAMPLING.keys() == names(SamplingParams)
    assert BAD_SPECULATION.keys() == GOOD_SPECULATION.keys() == names(SpeculationConfig)


def test_errors_name_invalid_sampling_parameters():
    for name, value in each(BAD_SAMPLING):
        error = error_of(SamplingParams, error=InvalidParameterError, **{name: value})
        assert error.field == name, value
        assert isinstance(error, ValueError)
        assert str(error).startswith(f"{name}: ")


def test_valid_sampling_parameters():
    for name, value in each(GOOD_SAMPLING):
        kept = getattr(SamplingParams(**{name: value}), name)
        if name == "stop":
            assert kept == ((value,) if isinstance(value, str) else tuple(value))
        elif name == "stop_token_ids":
            assert kept == tuple(value)
        else:
            assert kept == value, name


def test_errors_name_invalid_speculation_parameters():
    for name, value in each(BAD_SPECULATION):
        values = {"draft": "zoo:draft", name: value}
        error = error_of(SpeculationConfig, error=InvalidParameterError, **values)
        assert error.field == name, value


def test_valid_speculation_parameters():
    for name, value in each(GOOD_SPECULATION):
        config = SpeculationConfig(**{"draft": "zoo:draft", name: value})
        assert getattr(config, name) == value, name


def test_errors_name_invalid_lenience_by_load():
    for start, value in ((0, 0.0), ("5", 2), (-1, 1.0), ("many", 1.0), (True, 1.0)):
        error = error_of(SpeculationConfig, "zoo:draft", lenience={0: 1.0, start: value})
        assert error.field == f"lenience.{start}"


def test_a_quantised_draft_as_companion():
    def bits(companion):
        return SpeculationConfig("d", companion=companion).companion_quantization

    assert bits(None) is None
    assert bits("zoo:companion") is None
    assert bits("./draft:int7") is None
    assert bits("draft:int4") == "int4"
    with pytest.raises(InvalidParameterError, match="'draft:int8' and 'draft:int4'"):
        bits("draft:int7")


def test_lenience_by_number_of_waiting_requests():
    config = SpeculationConfig("zoo:draft", lenience={0: 1.0, "16": 0.8, 64: 0.5})
    waiting = (0, 1, 15, 16, 63, 64, 1000)
    assert [config.lenience_at(n) for n in waiting] == [1.0, 1.0, 1.0, 0.8, 0.8, 0.5, 0.5]
    assert SpeculationConfig("zoo:draft", lenience=0.7).lenience_at(99) == 0.7


def test_numbers_become_python_numbers():
    """Comparison, pickling and fingerprints then do not depend on the type of the input."""
    for name, value, kept in (
        ("max_tokens", np.int64(3), 3),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("top_p", Fraction(1, 2), 0.5),
        ("top_k", np.uint8(4), 4),
        ("top_k", -1, 0),
        ("top_k", np.int16(-1), 0),
        ("min_p", np.float64(0.25), 0.25),
        ("seed", np.int32(-5), -5),
        ("logprobs", np.int64(2), 2),
        ("stop", np.str_("a"), ("a",)),
    ):
        params, expected = (SamplingParams(**{name: each}) for each in (value, kept))
        assert type(getattr(params, name)) is type(kept), name
        assert params == expected
        assert pickle.dumps(params) == pickle.dumps(expected), name


def test_numbers_within_parameters_become_python_numbers():
    params = SamplingParams(
        logit_bias={np.int64(3): np.float32(0.5)}, stop_token_ids=[np.int32(1)], logprobs=0
    )
    assert (type(*params.logit_bias), type(*params.logit_bias.values())) == (int, float)
    assert type(params.stop_token_ids[0]) is int
    config = SpeculationConfig(
        "d",
        num_speculative_tokens=np.int64(3),
        lenience={np.int64(0): np.float64(1), "8": np.float32(0.5)},
        policy_options={"a": np.float64(0.5), "b": np.int8(2), "c": True},
    )
    assert type(config.num_speculative_tokens) is int
    assert {type(x) for pair in config.lenience.items() for x in pair} == {int, float}
    assert [type(x) for x in config.policy_options.values()] == [float, int, bool]
    way = RequestSpeculation(num_speculative_tokens=np.int64(3), lenience=np.float32(0.5))
    assert (type(way.num_speculative_tokens), type(way.lenience)) == (int, float)


def test_token_counts_of_requests_are_integers():
    for value in (True, "3", 3.0, b"3"):
        error = error_of(RequestSpeculation, num_speculative_tokens=value)
        assert error.field == "num_speculative_tokens"


def test_an_integer_with_too_many_digits_for_a_message():
    error = error_of(SamplingParams, seed=10**5000)
    assert error.field == "seed"
    assert "a value of type int" in error.message


def test_several_drafts():
    names = ["suffix", "zoo:draft"]
    for draft in ("suffix,zoo:draft", " suffix , zoo:draft", names, ["suffix,zoo:draft"]):
        config = SpeculationConfig(draft)
        assert config.draft == config.draft_names == ("suffix", "zoo:draft")
        assert SpeculationConfig(draft=config.draft) == config
    assert SpeculationConfig(["suffix"]).draft == "suffix"


def test_a_corpus_may_be_one_path():
    assert SpeculationConfig(corpus="a.jsonl").corpus == ("a.jsonl",)
    assert SpeculationConfig(corpus=Path("a") / "b").corpus == (str(Path("a") / "b"),)


def test_paths_become_strings():
    given = {
        name: Path("/a") / name for name in ("draft", "companion", "profile", "latency_profile")
    }
    config = SpeculationConfig(**given)
    assert config == SpeculationConfig(**{name: str(path) for name, path in given.items()})
    assert {type(getattr(config, name)) for name in given} == {str}


def test_options_of_a_policy_may_be_nested():
    config = SpeculationConfig("d", policy_options={"a": nested(99)})
    assert pickle.loads(pickle.dumps(config)) == config


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.data())
def test_any_input_gives_parameters_or_a_typed_error(data):
    for cls in (SamplingParams, SpeculationConfig):
        keys = st.sampled_from(sorted(names(cls)))
        values = data.draw(st.dictionaries(keys, anything, max_size=3))
        try:
            cls.from_dict(values)
        except DraftwiseError as error:
            assert error.field  # noqa: PT017


def test_defaults_sample_from_the_plain_distribution():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert not params.uses_penalties
    config = SpeculationConfig("zoo:draft")
    assert (config.policy_name, config.lenience, config.verification) == ("adaptive", 1.0, "block")
    assert SpeculationConfig("zoo:draft", companion="zoo:companion").policy_name == "sv"


def test_uses_penalties():
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 1.1}).uses_penalties


def test_parameters_are_immutable():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 2.0
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_parameters_can_be_copied_compared_and_pickled():
    for params in (
        SamplingParams(top_k=3, logit_bias={1: 1.0}, stop=("a",)),
        SpeculationConfig("zoo:draft", policy_options={"a": 1}),
    ):
        assert copy.deepcopy(params) == params
        assert pickle.loads(pickle.dumps(params)) == params
        assert dataclasses.replace(params) == params
        assert len({params, copy.deepcopy(params)}) == 1


class TestFromDict:
    def test_known_keys(self):
        values = {"max_tokens": 3, "stop": ["a"], "logit_bias": {1: 2.0}}
        assert SamplingParams.from_dict(values) == SamplingParams(**values)
        values = {"draft": "d", "policy": "none", "lenience": 0.5}
        assert SpeculationConfig.from_dict(values) == SpeculationConfig(**values)

    def test_unknown_keys(self):
        for cls, name, key, hint in (
            (SamplingParams, "sampling", "max_token", "did you mean 'max_tokens'?"),
            (SamplingParams, "sampling", "best_of", "known keys: cache_salt, frequency_penalty"),
            (SamplingParams, "sampling", 3, "known keys"),
            (SpeculationConfig, "speculation", "lenient", "did you mean 'lenience'?"),
            (SpeculationConfig, "speculation", "lookup", "known keys: companion, corpus"),
        ):
            error = error_of(cls.from_dict, {key: 5})
            assert error.field == f"{name}.{key}"
            assert hint in error.message

    def test_vllms_names(self):
        values = {"method": "draft_model", "model": "d", "num_speculative_tokens": 3}
        expected = SpeculationConfig("d", num_speculative_tokens=3)
        assert SpeculationConfig.from_dict(values) == expected
        assert values["model"] == "d"

    def test_a_method_without_a_model(self):
        for method in ("ngram", "suffix"):
            assert SpeculationConfig.from_dict({"method": method}).draft == method
            error = error_of(SpeculationConfig.from_dict, {"method": method, "model": "d"})
            assert error.field == "speculation.draft"
            assert "cannot be combined" in error.message

    def test_both_names(self):
        error = error_of(SpeculationConfig.from_dict, {"model": "d", "draft": "d"})
        assert error.field == "speculation.model"

    def test_no_draft(self):
        config = SpeculationConfig.from_dict({"num_speculative_tokens": 3})
        assert config.draft is None
        assert config.draft_names == ("suffix",)
