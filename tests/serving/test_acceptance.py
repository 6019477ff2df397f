"""Acceptance of the drafts of one request, in the form of vLLM, and by position in the metrics."""

import json
from dataclasses import replace
from itertools import accumulate

import pytest

from draftwise.audit.draft_counts import DraftCounts
from draftwise.errors import InvalidParameterError
from draftwise.serving import openapi
from draftwise.serving.acceptance import acceptance_metrics
from draftwise.serving.messages import DraftSteps
from draftwise.serving.settings import ServerSettings

from ..refusals import error_of
from ..stand_ins import unguarded
from .conftest import ZOO
from .running import running

PROMPT = "One plus two is"


def test_the_form_is_vllms():
    """Steps without a draft do not count; the target's own token of each step does."""
    drafts = DraftSteps(3, [3, 3, 2, 1], [3, 0, 0, 1])
    summary = {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 4 / 9,
        "acceptance_histogram": [2, 1, 0, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
    }
    assert acceptance_metrics(drafts, "summary") == summary
    assert acceptance_metrics(drafts, "detailed") == {
        **summary,
        "per_step_accepted": [3, 0, 0, 1],
        "per_step_drafted": [3, 3, 2, 1],
    }


def test_answers_without_drafts():
    metrics = acceptance_metrics(DraftSteps(2), "summary")
    assert metrics["acceptance_histogram"] == [0, 0, 0]
    assert (metrics["mean_acceptance_length"], metrics["draft_acceptance_rate"]) == (1.0, 0.0)


def test_levels_are_vllms():
    error = error_of(
        ServerSettings, per_request_spec_decode_metrics="all", error=InvalidParameterError
    )
    assert "none, summary, detailed" in error.message


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    """A server that reports, with drafts of a fixed length."""
    fixed = unguarded("zoo:draft", policy="fixed", num_speculative_tokens=3)
    settings = ServerSettings(per_request_spec_decode_metrics="detailed")
    with running(replace(ZOO, speculation=fixed), settings) as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def ask(client, path="/v1/completions", **fields):
    body = {"max_tokens": 40, "temperature": 0.8, "seed": 3, **fields}
    if path == "/v1/completions":
        body.setdefault("prompt", PROMPT)
    return client.post(path, json=body)


def test_the_counts_are_those_of_the_answer(client):
    """They agree with ours, and with the server's counts by position."""
    before = DraftCounts.read(client.get("/metrics").text) or DraftCounts(0, 0, 0)
    answer = ask(client, ignore_eos=True).json()
    counted = DraftCounts.read(client.get("/metrics").text).since(before)
    metrics = openapi.ResponseMetrics.model_validate(answer["metrics"]).speculative_decoding
    ours = answer["usage"]["speculation"]
    assert metrics.num_draft_tokens == ours["num_verified"] == counted.num_verified > 20
    assert metrics.num_accepted_draft_tokens == ours["num_accepted"] == counted.num_accepted > 0
    assert sum(metrics.acceptance_histogram) == metrics.num_spec_steps == counted.num_drafts
    assert metrics.num_spec_tokens == 3
    assert len(metrics.acceptance_histogram) == 4
    assert sum(metrics.per_step_drafted) == metrics.num_draft_tokens
    for number, count in enumerate(metrics.acceptance_histogram):
        assert metrics.per_step_accepted.count(number) == count
    reached = list(accumulate(reversed(metrics.acceptance_histogram)))[::-1]
    assert [counted.accepted.get(at, 0) for at in range(3)] == reached[1:]
    assert counted.verified[0] == metrics.num_spec_steps
    # Every step generates a token of the target's own.
    assert answer["usage"]["completion_tokens"] == 40
    assert ours["num_steps"] + metrics.num_accepted_draft_tokens == 40


def test_streams_report_with_the_usage(client):
    whole = ask(client).json()["metrics"]
    for options, expected in (({"include_usage": True}, [whole]), (None, [])):
        lines = ask(client, stream=True, stream_options=options).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert [each["metrics"] for each in chunks if each.get("metrics")] == expected


def test_chats_report_too(client):
    messages = [{"role": "user", "content": PROMPT}]
    answer = ask(client, "/v1/chat/completions", messages=messages).json()
    openapi.ChatCompletion.model_validate(answer)
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_only_single_answers_are_reported(client):
    assert "metrics" not in ask(client, n=2).json()
    assert "metrics" not in ask(client, prompt=[PROMPT, PROMPT]).json()
    off = ask(client, speculation={"enabled": False}).json()["metrics"]["speculative_decoding"]
    assert off["num_spec_steps"] == off["num_draft_tokens"] == 0


def test_nothing_is_reported_by_default():
    with running(ZOO) as server, server.client() as client:
        answer = ask(client).json()
        assert answer["usage"]["speculation"]["num_verified"] > 0
        assert "metrics" not in answer
