"""Result files of scripts, and their summary."""

import json

from draftwise.benchmark.report import summary_lines, write_report

FIGURES = {
    "cells": [
        {
            "workload": "gsm8k",
            "batch_size": 8,
            "contenders": {
                "none": {"ratio": {"median": 1.0, "low": 1.0, "high": 1.0}},
                "adaptive": {"ratio": [1.23456, 1.5, 1.75], "rate": 0.61234567, "steps": 12345},
                "fixed": {"ratio": 1.5},
            },
        }
    ],
    "note": "a text alone is no row",
}


def test_each_cell_has_a_row_with_its_spread():
    run, cell, none, adaptive = map(json.loads, summary_lines("a", {"revision": "abc"}, FIGURES))
    assert run == {"run": "a", "revision": "abc"}
    where = {"run": "a", "workload": "gsm8k", "batch_size": 8}
    one = {"median": 1.0, "low": 1.0, "high": 1.0}
    assert cell == where | {"cell": "cells/contenders", "fixed": {"ratio": 1.5}}
    assert none == where | {"cell": "cells/contenders/none", "ratio": one}
    assert adaptive == where | {
        "cell": "cells/contenders/adaptive",
        "ratio": {"median": 1.5, "low": 1.36728, "high": 1.625},
        "rate": 0.612346,
        "steps": 12345,
    }


def test_a_report_has_its_summary_beside_it(tmp_path):
    path = tmp_path / "results" / "some.json"
    write_report(path, {"output": path, "prompts": [tmp_path / "gsm8k.jsonl"]}, FIGURES)
    report = json.loads(path.read_text())
    assert report["cells"] == FIGURES["cells"]
    assert report["settings"] == {"prompts": "gsm8k.jsonl"}
    first, *rows = map(json.loads, path.with_suffix(".jsonl").read_text().splitlines())
    assert first["run"] == "some"
    assert first["machine"] == report["machine"]
    assert len(rows) == 3
