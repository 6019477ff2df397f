"""Requests to servers that stream in all forms."""

import asyncio
import json
import math
import re
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest

from draftwise.audit.budget import Budget
from draftwise.audit.client import Server
from draftwise.benchmark.servers.load import arrival_seconds, arriving, at_once
from draftwise.benchmark.servers.requests import Answered, ask

from . import stub_server
from .stub_server import PLAIN, USAGE, WORDS, StubServer, chunk, http, plain_json, stream

TEXT = "".join(WORDS)
HISTOGRAM = [3, 0, 1]
VLLM = {
    "acceptance_histogram": HISTOGRAM,
    "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 8,
}
UMLAUTS = stream(chunk("ä"), chunk("→"), {"choices": [], "usage": USAGE})


@contextmanager
def client_of(stub, **options):
    with stub:
        server = Server(stub.url, Budget(100, math.inf), **options)
        yield server
        server.close()


def answered(answer, patience=30.0, chat=False):
    """What is known of one request to a server that answers like this."""
    with client_of(StubServer(lambda _: answer), chat=chat) as server:
        fields = {"max_tokens": 7, "stream": True}
        return asyncio.run(ask(server, "Say.", fields, time.perf_counter(), patience))


FORMS = {
    "chunked": http(PLAIN),
    "split within lines": http(PLAIN, size=7),
    "split between bytes": [bytes([byte]) for byte in http(PLAIN)],
    "until the connection is closed": stub_server.until_closed(PLAIN),
    "with carriage returns": http(PLAIN.replace(b"\n", b"\r\n"), size=11),
    "without blanks, with comments": http(
        b": ping\n\nevent: message\n" + PLAIN.replace(b"data: ", b"data:")
    ),
    "without an end": stub_server.until_closed(
        stream(*map(chunk, WORDS), {"choices": [], "usage": USAGE}, done=False).rstrip()
    ),
    "usage with the last text": http(
        stream(*map(chunk, WORDS[:-1]), chunk(WORDS[-1], usage=USAGE))
    ),
    "continuous usage": http(
        stream(
            *(chunk(word, usage={**USAGE, "completion_tokens": 1}) for word in WORDS[:-1]),
            chunk(WORDS[-1], usage=USAGE),
        )
    ),
    "all at once": http(stream(chunk(TEXT), {"choices": [], "usage": USAGE})),
}


@pytest.mark.parametrize("form", FORMS)
def test_streams(form):
    found = answered(FORMS[form])
    assert found.error is None
    assert (found.text, found.num_tokens, found.num_prompt_tokens) == (TEXT, 7, 5)
    assert 0 < found.ttft_seconds <= found.seconds
    assert found.tpot_seconds == (found.seconds - found.ttft_seconds) / 6
    assert not found.counts_chunks
    assert found.num_verified is None


def test_characters_that_are_split_between_chunks():
    assert answered(http(UMLAUTS, size=1)).text == "ä→"


def test_chats():
    def delta(**content):
        return {"choices": [{"index": 0, "delta": content}]}

    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": USAGE}
    chunks = [
        delta(role="assistant", content=""),
        delta(reasoning_content="Hm"),
        delta(content="a"),
    ]
    found = answered(http(stream(*chunks, end)), chat=True)
    assert (found.text, found.num_tokens, found.finish_reason) == ("a", 7, "length")
    assert found.ttft_seconds is not None
    nothing = answered(http(stream(chunks[0], end)), chat=True)
    assert nothing.ttft_seconds is None
    assert nothing.tpot_seconds is None


def test_counts_of_drafts():
    usage = {**USAGE, "speculation": {"num_verified": 6, "num_accepted": 5}}
    for last, expected in (
        ({"usage": USAGE, "metrics": {"speculative_decoding": VLLM}}, (8, 2, tuple(HISTOGRAM), 7)),
        ({"usage": usage}, (6, 5, (), 7)),
        ({"timings": {"predicted_n": 9, "draft_n": 4, "draft_n_accepted": 3}}, (4, 3, (), 9)),
    ):
        found = answered(http(stream(*map(chunk, WORDS), {"choices": [], **last})))
        counts = (
            found.num_verified,
            found.num_accepted,
            found.acceptance_histogram,
            found.num_tokens,
        )
        assert counts == expected


def test_without_counts_the_chunks_are_counted():
    found = answered(http(stream(*map(chunk, WORDS))))
    assert (found.num_tokens, found.counts_chunks) == (len(WORDS), True)


def test_a_server_that_does_not_stream():
    content = {"choices": [{"index": 0, "text": "a"}], "usage": USAGE}
    found = answered(plain_json(content))
    assert (found.text, found.num_tokens, found.ttft_seconds) == ("a", 7, None)
    assert found.tpot_seconds is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (plain_json({"error": {"message": "too long"}}, 400), '400: {"error": {"message": "too'),
        (http(stream(chunk("a"), {"error": {"message": "lost"}})), "malformed: .*lost"),
        (http(PLAIN)[:-40], "closed before the end"),
        (plain_json({"choices": []})[:-3], "closed before the end"),
        (http(b"data: {\n\n"), "malformed"),
        (b"SSH-2.0-x\r\n\r\n", "no response"),
        (b"", "closed before the end"),
    ],
)
def test_failures_are_kept(answer, why):
    found = answered(answer)
    assert found.num_tokens == 0
    assert re.search(why, found.error)


def test_no_server_and_no_answer():
    with client_of(StubServer()) as server:
        pass
    found = asyncio.run(ask(server, "Say.", {"stream": True}, time.perf_counter()))
    assert "no response" in found.error
    # The stub waits a hundredth of a second before it answers.
    assert "did not end within" in answered(http(PLAIN), patience=1e-6).error


def test_a_busy_server_is_asked_again():
    answers = [plain_json({}, 429, **{"retry-after": "0.06"}), plain_json({}, 503), http(PLAIN)]
    with client_of(StubServer(lambda _: answers.pop(0))) as server:
        found = asyncio.run(ask(server, "Say.", {"stream": True}, time.perf_counter()))
    assert found.error is None
    assert 0 < found.refused_seconds < found.ttft_seconds <= found.seconds


def test_the_request_is_the_servers():
    """The model, the key and the fields are sent, with paths after that of the address."""
    with client_of(StubServer(), api_key="SECRET") as server:
        fields = {"max_tokens": 3, "stream": True}
        found = asyncio.run(ask(server, "ä", fields, time.perf_counter()))
    assert isinstance(found, Answered)
    assert server.headers == {"Authorization": "Bearer SECRET"}
    assert json.loads(json.dumps(server.request("ä", fields)[1])) == {
        "model": "stub",
        "prompt": "ä",
        **fields,
    }


def test_clients_send_their_next_request_after_an_answer():
    running, most = 0, 0

    async def work(job):
        nonlocal running, most
        running += 1
        most = max(most, running)
        # Later jobs end sooner.
        for _ in range(20 - job):
            await asyncio.sleep(0)
        running -= 1
        return -job

    for concurrency, expected in ((1, 1), (3, 3), (50, 20)):
        running, most = 0, 0
        results = asyncio.run(at_once(range(20), work, concurrency))
        assert results == [-job for job in range(20)]
        assert most == expected


def test_arrivals_are_those_of_a_poisson_process():
    times = arrival_seconds(4000, 5.0, 1)
    assert times == arrival_seconds(4000, 5.0, 1) != arrival_seconds(4000, 5.0, 2)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.05)
    # The standard deviation of an exponential distribution is its mean.
    spread = math.sqrt(sum((gap - 0.2) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(0.2, rel=0.1)
    assert arrival_seconds(0, 5.0, 1) == []


def test_arriving_requests_do_not_wait_for_answers():
    started = []

    async def work(job):
        started.append(job)
        while len(started) < 5:  # no answer before the last request
            await asyncio.sleep(0)
        return job

    assert asyncio.run(arriving(range(5), work, 1e5, 0)) == list(range(5))
    assert started == list(range(5))
