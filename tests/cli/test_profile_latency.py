"""``draftwise profile-latency`` as a user runs it, on tiny models."""

import json
import re

import pytest
import torch

from draftwise.profiling.latency_profile import LatencyProfile
from draftwise.profiling.passes import Stage

from ..tiny_models import Recipe
from .running import assert_refused

TARGET = Recipe(vocab=40, context=64)
DRAFT = TARGET.draft()
SMALL = ("--max-batch-size", "2", "--num-speculative-tokens", "4", "--contexts", "16")


@pytest.fixture
def command(models, draftwise, tmp_path):
    """Run the command with the tiny pair; returns (exit status, stdout, stderr, file)."""
    file = tmp_path / "latency.json"

    def run(*arguments):
        named = ["--target", models.folder(TARGET), "--draft", models.folder(DRAFT)]
        return *draftwise("profile-latency", *named, "-o", file, *SMALL, *arguments), file

    return run


def test_a_profile_is_written_and_printed(command):
    status, out, err, file = command("--dtype", "float32")
    assert (status, err) == (0, "")
    profile = LatencyProfile.load(file)
    assert profile.costs.keys() == {Stage.TARGET, Stage.DRAFT}
    assert profile.machine["dtype"] == "float32"
    assert not profile.interference
    assert "batch 1  batch 2" in out
    row = {p.shape.num_requests: p for p in profile.points if p.shape.num_tokens == p.shape[0]}
    shown = next(line.split() for line in out.splitlines() if re.match(r" +1 ", line))
    assert shown == ["1", *(f"{1000 * row[batch].seconds:.2f}" for batch in (1, 2))]
    assert str(file) in out


def test_passes_over_different_numbers_of_tokens_per_request_are_not_shown(command):
    _, out, _, file = command("--dtype", "float32", "--max-batch-size", "8")
    targets = [p for p in LatencyProfile.load(file).points if p.stage is Stage.TARGET]
    whole = {p.shape: p.seconds for p in targets if p.shape.num_tokens == 8}
    assert any(p.shape.num_tokens % p.shape.num_requests for p in targets)
    shown = next(line.split() for line in out.splitlines() if re.match(r" +1 ", line))
    assert shown[-1] == f"{1000 * whole[8, 8, 16]:.2f}"


def test_the_cost_of_verification_is_printed(command):
    _, out, _, file = command("--dtype", "float32")
    cost = LatencyProfile.load(file).costs[Stage.TARGET]
    context = {1: 16, 2: 32}
    more = {n: 100 * (cost(5 * n, context[n]) / cost(n, context[n]) - 1) for n in (1, 2)}
    sentence = (
        f"Verifying 4 more tokens per request costs {more[1]:.0f} % of a target-only pass at "
        f"batch 1 and {more[2]:.0f} % of a target-only pass at batch 2."
    )
    assert sentence in " ".join(out.split())


def test_companion_and_interference_are_measured(command, models):
    other = models.folder(TARGET.draft(noise_seed=5))
    status, out, _, file = command("--companion", other, "--interference", "--dtype=float32")
    assert status == 0
    profile = LatencyProfile.load(file)
    assert Stage.COMPANION in profile.costs
    assert profile.interference.keys() == {Stage.TARGET, Stage.DRAFT}
    assert "companion, ms per pass" in out
    assert f"the target takes {profile.interference[Stage.TARGET]:.2f} times as long" in out
    assert f"the draft takes {profile.interference[Stage.DRAFT]:.2f} times as long" in out


def test_a_profile_without_a_draft(command):
    status, _, _, file = command("--draft", "none", "--max-batch-size", "1")
    assert status == 0
    assert LatencyProfile.load(file).costs.keys() == {Stage.TARGET}


def test_threads_are_set_and_recorded(command):
    before = torch.get_num_threads()
    try:
        _, _, _, file = command("--threads", str(before + 1), "--max-batch-size", "1")
    finally:
        torch.set_num_threads(before)
    assert json.loads(file.read_text())["machine"]["threads"] == before + 1


def test_user_errors_print_one_line_and_exit_with_status_2(command):
    for arguments, field in (
        (["--contexts", "16,x"], "--contexts"),
        (["--contexts", "60"], "--contexts"),
        (["--contexts", ""], "--contexts"),
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "int3"], "--dtype"),
        (["--companion", "draft:int3"], "--companion"),
        (["--draft", "/does/not/exist"], "--draft"),
        (["--draft", "none", "--interference"], "--draft"),
        (["-o", "/does/not/exist/latency.json"], "--output"),
        (["-o", "/"], "--output"),
    ):
        *ran, file = command(*arguments)
        assert_refused(ran, f"{field}: ")
        assert not file.exists()
