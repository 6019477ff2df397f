"""Failures of each thread and process of a server: killed, stopped, or given invalid input.

After each failure, `/health` reports it within two seconds, and requests are answered or rejected
in time.
"""

import os
import pickle
import signal
import threading
import time
from asyncio import Queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

import httpx
import pytest

from draftwise.params import SamplingParams
from draftwise.serving import service as service_module
from draftwise.serving import supervisor as supervisor_module
from draftwise.serving.grammar_thread import GrammarThread
from draftwise.serving.messages import Add
from draftwise.serving.settings import ServerSettings
from draftwise.speculation import RequestSpeculation
from draftwise.structured_outputs import StructuredOutputs

from .conftest import ZOO
from .running import PATIENCE_SECONDS, running
from .test_command import SMALL, children, start, until_gone
from .test_faults import LONG, SHORT, num_inside, post, until

pytestmark = pytest.mark.slow


class Call:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def supervisor(server):
    return server.service.client._supervisor


def feed(server, command):
    """Send an invalid message to an engine."""
    payload = command if isinstance(command, bytes) else pickle.dumps(command)
    server.call(_send(server, payload))


async def _send(server, payload):
    supervisor(server).send(payload)


def health(server):
    with server.client() as client:
        answer = client.get("/health")
        return answer.status_code, answer.json()["status"]


def until_health_is(server, *expected):
    """Wait for a status. `test_liveness.py` tests how soon it is reported."""
    until(lambda: health(server) in expected)


@contextmanager
def watched(**settings):
    """A separate server whose engine has answered a request, and the answer."""
    with running(ZOO, ServerSettings(**settings)) as server:
        yield server, post(server, SHORT).json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def shared():
    """A server shared by tests that leave its engine responding, and an answer."""
    with watched(request_timeout=60.0) as both:
        yield both


def answers_again(server, expected):
    """Check that the next request is answered, if necessary by a new engine."""
    assert post(server, SHORT).json()["choices"][0]["text"] == expected
    assert health(server) == (200, "ok")


GONE = (503, "starting")
STALLED = (503, "stalled")


def signalled(number):
    return lambda server: os.kill(server.service.client.pid, number)


def fed(command):
    return lambda server: feed(server, command)


def end_the_receiving_thread(server):
    def fail(_):
        raise MemoryError

    supervisor(server)._link._on_report = fail


def close_the_connection(server):
    connection = supervisor(server)._link._connection
    os.close(os.dup(connection.fileno()))
    connection.close()


def fail_to_process_a_report(server):
    client = server.service.client
    follow = client.engine_reported

    def fail_once(turn):
        client.engine_reported = follow
        raise KeyError("a number that nobody knows")

    client.engine_reported = fail_once


@pytest.mark.parametrize(
    ("how", "step_timeout"),
    [
        pytest.param(signalled(signal.SIGKILL), None, id="is killed"),
        pytest.param(signalled(signal.SIGTERM), None, id="is terminated"),
        pytest.param(fed(Call(os._exit, 3)), None, id="exits by itself"),
        pytest.param(fed(b"no pickle"), None, id="cannot read a command"),
        pytest.param(fed(Call(int, "no number")), None, id="executes a command that raises"),
        pytest.param(
            lambda server: supervisor(server)._link._outbox.put(object()),
            None,
            id="gets no commands, as the sending thread ends",
        ),
        pytest.param(end_the_receiving_thread, None, id="is not heard"),
        pytest.param(close_the_connection, None, id="is disconnected"),
        pytest.param(fail_to_process_a_report, None, id="sends a report that is not processed"),
        pytest.param(fed(Call(time.sleep, 3600)), 2.0, id="hangs in a step"),
        pytest.param(signalled(signal.SIGSTOP), 2.0, id="is stopped"),
    ],
)
def test_the_engine_is_replaced_if_its_process(shared, how, step_timeout):
    server, expected = shared
    with ThreadPoolExecutor(2) as pool:
        pid, restarts = server.service.client.pid, supervisor(server).num_restarts
        if step_timeout is not None:
            supervisor(server)._liveness.timeout = step_timeout
        waiting = pool.submit(post, server, LONG)
        until(lambda: num_inside(server) == 1)
        how(server)
        until_health_is(server, GONE, (200, "ok"))
        lost = waiting.result(PATIENCE_SECONDS)
        assert lost.status_code == 503
        assert lost.json()["error"]["param"] == "engine"
        answers_again(server, expected)
        assert server.service.client.pid != pid
        assert supervisor(server).num_restarts == restarts + 1


def test_a_suspended_idle_engine_is_stalled_until_it_resumes(shared):
    server, expected = shared
    pid = server.service.client.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until_health_is(server, STALLED)
        assert "draftwise:engine_up 0.0" in server.service.metrics_text().decode()
    finally:
        os.kill(pid, signal.SIGCONT)
    until_health_is(server, (200, "ok"))
    answers_again(server, expected)
    assert server.service.client.pid == pid


def test_requests_of_a_suspended_engine_time_out():
    with watched(request_timeout=3.0) as (server, expected):
        pid = server.service.client.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with server.client() as client:
                assert post(server, SHORT).status_code == 504
                assert client.get("/v1/speculation").status_code == 504
                changed = client.patch("/v1/speculation", json={"num_speculative_tokens": 1})
                assert changed.status_code == 504
        finally:
            os.kill(pid, signal.SIGCONT)
        until_health_is(server, (200, "ok"))
        answers_again(server, expected)
        # The engine made the change when it went on, and the next engine makes it too.
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.service.client.pid not in (None, pid))
        until_health_is(server, (200, "ok"))
        answers_again(server, expected)
        with server.client() as client:
            assert client.get("/v1/speculation").json()["num_speculative_tokens"] == 1


def test_a_command_that_cannot_be_serialised_affects_no_other(shared):
    server, expected = shared
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, server, LONG)
        until(lambda: num_inside(server) == 1)
        with pytest.raises(Exception, match="cannot be sent to the engine"):
            server.call(server.service.client.speculation(policy_options={"a": lambda: None}))
        assert other.result(PATIENCE_SECONDS).status_code == 200
        answers_again(server, expected)


def test_a_request_with_an_unexpected_error_affects_no_other(shared):
    """Here the parameters of the request have the wrong type."""
    server, expected = shared
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, server, LONG)
        until(lambda: num_inside(server) == 1)

        async def submit():
            request = server.service.client.submit(
                None, [5, 6], object(), RequestSpeculation(), 0, Queue()
            )
            await request.added()

        with pytest.raises(Exception, match="unexpectedly"):
            server.call(submit())
        assert other.result(PATIENCE_SECONDS).status_code == 200
        answers_again(server, expected)


def test_another_engine_is_tried_until_one_starts(shared, monkeypatch):
    server, expected = shared
    tries, link = [], supervisor_module.EngineLink

    def fail_twice(*arguments):
        tries.append(arguments)
        if len(tries) <= 2:
            raise OSError("too many processes")
        return link(*arguments)

    monkeypatch.setattr(supervisor_module, "EngineLink", fail_twice)
    os.kill(server.service.client.pid, signal.SIGKILL)
    until_health_is(server, GONE)
    answers_again(server, expected)
    assert len(tries) == 3


def with_grammar(**form):
    return {"prompt": "Once", "max_tokens": 3, "temperature": 0, "structured_outputs": form}


class TestGrammars:
    """Grammars are compiled in a thread of the engine's process."""

    def test_a_slow_grammar_delays_no_other_request(self, shared):
        """A later request is answered first."""
        server, _ = shared
        slow = "(((e{1000}){1000}){1000})"
        order = []
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(post, server, with_grammar(regex=slow))
            first.add_done_callback(lambda _: order.append("slow"))
            until(lambda: server.service.num_inside == 1)
            second = pool.submit(post, server, SHORT)
            second.add_done_callback(lambda _: order.append("plain"))
            assert second.result(PATIENCE_SECONDS).status_code == 200
            assert first.result(PATIENCE_SECONDS).status_code in (200, 400)
        assert order == ["plain", "slow"]

    def test_a_request_cancelled_during_compilation_does_not_run(self, shared):
        server, expected = shared
        slow = "((((d{1000}){1000}){1000}))"
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=with_grammar(regex=slow), timeout=0.2)
        until(lambda: server.service.num_inside == 0)
        answers_again(server, expected)
        until(lambda: num_inside(server) == 0)

    def test_an_invalid_grammar_is_rejected(self, shared):
        server, expected = shared
        for form, message in (
            ({"json": {"enum": [str(number) for number in range(60_000)]}}, "characters"),
            ({"regex": "a" * 300_000}, "characters"),
            ({"regex": "(a|aa)*" * 2000}, "cannot be followed"),
            ({"grammar": "start: ("}, "structured_outputs.grammar"),
        ):
            answer = post(server, with_grammar(**form))
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert message in f"{error['param']} {error['message']}"
        answers_again(server, expected)


def test_a_hanging_grammar_compiler_delays_only_new_grammars():
    module = "__import__('draftwise.engine.grammars', fromlist=['-'])"
    hang = f"setattr({module}.GrammarCompiler, 'matcher', lambda *_: __import__('time').sleep(999))"
    ping = "__import__('draftwise.serving.messages', fromlist=['-']).Ping()"
    with watched(request_timeout=3.0) as (server, expected):
        feed(server, Call(eval, f"({hang}, {ping})[1]"))
        late = post(server, with_grammar(regex="[ab]"))
        assert late.status_code == 504
        answers_again(server, expected)
        assert post(server, with_grammar(regex="[bc]")).status_code == 504
        answers_again(server, expected)
        assert supervisor(server).num_restarts == 0


def test_a_panic_of_the_grammar_compiler_fails_only_its_request():
    """Panics of Rust libraries are not subclasses of Exception."""

    class Panic(BaseException):
        pass

    class Compiler:
        def matcher(self, form):
            raise Panic(form)

    thread = GrammarThread(Compiler())
    form = StructuredOutputs(json_object=True)
    for key in range(3):
        params = SamplingParams(structured_outputs=form)
        thread.submit(Add(key, None, [1], params, RequestSpeculation()))
        assert wait([thread.readable], PATIENCE_SECONDS)
        (prepared,) = thread.take()
        assert prepared.command.key == key
        assert isinstance(prepared.error, Panic)


def test_grammars_of_cancelled_requests_are_not_compiled():
    compiled, go_on = [], threading.Event()

    class Compiler:
        def matcher(self, form):
            go_on.wait(PATIENCE_SECONDS)
            compiled.append(form.regex)

    thread = GrammarThread(Compiler())
    for key in range(5):
        params = SamplingParams(structured_outputs=StructuredOutputs(regex=f"a{key}"))
        thread.submit(Add(key, None, [1], params, RequestSpeculation()))
    for key in (1, 2, 3):
        thread.cancel(key)
    go_on.set()
    prepared = []
    while len(prepared) < 2:
        assert wait([thread.readable], PATIENCE_SECONDS)
        prepared += [each.command.key for each in thread.take()]
    assert prepared == [0, 4]
    assert compiled == ["a0", "a4"]


def test_an_error_while_a_request_is_cancelled_ends_the_others():
    module = "__import__('draftwise.engine.scheduler', fromlist=['-'])"
    fail = f"setattr({module}.Scheduler, 'cancel', lambda *_: 1 / 0)"
    ping = "__import__('draftwise.serving.messages', fromlist=['-']).Ping()"
    longer = LONG | {"max_tokens": 1500}  # it must not end before the error
    with watched() as (server, expected), ThreadPoolExecutor(1) as pool:
        feed(server, Call(eval, f"({fail}, {ping})[1]"))
        other = pool.submit(post, server, longer)
        until(lambda: num_inside(server) == 1)
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG, timeout=0.3)
        answer = other.result(PATIENCE_SECONDS)
        assert answer.status_code == 500
        assert answer.json()["error"]["param"] == "engine"
        answers_again(server, expected)
        assert supervisor(server).num_restarts == 0


def test_health_when_the_monitor_has_ended():
    with watched() as (server, _):
        task = supervisor(server)._monitor
        server.call(_cancel(task))
        until_health_is(server, STALLED)


async def _cancel(task):
    task.cancel()


def test_errors_in_metrics_do_not_affect_answers(shared, monkeypatch):
    server, expected = shared
    before = supervisor(server).num_restarts

    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(server.service.client, "_on_outputs", fail)
    answers_again(server, expected)
    assert supervisor(server).num_restarts == before


class TestTheTokenizer:
    def test_a_hanging_tokenizer_is_reported_and_delays_only_texts(self, monkeypatch):
        go_on = threading.Event()
        with watched(request_timeout=3.0) as (server, expected):
            tokenize = service_module.tokenize

            def hang(tokenizer, prompt, *arguments, **options):
                if isinstance(prompt, str):
                    go_on.wait(PATIENCE_SECONDS)
                return tokenize(tokenizer, prompt, *arguments, **options)

            monkeypatch.setattr(service_module, "tokenize", hang)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(post, server, SHORT)
                until_health_is(server, STALLED)
                late = waiting.result(PATIENCE_SECONDS)
                assert late.status_code == 504
                assert late.json()["error"]["param"] == "request_timeout"
                assert post(server, {**SHORT, "prompt": [5, 6, 7]}).status_code == 200
                go_on.set()
            monkeypatch.undo()
            until_health_is(server, (200, "ok"))
            answers_again(server, expected)

    def test_a_tokenizer_that_raises_continues(self, shared, monkeypatch):
        server, expected = shared

        def fail(*_, **__):
            raise MemoryError

        with monkeypatch.context() as patch, server.client() as client:
            patch.setattr(service_module, "tokenize", fail)
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 500
        answers_again(server, expected)

    def test_a_hanging_tokenizer_does_not_prevent_the_shutdown(self, monkeypatch):
        go_on = threading.Event()
        with watched(request_timeout=1.0) as (server, _):
            monkeypatch.setattr(service_module, "tokenize", lambda *_, **__: go_on.wait(3600))
            assert post(server, SHORT).status_code == 504
        go_on.set()


def test_the_resource_tracker_may_die(shared):
    """Python starts a resource tracker, which Draftwise does not need."""
    server, expected = shared
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    answers_again(server, expected)
    os.kill(server.service.client.pid, signal.SIGKILL)
    until_health_is(server, GONE)
    answers_again(server, expected)


def test_a_hanging_engine_ends_with_a_killed_server():
    process, _ = start("zoo:target", *SMALL)
    engines = children(process.pid)
    for engine in engines:
        os.kill(engine, signal.SIGSTOP)
    process.kill()
    process.stderr.close()
    process.wait()
    for engine in engines:
        os.kill(engine, signal.SIGCONT)
    until_gone(engines)


@pytest.fixture(scope="module")
def replicated():
    """A server whose engine has replicas of the draft and has answered a request; the answer."""
    engine = replace(ZOO, draft_replicas=2, speculation=replace(ZOO.speculation, policy="fixed"))
    with running(engine, ServerSettings(step_timeout=3.0)) as server:
        yield server, post(server, SHORT).json()["choices"][0]["text"]


class TestReplicas:
    """Processes with replicas of the draft."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_replica_that_ends_or_hangs_ends_the_engine(self, replicated, number):
        server, expected = replicated
        (replica,) = [
            pid for pid in children(server.service.client.pid) if b"replicas" in _command(pid)
        ]
        os.kill(replica, number)
        # Two prompts at once: the replica has every second cache slot.
        lost = post(server, {**LONG, "prompt": [LONG["prompt"]] * 2})
        assert lost.status_code == 503
        assert post(server, SHORT).json()["choices"][0]["text"] == expected
        if number == signal.SIGSTOP:
            os.kill(replica, signal.SIGKILL)


def _command(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
