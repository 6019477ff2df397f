"""Which warnings reach a user of the command."""

import warnings

from draftwise.cli.quiet import only_our_warnings
from draftwise.errors import DraftwiseWarning


def test_ours_are_one_line_each_and_others_are_silent(capsys):
    with only_our_warnings() as shown:
        warnings.warn("of a library", UserWarning, stacklevel=1)
        for _ in range(2):
            warnings.warn("profile: was made\n  elsewhere", DraftwiseWarning, stacklevel=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == 2 * "warning profile: was made elsewhere\n"
    assert shown == 2 * ["profile: was made elsewhere"]


def test_filters_are_as_before_afterwards():
    before = warnings.filters[:]
    with only_our_warnings():
        pass
    assert warnings.filters == before
