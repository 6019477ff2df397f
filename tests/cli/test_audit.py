"""``draftwise audit``: what is refused, and what it prints."""

import re

import httpx
import pytest

from draftwise.audit import client
from draftwise.audit.client import Server

from ..audit.table_server import TableServer
from .running import assert_refused

URL = "http://127.0.0.1:9"


@pytest.fixture
def served(monkeypatch):
    """Let all servers of an audit be this one; returns the function that sets it."""

    def serve(server):
        def with_transport(self, *arguments, **options):
            init(self, *arguments, **{**options, "transport": server})

        monkeypatch.setattr(client.Server, "__init__", with_transport)

    init = Server.__init__
    return serve


@pytest.mark.parametrize(
    ("arguments", "begin"),
    [
        (["http://example.org"], "url: 'example.org' is not this machine"),
        (["ftp://127.0.0.1"], "url: must be http://HOST:PORT"),
        ([URL, "--off=1"], "--off: must be a JSON object"),
        ([URL, "--checks=speed"], "--checks: must be some of greedy, sampling, invariants"),
        ([URL, "--requests=3"], "--requests: must be at least 200"),
        ([URL, "--minutes=-1"], "--minutes: must lie in (0"),
        ([URL, "--baseline=http://b:1"], "--baseline: 'b' is not this machine"),
        ([URL, "--baseline=http://[::1]", "--off={}"], "--off: cannot be combined with"),
        ([URL, "--prompts=no.jsonl"], "--prompts: cannot read 'no.jsonl'"),
        ([URL], f"{URL}: does not list its models"),
    ],
)
def test_what_is_refused(draftwise, tmp_path, arguments, begin):
    assert_refused(draftwise("audit", *arguments, "-o", tmp_path, columns=200), begin)
    assert not list(tmp_path.iterdir())


def test_a_server_without_a_known_switch_needs_a_baseline(draftwise, served, tmp_path):
    def respond(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "vllm"}]})
        return httpx.Response(404)

    served(httpx.MockTransport(respond))
    ran = draftwise("audit", URL, "-o", tmp_path)
    assert_refused(ran, "--baseline: this server has no known field")


@pytest.mark.slow
def test_the_status_and_the_table(draftwise, served, tmp_path):
    """A wrong server fails with a command that repeats it, and the key is written nowhere."""
    common = ("--requests=1500", "--num-prompts=6", "--checks=greedy,invariants", "-o", tmp_path)
    for wrong, expected in ((None, 0), ("stop", 1)):
        served(TableServer(wrong))
        status, out, _ = draftwise("audit", URL, *common, "--api-key", "SECRET", columns=160)
        assert status == expected, out
        assert re.search(r"stop strings +" + ("failed" if wrong else "passed"), out)
        assert ("$ curl -s http://127.0.0.1:9/v1/completions" in out) == bool(wrong)
        files = [(tmp_path / name).read_text() for name in ("audit.json", "audit.html")]
        assert not any("SECRET" in text for text in (out, *files))
        assert bool(wrong) == ("$DRAFTWISE_API_KEY" in out)
    served(TableServer(num_drafted=0))
    status, out, _ = draftwise("audit", URL, *common)
    assert status == 2
    assert "drafted no token" in out
