"""Comparison of a benchmark report with an older one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise.benchmark.titles import BASELINE, title_of
from draftwise.errors import InvalidParameterError

# Settings that say what is measured or where it is written, and not how.
_MAY_DIFFER = frozenset(
    {"workload", "temperature", "batch_sizes", "policies", "peers", "output", "compare", "preset"}
)


@dataclass(frozen=True)
class Change:
    """Change of one contender's result between two reports.

    Attributes:
        cell: workload, temperature and batch size.
        contender: name of the contender.
        before: median in the older report.
        after: median in the newer report.
        is_clear: whether the interquartile ranges do not overlap.
    """

    cell: str
    contender: str
    before: float
    after: float
    is_clear: bool

    @property
    def ratio(self) -> float:
        """After over before; above 1 is faster."""
        return self.after / self.before


def load_report(path: Path) -> dict[str, Any]:
    """Read the ``results.json`` of an older report.

    Raises:
        InvalidParameterError: the file is not a report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        for cell in report["cells"]:
            cell["workload"], cell["batch_size"], cell["contenders"]
            if "temperature" not in cell:
                # Older reports have the same temperature everywhere.
                cell["temperature"] = float(report["settings"]["temperature"])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise InvalidParameterError(
            "compare", f"{str(path)!r} is not a report of `draftwise benchmark`: {error!r}"
        ) from error
    loaded: dict[str, Any] = report
    return loaded


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that differ between two reports, such as ``draft: suffix, now zoo:draft``."""
    before, now = old.get("settings", {}), new.get("settings", {})
    found = [
        f"{name}: {before[name]}, now {now[name]}"
        for name in before
        if name in now and name not in _MAY_DIFFER and before[name] != now[name]
    ]
    return found + [
        f"{name}: {old[name]}, now {new[name]}"
        for name in ("machine", "kernels")
        if name in old and name in new and old[name] != new[name]
    ]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Changes of all results that both reports contain, ordered by ratio, ascending.

    Contenders are compared by their ratio to target-only decoding, which does not depend on the
    speed of the machine. Target-only decoding itself is compared by tokens per second.
    """
    before = {title_of(cell): cell["contenders"] for cell in old["cells"]}
    found = []
    for cell in new["cells"]:
        others = before.get(title_of(cell), {})
        for name, own in cell["contenders"].items():
            other = others.get(name, {})
            key = "tokens_per_second" if name == BASELINE else "ratio"
            if not own.get(key) or not other.get(key) or own.get("error") or other.get("error"):
                continue
            a, b = other[key], own[key]
            clear = b["high"] < a["low"] or b["low"] > a["high"]
            found.append(Change(title_of(cell), name, a["median"], b["median"], clear))
    return sorted(found, key=lambda change: change.ratio)
