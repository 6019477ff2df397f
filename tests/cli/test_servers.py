"""Options of ``serve`` and ``chat`` that would be ignored or leave a server open are refused."""

import re

import httpx
import pytest

SERVER = ["chat", "--server", "http://127.0.0.1:9"]


@pytest.fixture
def refusal(draftwise):
    """Run a command that must fail, and return its message."""

    def run(*arguments):
        status, _, err = draftwise(*arguments, columns=200)
        assert status
        message = re.sub(r"\x1b\[[0-9;]*m", "", err)
        assert "Traceback" not in message
        return message

    return run


def test_an_empty_key_of_the_environment_is_refused(refusal, monkeypatch):
    for key in ("", " "):
        monkeypatch.setenv("DRAFTWISE_API_KEY", key)
        message = refusal("serve", "zoo:target")
        assert "DRAFTWISE_API_KEY is empty" in message
        assert "--api-key" in message


def test_options_of_a_loaded_model_are_refused_with_a_server(refusal):
    for option in (
        ("--draft", "zoo:draft"),
        ("--companion", "zoo:companion"),
        ("--policy", "fixed"),
        ("--num-speculative-tokens", "5"),
        ("--guard",),
        ("--speculative-config", "{}"),
        ("--dtype", "float32"),
        ("--max-model-len", "512"),
        ("--chat-template", "template.jinja"),
    ):
        message = refusal(*SERVER, *option)
        assert f"{option[0]}: cannot be used with --server" in message


def test_other_options_beside_the_whole_configuration(refusal):
    whole = ("--speculative-config", '{"method": "suffix"}')
    for command in (("serve",), ("chat",), ("generate", "a", "--target")):
        for option in (("--draft", "none"), ("--tree-width", "2"), ("--policy", "none")):
            message = refusal(*command, "zoo:target", *whole, *option)
            assert f"--speculative-config: cannot be combined with {option[0]}; set" in message


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("serve", "zoo:target", "--port", "0"), marks=pytest.mark.slow),
        ("chat", "zoo:target"),
        ("generate", "a", "--target", "zoo:target"),
    ],
)
def test_drafts_of_the_targets_own_layers(refusal, arguments):
    message = refusal(*arguments, "--speculative-config", '{"method": "deepseek_mtp"}')
    assert "an MTP layer of the target: 'zoo:target' has none" in message


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
