"""``draftwise serve``: startup, shutdown and errors."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from .. import forked

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 120
COMMAND = [str(Path(sys.executable).with_name("draftwise")), "serve"]
SMALL = ["--dtype", "float32", "--max-batch-size", "4", "--max-model-len", "512", "--threads", "1"]


def start(*arguments, seen=None):
    """A running command and the address that it prints. Earlier lines go to ``seen``."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    killer = threading.Timer(PATIENCE_SECONDS, process.kill)
    killer.start()
    lines = [] if seen is None else seen
    try:
        for line in process.stderr:
            lines.append(line)
            if " is served at " in line:
                return process, line.split(" is served at ")[1].split()[0]
    finally:
        killer.cancel()
    process.wait()
    raise AssertionError("".join(lines))


@pytest.fixture
def address():
    """A server in a separate process, which the test may end."""
    process, url = start("zoo:target", "--draft", "zoo:draft", "--policy", "svip", *SMALL)
    yield process, url
    if process.poll() is None:
        process.kill()
    process.stderr.close()
    process.wait()


def children(pid):
    """Child processes of a process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(folder.name))
    return found


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until_gone(pids):
    """Wait until processes have ended."""
    for pid in pids:
        for _ in range(PATIENCE_SECONDS * 20):
            if not is_alive(pid):
                break
            time.sleep(0.05)
        assert not is_alive(pid)


def test_shutdown_finishes_running_requests(address):
    process, url = address
    engines = children(process.pid)
    assert engines
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with (
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: {")]
    assert json.loads(rest[-1][6:])["usage"]["completion_tokens"] == 400
    assert process.wait(PATIENCE_SECONDS) == 0
    until_gone(engines)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_server_that_is_killed_leaves_no_engine(address):
    process, _ = address
    engines = children(process.pid)
    process.kill()
    process.wait()
    until_gone(engines)


INVALID = [
    (["zoo:none", "--port", "0"], "target"),
    (["zoo:target", "--companion", "zoo:companion"], "--draft"),
    (["zoo:target", "--draft", "zoo:draft", "--policy", "no"], "--policy"),
    (["zoo:target", "--host", "256.0.0.1"], "--port"),
    (["zoo:target", "--request-timeout", "0"], "--request-timeout"),
    (["zoo:target", "--log-file", "/nowhere/log"], "--log-file"),
    (["zoo:target", "--chat-template", "/nowhere/template"], "--chat-template"),
    (["zoo:target", "--tool-call-parser", "xml"], "--tool-call-parser"),
    (["zoo:target", "--allowed-origins", "page.example"], "--allowed-origins"),
]


def test_errors_are_one_line():
    for arguments, field in INVALID:
        done = forked.run("serve", *arguments, *SMALL)
        assert done.returncode == 2, done.stderr
        assert f"error {field}: " in done.stderr, arguments
        assert "Traceback" not in done.stderr, arguments


SECRET = "a most secret sentence"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """What a server without native kernels wrote to its log file and to the terminal."""
    log = tmp_path_factory.mktemp("logged") / "log"
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWISE_NATIVE", "0")
        process, url = start("zoo:target", *SMALL, "--log-file", str(log), seen=seen)
    try:
        for number in (7, 8):
            httpx.post(
                f"{url}/v1/completions",
                json={"prompt": SECRET, "max_tokens": 4},
                timeout=PATIENCE_SECONDS,
                headers={"X-Request-Id": f"number-{number}"},
            )
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
        seen += process.stderr
        process.stderr.close()
    return log, seen


def test_logs_do_not_contain_prompts(logged):
    log, _ = logged
    text = log.read_text()
    assert SECRET not in text
    lines = [json.loads(line) for line in text.splitlines()]
    ours = [line for line in lines if line.get("request_id") == "number-7"]
    assert ours[0]["path"] == "/v1/completions"
    assert ours[0]["status"] == 200
    assert any(line["message"] == "the engine is ready" for line in lines)
    assert os.stat(log).st_size == len(text.encode())


def test_a_model_that_is_not_on_the_fast_path_is_named_once(logged):
    """It is named on the terminal and in the log file."""
    log, seen = logged
    [shown] = [line.strip() for line in seen if "fast path" in line]
    assert shown.startswith("warning target: 'zoo:target' does not run on the fast path: ")
    lines = [json.loads(line) for line in log.read_text().splitlines() if "fast path" in line]
    assert [(each["level"], f"warning {each['message']}") for each in lines] == [("warning", shown)]


def test_a_full_pipe_loses_only_log_lines(address):
    """A pipe buffers 64 kB, and each request logs a line of at least 150 bytes."""
    process, url = address
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
        for _ in range(1000):
            assert client.get("/version").status_code == 200
        body = {"prompt": "Once", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0
