"""``draftwise chat`` with a loaded model and with a server."""

import io

import pytest
from rich.console import Console

from draftwise.cli.chat import converse
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.outputs import TokenSource
from draftwise.params import SamplingParams
from draftwise.serving.conversation import LocalChatModel, Reply, ServerChatModel
from draftwise.serving.errors import EngineUnavailableError

from .conftest import ZOO

SAID = [{"role": "user", "content": "What is 2 plus 3?"}]
OPTIONS = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def local():
    llm = LLM(ZOO.target, ZOO.speculation, ZOO.dtype, max_model_len=ZOO.max_model_len)
    yield LocalChatModel(llm, SamplingParams(**OPTIONS))
    llm.close()


@pytest.fixture
def remote(server):
    model = ServerChatModel(server.url, None, OPTIONS)
    yield model
    model.close()


def test_local_and_remote_chats_give_the_same_answer(local, remote):
    answers = []
    for model in (local, remote):
        reply = Reply()
        pieces = list(model.answer(SAID, reply))
        assert "".join(text for text, _ in pieces) == reply.text
        assert {source for _, source in pieces} > {TokenSource.DRAFT}
        assert reply.num_tokens == 24
        assert reply.mean_accepted_length > 1
        assert reply.lossless
        answers.append(reply.text)
    assert answers[0] == answers[1]


def test_closing_the_iterator_cancels_the_request(local):
    answer = local.answer(SAID, Reply())
    next(answer)
    answer.close()
    assert local._llm.engine.num_unfinished == 0


def conversation(model, lines, monkeypatch):
    """Output of the terminal."""
    waiting = iter(lines)

    def typed(*_, **__):
        line = next(waiting, None)
        if line is None:
            raise EOFError
        return line

    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(console, "input", typed)
    converse(console, model, "Be brief.")
    return console.file.getvalue()


def test_a_chat_keeps_its_messages_until_reset(local, monkeypatch):
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
    assert "new chat" in shown


def test_a_failed_message_is_shown_and_dropped(local, monkeypatch):
    shown = conversation(local, ["word " * 2000, "Hello"], monkeypatch)
    assert "error prompt" in shown
    assert shown.count("tokens, ") == 1


def test_unreachable_servers_are_reported(server):
    with pytest.raises(EngineUnavailableError, match="server"):
        ServerChatModel("http://127.0.0.1:9", None, {})
    with pytest.raises(InvalidParameterError, match="server"):
        ServerChatModel("http://a:b", None, {})
    with pytest.raises(EngineUnavailableError, match="Not Found"):
        ServerChatModel(f"{server.url}/elsewhere", None, {})
    refusing = ServerChatModel(server.url, None, {"temperature": -1})
    with pytest.raises(EngineUnavailableError, match="greater than or equal to 0"):
        list(refusing.answer(SAID, Reply()))
    refusing.close()
