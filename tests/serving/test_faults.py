"""Faults around a server: lost engines, disconnected clients, full queues and disks."""

import json
import logging
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwise.errors import InvalidParameterError, ModelNotFoundError
from draftwise.serving import service as service_module
from draftwise.serving.logs import set_up_logs
from draftwise.serving.run import open_socket
from draftwise.serving.settings import EngineSettings, ServerSettings

from ..stand_ins import unguarded
from ..tiny_models import Recipe, save
from .conftest import ZOO
from .running import PATIENCE_SECONDS, running

pytestmark = pytest.mark.slow

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
TWO_AT_ONCE = replace(ZOO, max_batch_size=2)


def until(condition):
    """Wait for a condition. The timeout only ends a failing test."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def num_inside(server):
    """Number of waiting and running requests in the engine's last report."""
    with server.client() as client:
        stats = client.get("/v1/stats").json()
    return stats["num_running"] + stats["num_waiting"]


def post(server, body):
    """Send a completion request over a separate connection."""
    with server.client() as client:
        return client.post("/v1/completions", json=body)


def streamed(server, body):
    """All events of a stream, up to its end."""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        return [json.loads(line[6:]) for line in lines]


def metrics(server):
    return server.service.metrics.text().decode()


def send(connection, server, body):
    """Connect to a server and send a request, without reading its answer."""
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)


def test_a_killed_engine_is_restarted():
    with running(ZOO) as server, server.client() as client, ThreadPoolExecutor(4) as pool:
        # Options of one policy do not apply to the next one.
        options = {"policy": "svip", "policy_options": {"threshold": 0.6}}
        for changes in (options, {"policy": "adaptive"}, {"num_speculative_tokens": 2}):
            changed = client.patch("/v1/speculation", json=changes).json()
        assert changed["num_speculative_tokens"] == 2
        before = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
        first_pid = server.service.client.pid
        whole = [pool.submit(post, server, LONG) for _ in "ab"]
        parts = [pool.submit(streamed, server, LONG) for _ in "ab"]
        until(lambda: num_inside(server) == 4)
        os.kill(first_pid, signal.SIGKILL)
        for each in whole:
            answer = each.result(PATIENCE_SECONDS)
            assert answer.status_code == 503
            assert answer.json()["error"]["param"] == "engine"
            assert int(answer.headers["retry-after"]) > 0
        for each in parts:
            events = each.result(PATIENCE_SECONDS)
            assert events[-1]["error"]["param"] == "engine"
        # New requests wait for the next engine, which has the same settings.
        after = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
        assert after == before
        assert server.service.client.pid != first_pid
        assert client.get("/v1/speculation").json() == changed
        assert "draftwise:engine_restarts_total 1.0" in client.get("/metrics").text
        assert num_inside(server) == 0


def test_a_disconnect_cancels_streams_and_answers():
    with running(TWO_AT_ONCE) as server:
        with ExitStack() as connections:
            for _ in range(2):
                client = connections.enter_context(server.client())
                stream = client.stream("POST", "/v1/completions", json={**LONG, "stream": True})
                lines = connections.enter_context(stream).iter_lines()
                next(lines)
                connections.callback(lines.close)
            assert num_inside(server) == 2
        assert post(server, SHORT).status_code == 200
        until(lambda: num_inside(server) == 0)
        assert 'vllm:request_success_total{finished_reason="abort"} 2.0' in metrics(server)
        with socket.socket() as connection:
            send(connection, server, LONG)
            until(lambda: num_inside(server) == 1)
        until(lambda: num_inside(server) == 0)
        assert 'finished_reason="abort"} 3.0' in metrics(server)


def test_a_client_that_does_not_read_delays_no_other():
    settings = ServerSettings(request_timeout=5.0, max_queue=0)
    with (
        running(replace(ZOO, max_batch_size=1), settings) as server,
        socket.socket() as connection,
    ):
        # With a window of a few bytes, the server's writes block soon.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        send(connection, server, {**LONG, "stream": True, "return_tokens": True})
        until(lambda: "vllm:time_to_first_token_seconds_count 1.0" in metrics(server))
        # The engine finishes although the client reads nothing. The server gives up later.
        until(lambda: num_inside(server) == 0)
        until(lambda: server.service.num_inside == 0)
        with server.client() as client:
            assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_full_queue_gives_a_retry_time(monkeypatch):
    def no_tokenizer(*_, **__):
        raise AssertionError("a refused prompt is not tokenized")

    with (
        running(TWO_AT_ONCE, ServerSettings(max_queue=1)) as server,
        ThreadPoolExecutor(8) as pool,
        server.client() as client,
    ):
        waiting = [pool.submit(post, server, LONG) for _ in "abc"]
        until(lambda: num_inside(server) == 3)
        monkeypatch.setattr(service_module, "tokenize", no_tokenizer)
        for stream in (False, True):
            refused = client.post("/v1/completions", json={**SHORT, "stream": stream})
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert 10 <= int(refused.headers["retry-after-ms"]) <= 60_000
            assert refused.json()["error"]["type"] == "rate_limit_error"
        too_many = client.post("/v1/completions", json={**SHORT, "n": 4})
        assert too_many.status_code == 400
        assert too_many.json()["error"]["param"] == "n"
        monkeypatch.undo()
        assert all(each.result(PATIENCE_SECONDS).status_code == 200 for each in waiting)
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        assert 'draftwise:refused_requests_total{reason="queue"} 2.0' in metrics(server)


def test_a_request_times_out():
    settings = ServerSettings(request_timeout=0.05)
    with running(replace(ZOO, max_batch_size=1), settings) as server, server.client() as client:
        late = client.post("/v1/completions", json=LONG)
        assert late.status_code == 504
        assert late.json()["error"]["param"] == "request_timeout"
        # If the time ends before the first token, the stream does not begin.
        text = client.post("/v1/completions", json={**LONG, "stream": True}).text
        told = [line for line in text.splitlines() if line.startswith(("{", "data: {"))]
        assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == 504
        until(lambda: num_inside(server) == 0)


def test_a_request_larger_than_the_cache_is_refused():
    speculation = unguarded("zoo:draft", policy="fixed")
    # Room for about 170 tokens.
    small = replace(ZOO, speculation=speculation, cache_gib=0.001)
    with running(small) as server, server.client() as client, ThreadPoolExecutor(8) as pool:
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "max_tokens"
        body = {**SHORT, "max_tokens": 64}
        answers = [pool.submit(post, server, body) for _ in "abcdef"]
        texts = {a.result(PATIENCE_SECONDS).json()["choices"][0]["text"] for a in answers}
        assert len(texts) == 1
        # Without a limit, an answer may be as long as the cache allows.
        chat = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
        usage = client.post("/v1/chat/completions", json=chat).json()["usage"]
        assert 100 < usage["total_tokens"] == server.service.client.model.max_request_tokens < 200


def test_nan_logits_end_only_one_request(tmp_path):
    recipe = Recipe(vocab=512, context=64)
    model = recipe.build()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("nan")
    save(model, tmp_path / "broken", False)
    save(recipe.build(), tmp_path / "draft", False)
    engine = EngineSettings(
        str(tmp_path / "broken"),
        unguarded(str(tmp_path / "draft"), policy="fixed"),
        dtype="float32",
        num_threads=1,
    )
    with running(engine) as server, server.client() as client:
        good = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "logit_bias": {"5": -100}}
        bad = client.post("/v1/completions", json={**good, "prompt": [1, 5, 3]})
        assert bad.status_code == 500
        assert "not numbers" in bad.json()["error"]["message"]
        events = streamed(server, {**good, "prompt": [1, 5, 3]})
        assert events[-1]["error"]["code"] == 500
        assert client.post("/v1/completions", json=good).status_code == 200


def test_a_full_disk_loses_only_log_lines(tmp_path):
    with pytest.raises(InvalidParameterError, match="log_file"):
        set_up_logs(tmp_path / "no" / "folder")
    with pytest.raises(InvalidParameterError, match="log_level"):
        set_up_logs(None, "loud")
    names = ("draftwise", "uvicorn.error")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each, each.handlers, each.level, each.propagate) for each in loggers]
    handler = set_up_logs(Path("/dev/full"))
    try:
        with running(ZOO) as server, server.client() as client:
            for _ in range(3):
                assert client.post("/v1/completions", json=SHORT).status_code == 200
        handler.close()
        assert handler.num_lost >= 3
    finally:
        for each, handlers, level, propagate in before:
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
        # Unwritten lines are still in the buffer and cannot be flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), handler._stream.fileno())
        handler._stream.close()


def test_a_valid_api_key_and_a_body_that_is_not_too_large_are_required():
    with running(ZOO, ServerSettings(api_keys=("one", "two"), max_body_bytes=1000)) as server:
        with server.client() as client:
            for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}):
                refused = client.post("/v1/completions", json=SHORT, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
            assert client.get("/v1/models").status_code == 401
            assert client.get("/health").status_code == 200
        with server.client(headers={"Authorization": "Bearer two"}) as client:
            declared = client.post("/v1/completions", json={"prompt": "a" * 2000})
            undeclared = client.post(
                "/v1/completions",
                content=(b"a" * 100 for _ in range(20)),
                headers={"Content-Type": "application/json"},
            )
            for refused in (declared, undeclared):
                assert refused.status_code == 413
                assert refused.json()["error"]["param"] == "body"
            assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_target_that_does_not_exist_is_refused():
    with pytest.raises(ModelNotFoundError), running(replace(ZOO, target="zoo:nothing")):
        pass


def test_an_address_in_use_is_reported():
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidParameterError, match="port"):
            open_socket("127.0.0.1", port)


def test_invalid_changes_of_speculation_are_refused(client):
    before = client.get("/v1/speculation").json()
    for changes, param in (
        ({"policy": "no-such"}, "policy"),
        ({"policy": "oracle"}, "policy"),
        ({"lenience": {"8": 0.5}}, "lenience"),
        ({"lenience": 0}, "lenience"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({}, "speculation"),
        ({"draft": "zoo:companion"}, "draft"),
    ):
        refused = client.patch("/v1/speculation", json=changes)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].split(".")[0] == param
    assert client.get("/v1/speculation").json() == before


def test_speculation_can_change_while_requests_run():
    with running(ZOO) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        alone = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        running_one = pool.submit(post, server, LONG)
        until(lambda: num_inside(server) == 1)
        for changes in (
            {"policy": "fixed", "num_speculative_tokens": 3},
            {"policy": "adaedl"},
            {"lenience": {"0": 1.0, "4": 0.7}},
            {"policy": "sv-predictable"},
        ):
            answer = client.patch("/v1/speculation", json=changes)
            if answer.status_code == 200:
                assert changes.items() <= answer.json().items()
        done = running_one.result(PATIENCE_SECONDS).json()
        assert done["choices"][0]["text"] == alone
        assert client.get("/v1/speculation").json()["lenience"] == {"0": 1.0, "4": 0.7}


def test_without_a_draft_there_is_no_speculation():
    with running(replace(ZOO, speculation=None)) as server, server.client() as client:
        state = client.get("/v1/speculation").json()
        assert not state["enabled"]
        refused = client.patch("/v1/speculation", json={"policy": "fixed"})
        assert refused.status_code == 400
        assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_drafts_without_a_model_are_speculation():
    suffix = unguarded("suffix", policy="fixed", num_speculative_tokens=4)
    with running(replace(ZOO, speculation=suffix)) as server, server.client() as client:
        state = client.get("/v1/speculation").json()
        assert state["enabled"]
        assert state["draft"] == "suffix"
        body = {**SHORT, "speculation": {"draft": "suffix"}}
        assert client.post("/v1/completions", json=body).status_code == 200
        refused = client.post("/v1/completions", json={**SHORT, "speculation": {"draft": "ngram"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "speculation.draft"
