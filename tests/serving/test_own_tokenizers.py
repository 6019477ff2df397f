"""Prompts and stop strings of a model with its own special tokens and chat template."""

import pytest

from draftwise.serving.settings import EngineSettings

from ..tiny_models import BOS, EOS, MARK, bigram_model, byte_tokenizer, chain_logits, save
from .running import running
from .test_completions import ask, events
from .test_templates import written

# The template reads parts, and ends in the last token of the chain.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}:"
    "{% for part in message['content'] if not quiet %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}a"
)
TOKENIZER = byte_tokenizer(TEMPLATE, f"{BOS} $A", names_end=False)
# No token occurs twice, so a chain of tokens can spell it.
ANSWER = f"hgf{MARK}€ed{EOS}.ñc:a"
CHAIN = TOKENIZER(ANSWER, add_special_tokens=False)["input_ids"]
CHAT = [{"role": "user", "content": "bcd"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("b", "cd")]}]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server whose model repeats ``ANSWER`` forever."""
    folder = tmp_path_factory.mktemp("chain")
    save(bigram_model(chain_logits(len(TOKENIZER), CHAIN)), folder)
    TOKENIZER.save_pretrained(folder)
    engine = EngineSettings(str(folder), dtype="float32", max_batch_size=8, num_threads=1)
    with running(engine) as server, server.client() as client:
        yield client


@pytest.mark.covering("path", "stop")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ([MARK], "hgf", 4),
        ([f"{EOS}.", f"ed{EOS}"], "hgf€", 10),
        ([f"f{MARK}€", "x"], "hg", 7),
        (["d."], "hgf€e", 11),
        ([f"x{MARK}"], TOKENIZER.decode(CHAIN, skip_special_tokens=True), len(CHAIN)),
    ],
)
def test_stop_strings_with_special_tokens(client, path, stop, text, num_tokens):
    is_chat = "chat" in path
    body = {"messages": CHAT} if is_chat else {"prompt": "a"}
    body |= {"stop": stop, "temperature": 0, "max_tokens": len(CHAIN)}
    whole = ask(client, path, **body).json()
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if is_chat else choice["text"]) == text
    assert choice["finish_reason"] == ("length" if num_tokens == len(CHAIN) else "stop")
    assert whole["usage"]["completion_tokens"] == num_tokens
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        choices = [each["choices"][0] for each in events(response)]
    pieces = [each["delta"].get("content") or "" if is_chat else each["text"] for each in choices]
    assert "".join(pieces) == text
    assert choices[-1]["finish_reason"] == choice["finish_reason"]


def test_strings_and_parts_reach_a_template_that_reads_parts(client):
    for messages in (CHAT, PARTS):
        assert written(client, messages=messages) == f"{BOS}:bcd\na"
        body = {"messages": messages, "max_tokens": 3, "temperature": 0}
        answer = ask(client, "/v1/chat/completions", **body).json()
        assert answer["choices"][0]["message"]["content"] == "hgf"
    mixed = [{"role": "system", "content": "ab"}, {"role": "assistant"}, *PARTS]
    assert written(client, messages=mixed) == f"{BOS}:ab\n:\n:bcd\na"


def test_a_rendering_without_the_text_of_the_user_is_refused(client):
    for messages in [CHAT, PARTS]:
        for path in ["/v1/chat/completions", "/tokenize"]:
            quiet = {"quiet": True}
            refused = ask(client, path, messages=messages, chat_template_kwargs=quiet)
            assert refused.status_code == 400, messages
            error = refused.json()["error"]
            assert error["param"] == "messages"
            assert "leaves out the text of the last user message" in error["message"], messages


def test_images_are_refused_by_name(client):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [*PARTS[0]["content"], image]}]
    refused = ask(client, "/v1/chat/completions", messages=messages)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content[2].type"


def test_a_pasted_chat_has_one_token_at_its_beginning(client):
    text = f"{BOS}:bcd\na"
    tokens = ask(client, "/tokenize", messages=CHAT).json()["tokens"]
    assert tokens.count(TOKENIZER.bos_token_id) == 1
    assert ask(client, "/tokenize", prompt=text).json()["tokens"] == tokens
    assert ask(client, "/tokenize", prompt=text.removeprefix(BOS)).json()["tokens"] == tokens
    body = {"max_tokens": 3, "temperature": 0}
    answers = [
        ask(client, prompt=text, **body),
        ask(client, prompt=tokens, **body),
        ask(client, "/v1/chat/completions", messages=CHAT, **body),
    ]
    for answer in answers:
        assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
