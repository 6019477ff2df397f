"""Options of a command line that say more than one value."""

import pytest

from draftwise.cli.options import parse_lenience, parse_policy_options
from draftwise.errors import InvalidParameterError


def test_values_of_policy_options_are_json_where_possible():
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
def test_bad_policy_options_are_refused(given):
    with pytest.raises(InvalidParameterError, match="policy_option"):
        parse_policy_options(given)


def test_lenience_is_a_number_or_a_rule():
    assert parse_lenience("0.8") == 0.8
    assert parse_lenience("0:1.0,16:0.8") == {0: 1.0, 16: 0.8}
    assert parse_lenience(" 0 : 1 ") == {0: 1.0}


@pytest.mark.parametrize("text", ["", "high", "0:", "0:1,0:0.5", "0:1;4:0.5", "0.5:1", "1,2"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(InvalidParameterError, match="lenience"):
        parse_lenience(text)
