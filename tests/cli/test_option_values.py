"""Parsing of option values."""

import pytest

from draftwise import SpeculationConfig
from draftwise.cli.option_values import (
    parse_lenience,
    parse_policy_options,
    parse_speculative_config,
)
from draftwise.errors import InvalidParameterError


def test_policy_options_are_parsed_as_json():
    given = ["threshold=0.5", "extra=2", "deep=true", "rule=fast", "empty=", "text=a=b"]
    assert parse_policy_options(given) == {
        "threshold": 0.5,
        "extra": 2,
        "deep": True,
        "rule": "fast",
        "empty": "",
        "text": "a=b",
    }


@pytest.mark.parametrize("given", [["threshold"], ["=0.5"], ["a=1", "a=2"]])
def test_invalid_policy_options_are_rejected(given):
    with pytest.raises(InvalidParameterError, match="policy_option"):
        parse_policy_options(given)


def test_lenience_is_a_number_or_by_load():
    assert parse_lenience("0.8") == 0.8
    assert parse_lenience("0:1.0,16:0.8") == {0: 1.0, 16: 0.8}
    assert parse_lenience(" 0 : 1 ") == {0: 1.0}


@pytest.mark.parametrize("text", ["", "high", "0:", "0:1,0:0.5", "0:1;4:0.5", "0.5:1", "1,2"])
def test_invalid_lenience_is_rejected(text):
    with pytest.raises(InvalidParameterError, match="lenience"):
        parse_lenience(text)


def test_speculative_config_is_a_json_object():
    assert parse_speculative_config(None) is None
    text = '{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 3, "policy": "fixed"}'
    assert parse_speculative_config(text) == SpeculationConfig(
        "FOLDER", policy="fixed", num_speculative_tokens=3, method="eagle3"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a JSON object, got ''"),
        ("suffix", "must be a JSON object, got 'suffix'"),
        ('["suffix"]', "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"method": "medusa"}', "'method': 'medusa': drafts of this kind"),
        ('{"num_speculative_tokens": -1}', "'num_speculative_tokens': must be at least 0"),
        ('{"lookahead": 3}', "'lookahead': unknown key"),
    ],
)
def test_invalid_speculative_configs_are_rejected(text, message):
    with pytest.raises(InvalidParameterError) as caught:
        parse_speculative_config(text)
    assert caught.value.field == "speculative_config"
    assert message in caught.value.message
