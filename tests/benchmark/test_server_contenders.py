"""What servers are asked to do: the same work, with the speculation of each contender."""

import math
from contextlib import ExitStack

import pytest

from draftwise.audit.budget import Budget
from draftwise.audit.client import Server
from draftwise.benchmark.servers.contenders import describe_server, server_contenders
from draftwise.benchmark.servers.run import Cell, Measurement, Questions
from draftwise.errors import InvalidParameterError
from draftwise.prompt_files import Question

from ..refusals import error_of
from .stub_server import PLAIN, StubServer, http, plain_json

SETTINGS = {
    "enabled": True,
    "policy": "adaptive",
    "num_speculative_tokens": 5,
    "draft": "suffix, zoo:draft",
    "policies": [
        {"name": "fixed", "usable": True},
        {"name": "adaptive", "usable": True},
        {"name": "sv", "usable": False},
    ],
}
QUESTIONS = [Question((f"question {n}", "and?"), "letters", str(n)) for n in range(40)]


@pytest.fixture
def serve():
    """Start a stub; returns it and its client."""
    with ExitStack() as stack:

        def start(chat=False, **options):
            stub = stack.enter_context(StubServer(**options))
            server = Server(stub.url, Budget(1000, math.inf), chat=chat)
            stack.callback(server.close)
            return stub, server

        yield start


def test_a_server_of_draftwise_is_switched_by_each_request(serve):
    _, server = serve(settings=SETTINGS, owner="draftwise")
    named = server_contenders("d", server, ["none", "fixed:3", "adaptive@suffix"], {})
    assert {each.name: each.fields["speculation"] for each in named} == {
        "d none": {"enabled": False},
        "d fixed:3": {"policy": "fixed", "num_speculative_tokens": 3},
        "d adaptive@suffix": {"policy": "adaptive", "draft": "suffix"},
    }
    assert [each.is_fixed for each in named] == [False, True, False]
    assert [each.learns for each in named] == [False, True, True]
    off, as_is = server_contenders("d", server, None, {})
    assert (off.name, off.fields["speculation"]) == ("d none", {"enabled": False})
    assert as_is.name == "d"
    assert "speculation" not in as_is.fields
    about = describe_server(server, "d")
    assert (about["engine"], about["speculation"]) == ("draftwise", SETTINGS)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("sv", "cannot use 'sv'; it can use fixed, adaptive"),
        ("fixed:6", "at most 5 tokens, got 6; start it with --num-speculative-tokens 6"),
        ("fixed:4x2", "start the server with --tree-width"),
        ("fixed@ngram", "are suffix, zoo:draft, got 'ngram'"),
    ],
)
def test_what_the_server_cannot_do_is_refused(serve, policy, why):
    _, server = serve(settings=SETTINGS)
    error = error_of(server_contenders, "d", server, [policy], {}, error=InvalidParameterError)
    assert why in error.message
    assert error.field == "policies"


def test_other_servers_run_as_they_are(serve):
    """Policies are those of Draftwise's servers."""
    for settings in (None, {**SETTINGS, "enabled": False}):
        _, server = serve(settings=settings)
        (only,) = server_contenders("v", server, ["none", "fixed:3"], {})
        assert (only.name, only.learns) == ("v", False)
        assert "speculation" not in only.fields


def test_all_servers_do_the_same_work(serve):
    """Filters, penalties and end-of-sequence tokens of the model's files do not apply."""
    _, server = serve()
    (own,) = server_contenders("v", server, None, {"top_p": 0.9})
    assert own.fields == {
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    assert own.not_taken == ()
    asked = own.fields_of(7, "salt")
    assert (asked["seed"], asked["cache_salt"]) == (7, "salt")
    assert "seed" not in own.fields_of(None, "salt")
    (ends,) = server_contenders("v", server, None, {"top_k": 3}, stop_at_eos=True)
    assert ends.fields["top_k"] == 3
    assert "ignore_eos" not in ends.fields


def test_fields_that_a_server_refuses_are_left_out_and_named(serve):
    _, server = serve(refuses=("top_k", "ignore_eos", "cache_prompt"))
    (own,) = server_contenders("v", server, None, {})
    assert set(own.fields) == {"min_p", "repetition_penalty"}
    assert own.not_taken == ("ignore_eos", "top_k")
    _, server = serve(refuses=("cache_salt", "cache_prompt"))
    (own,) = server_contenders("v", server, None, {})
    assert own.not_taken == ("cache_salt",)
    assert "cache_salt" not in own.fields_of(1, "salt")


def cell(concurrency=2, rate=None, num_requests=4, rounds=2, temperature=0.5):
    return Cell(Questions("w", QUESTIONS), temperature, concurrency, rate, num_requests, rounds)


def test_contenders_get_the_same_prompts_in_turns(serve):
    stubs, contenders = [], []
    for label in ("a", "b"):
        stub, server = serve()
        stubs.append(stub)
        contenders += server_contenders(label, server, None, {})
    records, turns = [], []
    measurement = Measurement(contenders, 7, seed=100, write=records.append)
    results = measurement.run(cell(), lambda name, kind: turns.append((name, kind)))
    assert turns[:2] == [("a", "untimed"), ("b", "untimed")]
    assert sorted(turns[2:4]) == sorted(turns[4:]) == [("a", "timed"), ("b", "timed")]
    assert len(turns) == measurement.num_turns(cell())
    asked = []
    for stub in stubs:
        assert stub.most_at_once == 2
        own = [(each["prompt"], each["seed"]) for each in stub.bodies]
        asked.append(sorted(own))
        assert len({each["cache_salt"] for each in stub.bodies}) == 3
        first = stub.bodies[0]
        assert (first["max_tokens"], first["temperature"], first["stream"]) == (7, 0.5, True)
    assert asked[0] == asked[1]
    # The prompts of untimed turns are others, with other seeds.
    assert len(set(asked[0])) == len({seed for _, seed in asked[0]}) == 12
    assert [len(result.turns) for result in results.values()] == [2, 2]
    assert len(records) == 2 * 2 * 4
    assert {record["contender"] for record in records} == {"a", "b"}
    assert records[0]["question_id"].isdecimal()
    assert (records[0]["category"], records[0]["concurrency"]) == ("letters", 2)
    assert records[0]["num_tokens"] == 7


def test_conversations_have_the_servers_own_answers(serve):
    stub, server = serve(
        chat=True,
        answer=lambda body: plain_json(
            {"choices": [{"index": 0, "message": {"content": f"answer {len(body['messages'])}"}}]}
        ),
    )
    contenders = server_contenders("a", server, None, {})
    measurement = Measurement(contenders, 7, multi_turn=True)
    results = measurement.run(cell(1, num_requests=1, rounds=1))
    (turn,) = results["a"].turns
    assert [each.turn_of_user for each in turn.requests] == [0, 1]
    texts = [message["content"] for message in stub.bodies[-1]["messages"]]
    assert texts == [turn.requests[0].question.turns[0], "answer 1", "and?"]
    roles = [message["role"] for message in stub.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_a_server_that_fails_is_left_out(serve):
    answers = [http(PLAIN)] * 8 + [plain_json({"error": {"message": "lost"}}, 500)] * 99
    _, failing = serve(answer=lambda _: answers.pop(0))
    _, other = serve()
    contenders = [
        *server_contenders("failing", failing, None, {}),
        *server_contenders("other", other, None, {}),
    ]
    results = Measurement(contenders, 7).run(cell(rounds=3))
    assert [len(results[name].turns) for name in ("failing", "other")] == [1, 3]
    assert results["failing"].error.startswith("500:")
    assert results["other"].error is None


def test_requests_that_arrive_at_random(serve):
    _, server = serve()
    results = Measurement(server_contenders("a", server, None, {}), 7).run(
        cell(None, 400.0, num_requests=6, rounds=1)
    )
    (turn,) = results["a"].turns
    starts = [each.answered.start_seconds for each in turn.requests]
    assert starts == sorted(starts)
    assert len(set(starts)) == 6
