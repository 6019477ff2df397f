"""Averages over workloads in the page of a benchmark."""

import pytest

from draftwise.benchmark.page import findings, summary


def cell(workload, temperature, **ratios):
    contenders = {name: {"ratio": {"median": ratio}} for name, ratio in ratios.items()}
    return {
        "workload": workload,
        "temperature": temperature,
        "batch_size": 8,
        "contenders": contenders | {"broken": {"error": "fell over"}},
    }


def test_geometric_means_over_workloads_by_load():
    found = summary(
        [
            cell("a", 0.0, none=1.0, fast=2.0, odd=5.0),
            cell("b", 0.0, none=1.0, fast=0.5),
            cell("a", 0.8, none=1.0, fast=1.5),
        ]
    )
    assert set(found) == {"none", "fast", "odd"}
    both = found["fast"]["T 0, batch 8"]
    assert both.mean == pytest.approx(1.0)
    assert (both.lowest, both.num_workloads) == (0.5, 2)
    odd = found["odd"]["T 0, batch 8"]
    # It was fast in the only workload that it completed.
    assert (odd.num_workloads, odd.is_best) == (1, False)
    assert found["fast"]["T 0.8, batch 8"].is_best
    assert not found["none"]["T 0.8, batch 8"].is_best


def test_a_contender_that_failed_later_is_not_among_the_fastest():
    cut = cell("a", 0.0, none=1.0, fast=2.0, cut=9.0)
    cut["contenders"]["cut"]["error"] = "fell over in the second round"
    assert set(summary([cut])) == {"none", "fast"}
    (sentence,) = findings({"cells": [cut]})
    assert "fast was fastest" in sentence


def test_a_load_without_the_baseline_has_averages():
    alone = cell("a", 0.0, fast=2.0)
    assert summary([alone])["fast"]["T 0, batch 8"].is_best
    nobody = cell("b", 0.0)
    assert findings({"cells": [nobody]}) == [
        "b, temperature 0, batch 8: no contender completed all rounds."
    ]


def test_without_the_baseline_nobody_is_compared():
    cut = cell("a", 0.0, none=1.0, fast=2.0)
    cut["contenders"]["none"]["error"] = "fell over in the second round"
    assert summary([cut]) == {}
