"""The documentation of policies agrees with the registry."""

import re
from pathlib import Path

import pytest

from draftwise.policies import POLICIES, Signal
from draftwise.policies.registry import options_of

ROOT = Path(__file__).parent.parent
_NEEDS = ("draft", "companion", "profile", "latency")


def documented_tables():
    """For each policy, the cells of all tables of docs/policies.md by column name."""
    policies = {}
    heads = []
    for line in (ROOT / "docs" / "policies.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        elif not set(line) <= set("|-"):
            row = dict(zip(heads, cells, strict=True))
            policies.setdefault(row.pop("policy").strip("`"), {}).update(row)
    return policies


DOCUMENTED = documented_tables()


def test_policies_are_documented_in_the_order_of_the_registry():
    assert list(DOCUMENTED) == list(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_documentation_of_a_policy_agrees_with_its_class(name):
    policy, row = POLICIES[name], DOCUMENTED[name]
    signals = ", ".join(signal.value for signal in Signal if signal in policy.signals)
    needs = ", ".join(what for what in _NEEDS if getattr(policy, f"needs_{what}"))
    options = ", ".join(f"{key} = {value}" for key, value in options_of(policy).items())
    assert row == {
        "what it does": policy.summary,
        "when to use it": row["when to use it"],
        "looks at": signals or "–",
        "needs": needs or "–",
        "lossless": "yes" if policy.lossless else "greedy only",
        "options": options or "–",
        "source": policy.source,
    }
    assert row["when to use it"]


def test_policies_that_depend_on_time_are_documented():
    text = (ROOT / "docs" / "policies.md").read_text()
    section = text.split("## What depends on time")[1].split("\n## ")[0]
    first = section.split("step times")[0]
    by_time = {name for name, policy in POLICIES.items() if policy.needs_latency}
    assert set(re.findall(r"`([^`]+)`", first)) == by_time - {"oracle"}


FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_links_are_valid(file):
    for link in re.findall(r"\]\(([^)]+)\)", file.read_text()):
        if "://" in link:
            continue
        path, _, section = link.partition("#")
        page = file if not path else file.parent / path
        assert page.exists(), link
        if section:
            titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in titles}
            assert section in anchors, link
