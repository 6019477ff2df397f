"""Talking to a model, here or behind a server."""

import io

import pytest
from rich.console import Console

from draftwise.cli.chat import talk
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.outputs import TokenSource
from draftwise.params import SamplingParams
from draftwise.serving.errors import EngineUnavailableError
from draftwise.serving.talk import LocalTalker, Reply, ServerTalker

from .conftest import ZOO

SAID = [{"role": "user", "content": "What is 2 plus 3?"}]
OPTIONS = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def local():
    llm = LLM(ZOO.target, ZOO.speculation, ZOO.dtype, max_model_len=ZOO.max_model_len)
    yield LocalTalker(llm, SamplingParams(**OPTIONS))
    llm.close()


@pytest.fixture
def remote(server):
    talker = ServerTalker(server.url, None, OPTIONS)
    yield talker
    talker.close()


def test_both_say_the_same(local, remote):
    answers = []
    for talker in (local, remote):
        reply = Reply()
        pieces = list(talker.answer(SAID, reply))
        assert "".join(text for text, _ in pieces) == reply.text
        assert {source for _, source in pieces} > {TokenSource.DRAFT}
        assert reply.num_tokens == 24
        assert reply.mean_accepted_length > 1
        assert reply.lossless
        answers.append(reply.text)
    assert answers[0] == answers[1]


def test_an_answer_that_is_left_frees_its_place(local):
    answer = local.answer(SAID, Reply())
    next(answer)
    answer.close()
    assert local._llm.engine.num_unfinished == 0


def conversation(talker, lines, monkeypatch):
    """What the terminal shows."""
    waiting = iter(lines)

    def typed(*_, **__):
        line = next(waiting, None)
        if line is None:
            raise EOFError
        return line

    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(console, "input", typed)
    talk(console, talker, "Be brief.")
    return console.file.getvalue()


def test_a_conversation_goes_on_until_it_is_begun_anew(local, monkeypatch):
    asked = []
    answer = local.answer
    monkeypatch.setattr(
        local,
        "answer",
        lambda messages, reply: asked.append(list(messages)) or answer(messages, reply),
    )
    lines = ["Hello", "", "And now?", "/reset", "Again", "/what", "/quit", "never"]
    shown = conversation(local, lines, monkeypatch)
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert shown.count("tokens") == 3
    assert "begun anew" in shown


def test_what_cannot_be_answered_is_said_and_forgotten(local, monkeypatch):
    shown = conversation(local, ["word " * 2000, "Hello"], monkeypatch)
    assert "error prompt" in shown
    assert shown.count("tokens, ") == 1


def test_servers_that_do_not_answer(server):
    with pytest.raises(EngineUnavailableError, match="server"):
        ServerTalker("http://127.0.0.1:9", None, {})
    with pytest.raises(InvalidParameterError, match="server"):
        ServerTalker("http://a:b", None, {})
    with pytest.raises(EngineUnavailableError, match="Not Found"):
        ServerTalker(f"{server.url}/elsewhere", None, {})
    refusing = ServerTalker(server.url, None, {"temperature": -1})
    with pytest.raises(EngineUnavailableError, match="greater than or equal to 0"):
        list(refusing.answer(SAID, Reply()))
    refusing.close()
