"""The report of an audit: JSON, and a page to attach to a bug report."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

import draftwise
from draftwise.audit.drawing import OTHER
from draftwise.audit.greedy import Difference, Greedy, difference
from draftwise.audit.run import Audit
from draftwise.audit.sampling import LEVEL, Sampled, Tested

RESULTS, PAGE = "audit.json", "audit.html"
# Texts beyond these are one line of a table.
_MOST_TEXTS = 12


def report_of(audit: Audit, command: str) -> dict[str, Any]:
    """The report as JSON-compatible values, without keys of servers.

    Args:
        audit: the audit.
        command: the command line.
    """
    settings = asdict(audit.settings)
    del settings["api_key"]
    prompts = audit.settings.prompts
    settings["prompts"] = None if prompts is None else prompts.name
    return {
        "status": audit.status.value,
        "url": audit.settings.url,
        "model": audit.model,
        "engine": audit.engine,
        "baseline": audit.baseline,
        "drafts": None
        if audit.drafts is None
        else dict(zip(("num_drafted", "num_accepted"), audit.drafts, strict=True)),
        "findings": [asdict(finding) for finding in audit.findings],
        "missing": audit.missing,
        "abilities": asdict(audit.abilities),
        "greedy": _greedy(audit.greedy),
        "sampling": None
        if audit.sampled is None
        else _sampling(audit.sampled, audit.settings.bias),
        "num_answers": audit.num_answers,
        "seconds": round(audit.seconds, 1),
        "command": command,
        "settings": settings,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"draftwise": draftwise.__version__, "python": platform.python_version()},
    }


def write_audit(folder: Path, report: Mapping[str, Any]) -> None:
    """Write ``audit.json`` and ``audit.html``.

    Args:
        folder: an existing folder.
        report: the report.
    """
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (folder / RESULTS).write_text(text + "\n", encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("draftwise.audit", "templates"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("audit.html").render(report=report, level=LEVEL)
    (folder / PAGE).write_text(page, encoding="utf-8")


def _greedy(greedy: Greedy) -> dict[str, Any]:
    def where(each: Difference | None) -> dict[str, Any] | None:
        if each is None:
            return None
        return asdict(each) | {"is_explained": greedy.explains(each)}

    return {
        "allowance": greedy.allowance,
        "answers": [
            {
                "prompt": row.prompt,
                "text": row.reference.answers[0].text,
                "alone": where(difference(row.reference, row.alone)),
                "at_once": where(difference(row.reference, row.at_once)),
                "baseline_repeated": [
                    where(difference(row.reference, other)) for other in row.repeated
                ],
            }
            for row in greedy.rows
        ],
    }


def _sampling(sampled: Sampled, bias: float) -> dict[str, Any]:
    return {
        "level": LEVEL,
        "reason": sampled.reason,
        "power": sampled.power(bias),
        "seen_bias": sampled.seen_bias(),
        "p_value": sampled.p_value,
        "tests": [_test(each) for each in sampled.tests],
    }


def _test(each: Tested) -> dict[str, Any]:
    draws, law = each.draws, each.draws.law
    exact = {} if law is None else {**law.cells, OTHER: law.other}
    texts = sorted(
        {*draws.ours, *exact}, key=lambda text: -(exact.get(text, 0) or draws.ours[text])
    )
    if law is not None:
        texts = [text for text in texts if text in exact]
    seen_elsewhere = draws.ours.total() - sum(draws.ours[t] for t in exact if t != OTHER)
    return {
        "prompt": draws.subject.prompt,
        "setting": draws.sampling.fields(),
        "name": draws.sampling.name,
        "num_tokens": draws.subject.num_tokens,
        "reference": "exact distribution" if each.has_law else "baseline's answers",
        "num_answers": draws.ours.total(),
        "num_baseline_answers": draws.theirs.total(),
        "num_cells": each.fit.num_cells,
        "statistic": each.fit.statistic if each.fit.num_cells else None,
        "noncentrality": each.fit.noncentrality,
        "p_uncorrected": each.fit.p_value,
        "p_value": each.p_value,
        "p_baseline": each.control,
        "texts": [
            {
                "text": "another text" if text == OTHER else text,
                "p": exact.get(text),
                "num_seen": seen_elsewhere if text == OTHER and exact else draws.ours[text],
                "num_seen_of_baseline": draws.theirs[text],
            }
            for text in texts[:_MOST_TEXTS]
        ],
    }
