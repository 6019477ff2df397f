"""A benchmark of Draftwise's own server, switched by each request."""

import json

import pytest

from draftwise.serving.settings import EngineSettings, ServerSettings

from ..cli.conftest import draftwise
from ..cli.running import assert_refused, write_prompts
from ..serving.conftest import quick_starts
from ..serving.running import running
from ..stand_ins import unguarded

__all__ = ["draftwise", "quick_starts"]
pytestmark = pytest.mark.slow
ENGINE = EngineSettings(
    "zoo:target",
    unguarded("zoo:draft", policy="fixed", num_speculative_tokens=4),
    dtype="float32",
    max_batch_size=8,
    max_model_len=256,
    num_threads=1,
)


def test_no_drafts_fixed_lengths_and_adaptive(draftwise, tmp_path):
    texts = [f"{number} plus {number} is" for number in range(12)]
    file = write_prompts(tmp_path / "sums.jsonl", texts)
    with running(ENGINE, ServerSettings(per_request_spec_decode_metrics="summary")) as server:
        status, out, err = draftwise(
            *("benchmark", "--server", server.url, "--workload", file, "-o", tmp_path / "out"),
            *("--policies", "none,fixed:2,fixed:4", "--concurrency", "1,3", "--rounds", "2"),
            *("--requests", "3", "--learning-turns", "0", "--max-tokens", "12"),
        )
        assert (status, err) == (0, "")
        refused = draftwise(
            *("benchmark", "--server", server.url, "--workload", file, "-o", tmp_path / "other"),
            *("--policies", "fixed:5"),
        )
    assert_refused(refused, "--policies: the server drafts at most 4 tokens")
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["servers"][0]["engine"] == "draftwise"
    assert report["servers"][0]["speculation"]["draft"] == "zoo:draft"
    for cell in report["cells"]:
        none, *drafting = cell["contenders"].values()
        assert list(cell["contenders"]) == [
            f"draftwise {p}" for p in ("none", "fixed:2", "fixed:4")
        ]
        assert none["num_verified"] == 0
        assert none["accepted_length"] == 1.0
        for length, own in zip((2, 4), drafting, strict=True):
            # In float32 all texts are the same, and every answer has as many tokens as asked.
            assert own["same_texts"] == own["requests"] == 6
            assert own["num_tokens"] == 6 * 12
            assert own["num_verified"] > 0
            assert 1 < own["accepted_length"] <= 1 + length
            assert list(own["acceptance_by_position"]) == [str(at + 1) for at in range(length)]
            assert not own["failed_requests"]
        assert list(cell["best_fixed"]) == ["draftwise"]
    lines = (tmp_path / "out" / "requests.jsonl").read_text().splitlines()
    for request in map(json.loads, lines):
        histogram = request["acceptance_histogram"]
        assert sum(at * count for at, count in enumerate(histogram)) == request["num_accepted"]
        assert request["num_prompt_tokens"] > 0
    assert "(best" in out
