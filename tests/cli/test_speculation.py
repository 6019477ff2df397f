"""The speculation summary of ``draftwise generate``, on tiny models."""

import json
import re

import pytest

from draftwise.cli.speculation_report import _advice
from draftwise.core.draft_length import advised_draft_length
from draftwise.llm import LLM
from draftwise.outputs import SpeculationStats
from draftwise.policies.guard import Guard
from draftwise.policies.step_times import SCORED
from draftwise.profiling import latency
from draftwise.profiling.latency import measure_profile
from draftwise.speculation import MAX_SPECULATIVE_TOKENS

from ..stand_ins import unguarded, vary_choices
from ..tiny_models import Recipe
from .running import assert_refused, write_prompts

TARGET = Recipe(vocab=300, context=96, tokenizer=True)
DRAFT = TARGET.draft(0.2)
COMPANION = TARGET.draft(0.2, noise_seed=2)
SHORT = ["--max-tokens", "16", "--dtype", "float32", "--batch-size", "2"]


@pytest.fixture(scope="module")
def latency_profile(models, tmp_path_factory):
    """A latency profile of the tiny models, so that no test measures latencies."""
    llm = LLM(models.folder(TARGET), None, dtype="float32", max_batch_size=1)
    triple = llm.load_models(unguarded(models.folder(DRAFT), companion=models.folder(COMPANION)))
    file = tmp_path_factory.mktemp("latency") / "latency.json"
    measure_profile(triple, 2, [16], 2).save(file)
    return file


@pytest.fixture
def command(models, monkeypatch, draftwise, latency_profile, tmp_path):
    """Run ``generate`` with four prompts; returns (exit status, stdout, stderr)."""
    monkeypatch.setattr(latency, "_deviation", lambda profile, models: 1.0)
    prompts = write_prompts(tmp_path / "prompts.jsonl", ("abc", "cab", "bed", "ad"))

    def run(*arguments, companion=False, costs=latency_profile):
        named = ["--target", models.folder(TARGET), "--draft", models.folder(DRAFT)]
        named += ["--companion", models.folder(COMPANION)] if companion else []
        named += ["--latency-profile", str(costs)] if costs else []
        guard = [] if "--guard" in arguments else ["--no-guard"]
        every = ["generate", "--prompts", prompts, *named, *SHORT, *guard, *arguments]
        return draftwise(*every)

    return run


def rows(out):
    """The summary as a mapping."""
    pairs = (re.split(r"  +", line.strip(), maxsplit=1) for line in out.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


@pytest.mark.parametrize(
    ("arguments", "companion", "policy"),
    [
        ([], False, "adaptive (the default without a companion)"),
        ([], True, "sv (the default with a companion)"),
        (["--policy", "sv-predictable"], True, "sv-predictable"),
        (["--policy", "svip", "--policy-option", "threshold=0.5"], False, "svip"),
    ],
)
def test_the_summary_names_the_policy(command, arguments, companion, policy):
    status, out, err = command(*arguments, companion=companion)
    assert (status, err) == (0, "")
    summary = rows(out)
    assert summary["policy"].startswith(f"{policy}, at most 5 tokens")
    assert summary["policy"].endswith("threshold 0.5") == ("svip" in policy)
    assert ("companion" in summary) == companion
    assert summary["output"].startswith("lossless")


def test_the_summary_has_counts_and_the_account(command, monkeypatch):
    # Speculation gains nothing with tiny models.
    vary_choices(monkeypatch, [SCORED + 3, 3], [0.3])
    monkeypatch.setattr(Guard, "affords", lambda self, seconds: True)
    often = ["--guard", "--max-tokens", "48"]
    _, out, _ = command(*often, companion=True)
    summary = rows(out)
    counts = r"drafted \d\.\d\d, verified \d\.\d\d, accepted \d\.\d\d tokens for each request"
    assert re.fullmatch(counts, summary["per step"])
    assert re.fullmatch(r"later drafts may cost \d+\.\d steps", summary["guard"])
    assert "advice" not in summary

    _, out, _ = command(*often, "--json", companion=True)
    result = json.loads(out)["speculation"]
    assert result["policy"] == "sv"
    assert result["policy_was_given"] is False
    assert result["policy_options"] == {}
    assert result["num_drafted"] >= result["num_verified"] >= result["num_accepted"] > 0
    assert result["guard_balance"] <= 16
    assert result["seconds_saved"] is None  # every step drafts
    assert result["advised_num_speculative_tokens"] is None


def test_fixed_draft_lengths_get_advice(command):
    _, out, _ = command("--policy", "fixed", "--json")
    result = json.loads(out)["speculation"]
    accepted = result["num_accepted"] / result["num_steps"]
    advised = advised_draft_length(accepted, 5)
    assert result["advised_num_speculative_tokens"] == advised
    assert result["seconds_saved"] is None  # no step without drafts was measured
    assert result["guard_balance"] is None
    _, out, _ = command("--policy", "fixed")
    summary = rows(out)
    assert summary["advice"].startswith(f"accepted {accepted:.1f} of 5 drafted tokens per step: ")
    assert str(advised) in summary["advice"].split(": ")[1]
    assert "per step" not in summary


def test_trees_get_no_advice_about_draft_lengths(command):
    _, out, _ = command("--policy", "fixed", "--tree-width", "2", "--json")
    assert json.loads(out)["speculation"]["advised_num_speculative_tokens"] is None
    assert "advice" not in rows(command("--policy", "fixed", "--tree-width", "2")[1])


def test_the_advice_names_a_draft_length_in_range():
    most = MAX_SPECULATIVE_TOKENS
    for num_steps, num_drafted, num_accepted, text in (
        (10, 5, 12, "accepted 1.2 of 5 drafted tokens per step: about 2 would do"),
        (10, 5, 42, "accepted 4.2 of 5 drafted tokens per step: 5 is about right"),
        (
            10,
            5,
            48,
            "accepted 4.8 of 5 drafted tokens per step: longer drafts may be faster, try 10",
        ),
        (1, most, most, f"{most} is about right"),
    ):
        total = num_steps * num_drafted
        stats = SpeculationStats(
            num_steps=num_steps, num_drafted=total, num_verified=total, num_accepted=num_accepted
        )
        assert text in _advice(stats, num_drafted)


def test_target_only_decoding_has_no_speculation_summary(command):
    _, out, _ = command("--policy", "none")
    assert not {"draft", "per step", "advice", "calibration error"} & rows(out).keys()
    _, out, _ = command("--policy", "none", "--json")
    assert json.loads(out)["speculation"]["advised_num_speculative_tokens"] is None


def test_lenience_is_described(command):
    arguments = ["--policy", "fixed", "--temperature", "1", "--lenience"]
    summary = rows(command(*arguments, "0.5")[1])
    assert summary["lenience"] == "0.5"
    assert summary["output"].startswith("not lossless: lenience below 1 accepts")

    _, out, _ = command(*arguments, "0:1.0,1:0.6")
    assert rows(out)["lenience"] == "1, 0.6 while 1 or more requests wait"
    result = json.loads(command(*arguments, "0:1.0,1:0.6", "--json")[1])
    assert result["speculation"]["lenience"] == {"0": 1.0, "1": 0.6}
    assert result["speculation"]["lossless"] is False


def test_the_summary_names_a_biased_policy(command):
    arguments = ["--policy", "sv-published", "--temperature", "1"]
    _, out, _ = command(*arguments, companion=True)
    assert "not lossless: policy sv-published changes the distribution of sampled text" in out


@pytest.mark.parametrize("companion", [False, True])
def test_compare_works_with_policies_that_use_latencies(command, companion):
    status, out, _ = command("--compare", "--max-tokens=48", companion=companion)
    assert status == 0
    # Lines are wrapped, after a sentence whose length depends on the figures.
    assert "all 4 texts are identical" in " ".join(out.split())
    assert "per step: drafted" in out


def test_a_lenient_comparison_does_not_claim_the_same_distribution(command):
    arguments = ["--compare", "--policy=fixed", "--temperature=1", "--lenience=0.5"]
    _, out, _ = command(*arguments)
    assert "distribution is the same" not in out
    assert "not lossless" in out


def test_block_and_token_verification_can_be_chosen(command):
    arguments = ["--policy", "fixed", "--json", "--verification"]
    assert json.loads(command(*arguments, "token")[1])["speculation"]["verification"] == "token"


def test_warnings_are_one_line_and_in_the_json(command, monkeypatch):
    monkeypatch.setattr(latency, "_deviation", lambda profile, models: 3.0)
    status, out, err = command("--json")
    assert status == 0
    first, *others = err.splitlines()
    assert first.startswith("warning latency_profile: passes take 3 times as long")
    assert not [line for line in others if "arning" in line]
    assert json.loads(out)["warnings"] == [first.removeprefix("warning ")]


def test_measuring_latencies_is_reported(models):
    heard = []
    LLM(
        models.folder(TARGET),
        unguarded(models.folder(DRAFT)),
        max_batch_size=1,
        on_status=heard.append,
    )
    folders = [models.folder(TARGET), models.folder(DRAFT)]
    assert heard == [
        *(f"loading {f}" for f in folders),
        "measuring latencies on this machine",
    ]


def test_user_errors_print_one_line_and_exit_with_status_2(command):
    for arguments, field in (
        (["--policy-option", "threshold"], "--policy-option"),
        (["--policy", "svip", "--policy-option", "treshold=1"], "--policy-option treshold"),
        (["--policy", "svip", "--policy-option", "threshold=high"], "--policy-option threshold"),
        (["--lenience", "0"], "--lenience"),
        (["--lenience", "4:0.8"], "--lenience"),
        (["--lenience", "low"], "--lenience"),
        (["--verification", "all"], "--verification"),
        (["--policy", "staged"], "--companion"),
        (["--policy", "disco"], "--profile"),
        (["--profile", "/does/not/exist"], "--profile"),
        (["--companion", "draft:int3"], "--companion"),
    ):
        ran = command(*arguments)
        assert_refused(ran, f"{field}: ")
        assert ran[2].count("\n") == 1


def test_help_fits_a_hundred_columns(draftwise):
    lines = draftwise("generate", "--help", columns=100)[1].splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)
    panels = [line.split()[1] for line in lines if line.startswith("╭─")]
    named = ["Prompts", "Models", "Speculation", "Sampling", "Running", "Output"]
    assert panels == ["Arguments", "Options", *named]


def test_savings_are_known_with_a_guard(command):
    _, out, _ = command("--policy", "fixed", "--guard", "--max-tokens", "32", "--json")
    result = json.loads(out)
    assert isinstance(result["speculation"]["seconds_saved"], float)
    saved = [output["speculation"]["seconds_saved"] for output in result["outputs"]]
    assert result["speculation"]["seconds_saved"] == pytest.approx(sum(saved))
