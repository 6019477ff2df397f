"""Custom chat templates, and variables of templates."""

import pytest

from draftwise.chat_templates import ChatTemplateParams, load_chat_template
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.prompts import tokenize
from draftwise.serving.settings import ServerSettings

from ..tiny_models import byte_tokenizer
from .conftest import ZOO
from .running import running

TEMPLATE = (
    "{% if mood is defined %}({{ mood }}) {% endif %}"
    "{% for message in messages %}{{ message.role }} said {{ message.content }}.\n{% endfor %}"
    "{% generation %}{% if add_generation_prompt %}answer:{% endif %}{% endgeneration %}"
)
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def templated():
    """A server with a custom chat template."""
    with running(ZOO, ServerSettings(chat_template=TEMPLATE)) as server, server.client() as client:
        yield client


def written(client, **body):
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    return client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


@pytest.mark.slow
def test_a_server_uses_the_given_template(templated):
    text = "user said Hello.\nanswer:"
    assert written(templated, messages=CHAT) == text
    body = {"messages": CHAT, "max_tokens": 12, "temperature": 0}
    chat = templated.post("/v1/chat/completions", json=body).json()
    plain = {"prompt": text, "max_tokens": 12, "temperature": 0}
    completion = templated.post("/v1/completions", json=plain).json()
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]


@pytest.mark.slow
def test_a_request_sets_template_variables(templated):
    kwargs = {"mood": "gladly"}
    text = "(gladly) user said Hello.\nanswer:"
    assert written(templated, messages=CHAT, chat_template_kwargs=kwargs) == text
    body = {"messages": CHAT, "max_tokens": 1, "chat_template_kwargs": kwargs}
    with_mood = templated.post("/v1/chat/completions", json=body).json()["usage"]
    del body["chat_template_kwargs"]
    without = templated.post("/v1/chat/completions", json=body).json()["usage"]
    assert with_mood["prompt_tokens"] > without["prompt_tokens"]


@pytest.mark.slow
def test_reserved_variables_are_rejected(templated):
    for kwargs, param in (
        ("mood", "chat_template_kwargs"),
        (["mood"], "chat_template_kwargs"),
        ({"tokenize": True}, "chat_template_kwargs.tokenize"),
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs.chat_template"),
        ({"conversation": []}, "chat_template_kwargs.conversation"),
    ):
        body = {"messages": CHAT, "chat_template_kwargs": kwargs}
        refused = templated.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


def test_a_file_is_checked_when_it_is_read(tmp_path):
    good, bad, empty = (tmp_path / name for name in ("good.jinja", "bad.jinja", "empty.jinja"))
    good.write_text(TEMPLATE)
    bad.write_text("{% for message in messages %}\n{{ message.content }")
    empty.write_text(" \n")
    assert load_chat_template(good) == TEMPLATE
    for file, expected in (
        (bad, "line 2"),
        (empty, "is empty"),
        (tmp_path / "none", "cannot read"),
    ):
        with pytest.raises(InvalidParameterError, match=expected) as caught:
            load_chat_template(file)
        assert caught.value.field == "chat_template"


def test_a_template_may_raise_for_a_chat(tmp_path):
    file = tmp_path / "strict.jinja"
    file.write_text("{{ raise_exception('system message first') }}")
    template = load_chat_template(file)
    with pytest.raises(PromptError, match="system message first"):
        tokenize(byte_tokenizer(), CHAT, ChatTemplateParams(template))


def test_a_template_for_a_tokenizer_without_one():
    tokenizer = byte_tokenizer(chat_template=None)
    with pytest.raises(PromptError, match="no chat template"):
        tokenize(tokenizer, CHAT)
    text, _ = tokenize(tokenizer, CHAT, ChatTemplateParams("{{ messages[0].content }}!"))
    assert text == "Hello!"
