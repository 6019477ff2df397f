"""Comparison of a report with an older one."""

import json

import pytest

from draftwise.benchmark.comparison import changes, differences, load_report
from draftwise.errors import InvalidParameterError


def report(**ratios):
    """One cell; a ratio is (low, median, high)."""

    def spread(values):
        return dict(zip(("low", "median", "high"), values, strict=True))

    contenders = {name: {"ratio": spread(each)} for name, each in ratios.items()}
    if "none" in contenders:
        contenders["none"] = {"tokens_per_second": contenders["none"]["ratio"]}
    cell = {"workload": "w", "temperature": 0.5, "batch_size": 8, "contenders": contenders}
    return {"cells": [cell]}


def test_ordered_by_ratio_and_overlapping_ranges_are_not_clear():
    old = report(a=(1.9, 2.0, 2.1), b=(1.0, 1.1, 1.2), c=(1.0, 1.0, 1.0))
    new = report(a=(1.4, 1.5, 1.6), b=(1.0, 1.15, 1.2), c=(1.4, 1.5, 1.6))
    found = changes(old, new)
    assert [(each.contender, each.is_clear) for each in found] == [
        ("a", True),
        ("b", False),
        ("c", True),
    ]
    assert found[0].ratio == 0.75
    assert found[0].cell == "w, temperature 0.5, batch 8"


def test_target_only_decoding_is_compared_by_its_rate():
    (change,) = changes(report(none=(9, 10, 11)), report(none=(4, 5, 6)))
    assert (change.before, change.after, change.is_clear) == (10, 5, True)


def test_only_results_in_both_reports_are_compared():
    old, new = report(a=(1, 1, 1)), report(b=(1, 1, 1))
    assert changes(old, new) == []
    new["cells"][0]["contenders"]["a"] = {"error": "fell over"}
    assert changes(old, new) == []
    for field, value in (("batch_size", 1), ("temperature", 0.0)):
        other = report(a=(1, 1, 1))
        other["cells"][0][field] = value
        assert changes(old, other) == []


def test_a_report_from_before_several_temperatures_can_be_read(tmp_path):
    old = report(a=(1, 1, 1))
    del old["cells"][0]["temperature"]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(old | {"settings": {"temperature": "0.5"}}))
    assert len(changes(load_report(file), report(a=(1, 1, 1)))) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": [{}]}', '{"cells": 3}'])
def test_invalid_reports(tmp_path, text):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(InvalidParameterError, match="not a report") as caught:
        load_report(file)
    assert caught.value.field == "compare"


def test_a_missing_report(tmp_path):
    with pytest.raises(InvalidParameterError, match="compare"):
        load_report(tmp_path / "nothing.json")


def test_a_report_is_loaded(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(report(a=(1, 2, 3))))
    assert load_report(file) == report(a=(1, 2, 3))


def test_settings_that_differ_are_told():
    old = {"settings": {"draft": "suffix", "threads": 2, "policies": "fixed"}, "machine": "x"}
    new = {"settings": {"draft": "zoo:draft", "threads": 2, "policies": "adaptive"}, "machine": "y"}
    assert differences(old, new) == ["draft: suffix, now zoo:draft", "machine: x, now y"]
