"""Options of ``serve`` and ``chat`` that would be ignored or leave a server open are refused."""

import re
import sys

import httpx
import pytest

from draftwise.cli import main

SERVER = ["chat", "--server", "http://127.0.0.1:9"]


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Run a command that must fail, and return its message."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["draftwise", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code
        message = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
        assert "Traceback" not in message
        return message

    return run


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_of_the_environment_is_refused(refusal, monkeypatch, key):
    monkeypatch.setenv("DRAFTWISE_API_KEY", key)
    message = refusal("serve", "zoo:target")
    assert "DRAFTWISE_API_KEY is empty" in message
    assert "--api-key" in message


@pytest.mark.parametrize(
    "option",
    [
        ("--draft", "zoo:draft"),
        ("--companion", "zoo:companion"),
        ("--policy", "fixed"),
        ("--num-speculative-tokens", "5"),
        ("--speculative-config", "{}"),
        ("--dtype", "float32"),
        ("--max-model-len", "512"),
        ("--chat-template", "template.jinja"),
    ],
)
def test_options_of_a_loaded_model_are_refused_with_a_server(refusal, option):
    message = refusal(*SERVER, *option)
    assert f"{option[0]}: cannot be used with --server" in message


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_other_options_beside_the_whole_configuration(refusal, command):
    first = {"generate": ("a", "--target")}.get(command, ())
    arguments = (command, *first, "zoo:target", "--speculative-config", '{"method": "suffix"}')
    for option in (("--draft", "none"), ("--num-speculative-tokens", "4"), ("--policy", "none")):
        message = refusal(*arguments, *option)
        assert f"--speculative-config: cannot be combined with {option[0]}; set" in message


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("serve", "zoo:target"), marks=pytest.mark.slow),
        ("chat", "zoo:target"),
        ("generate", "a", "--target", "zoo:target"),
    ],
)
def test_drafts_of_the_targets_own_layers(refusal, arguments):
    message = refusal(*arguments, "--speculative-config", '{"method": "deepseek_mtp"}')
    assert "'zoo:target' has none, and Draftwise does not run MTP layers yet" in message


def test_a_key_that_is_not_ascii_is_refused(refusal):
    assert "--api-key: has characters that are not ASCII" in refusal(
        *SERVER, "--api-key", "schlüssel"
    )


def test_an_unexpected_list_of_models_is_refused(refusal, monkeypatch):
    def answer(self, method, url, **_):
        return httpx.Response(
            200, json=["zoo"], request=httpx.Request(method, "http://x/v1/models")
        )

    monkeypatch.setattr(httpx.Client, "request", answer)
    assert "does not respond as expected" in refusal(*SERVER)
