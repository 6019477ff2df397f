"""Messages in the form that a chat template reads, and renderings without the user's text."""

import pytest

from draftwise.chat_templates import ChatTemplateParams, render_chat
from draftwise.content_format import ContentFormat, content_format
from draftwise.errors import PromptError

from .chat_styles import BOTH_STYLES, GEMMA_3, LLAVA, PARTS_STYLES, PIXTRAL, SMOLVLM, STRING_STYLES
from .refusals import error_of
from .tiny_models import byte_tokenizer

ALL_STYLES = STRING_STYLES | BOTH_STYLES | PARTS_STYLES
TOKENIZER = byte_tokenizer()
QUESTION = "What is the sum of two and three?"
BOTH_FORMS = {"string": lambda text: text, "part": lambda text: [{"type": "text", "text": text}]}


def rendered(template, messages, **variables):
    return render_chat(TOKENIZER, messages, ChatTemplateParams(template, variables=variables))


def reference(template, messages):
    return TOKENIZER.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )


def talk(form, question=QUESTION):
    return [
        {"role": "system", "content": form("Be brief, and say why.")},
        {"role": "user", "content": form("Hi")},
        {"role": "assistant", "content": form("Hello.")},
        {"role": "user", "content": form(question)},
    ]


def test_the_form_that_a_template_reads():
    for styles, expected in (
        (STRING_STYLES, ContentFormat.STRING),
        (BOTH_STYLES, ContentFormat.BOTH),
        (PARTS_STYLES, ContentFormat.PARTS),
    ):
        for name, style in styles.items():
            assert content_format(style) is expected, name
    for template, expected in (
        ("{% for line in messages[0].content.split('\n') %}{{ line }}{% endfor %}", "STRING"),
        ("{{ messages[0].content.split('</think>')[-1] }}{{ messages[0].content }}", "STRING"),
        ("{% for each in documents %}{{ each['text'] }}{% endfor %}", "STRING"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}{% break %}", "STRING"),
        ("{% for x in messages %}{{ x.content }", "STRING"),
        ("{% set c = messages[0]['content'] %}{% for p in c %}{{ p.text }}{% endfor %}", "PARTS"),
        ("{{ messages[-1].content | map(attribute='text') | join }}", "PARTS"),
        ("{% for p in (m.content or []) %}{{ p.text }}{% endfor %}", "PARTS"),
        ("{% for p in m.content[1:] %}{{ p.text }}{% endfor %}", "PARTS"),
        ("{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}", "PARTS"),
    ):
        assert content_format(template) is ContentFormat[expected], template


@pytest.mark.parametrize("style", ALL_STYLES.values(), ids=ALL_STYLES)
def test_templates_get_the_form_that_they_read(style):
    form = BOTH_FORMS["part" if style in PARTS_STYLES.values() else "string"]
    expected = reference(style, talk(form))
    assert "sum of two" in expected
    assert "{'" not in expected
    for given in BOTH_FORMS.values():
        assert rendered(style, talk(given)) == expected
        # A short text may occur in the template itself.
        assert rendered(style, talk(given, "s")) == reference(style, talk(form, "s"))
    # As OpenAI's clients send them: strings of the system, and parts of the user.
    strings, parts = (talk(form) for form in BOTH_FORMS.values())
    assert rendered(style, [*strings[:3], parts[3]]) == expected


def test_templates_that_read_both_get_what_was_given():
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}<{{ p.text }}{{ p.extra }}>{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "ab", "extra": 1}, {"type": "text", "text": "cd"}]
    system = {"role": "system", "content": "be brief"}
    given = [system, {"role": "user", "content": parts}]
    assert rendered(template, given) == reference(template, given) == "be brief<ab1><cd>"
    assert parts == [{"type": "text", "text": "ab", "extra": 1}, {"type": "text", "text": "cd"}]


def test_several_parts_are_joined_for_templates_that_read_strings():
    parts = [{"type": "text", "text": "What is 2 "}, {"type": "text", "text": "plus 3?"}]
    messages = [{"role": "user", "content": parts}]
    assert rendered("{{ messages[0].content }}!", messages) == "What is 2 plus 3?!"
    assert rendered(SMOLVLM, messages).count("What is 2 plus 3?") == 1
    assert "What is 2  plus 3?" in rendered(LLAVA, messages)


def test_messages_without_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    messages = [{"role": "user", "content": QUESTION}, call]
    for style in PARTS_STYLES.values():
        assert QUESTION in rendered(style, messages)
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert rendered(template, messages) == reference(template, messages)


def test_empty_texts_may_be_left_out():
    for content in ("", " \n", [], [{"type": "text", "text": ""}]):
        assert rendered("Hello!", [{"role": "user", "content": content}]) == "Hello!"
    assert rendered("{{ messages[0].role }}", [{"role": "system", "content": "a"}]) == "system"


LOST = {
    "all": "Hello, what is the sum?",
    "other role": "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
    "misspelt": "{% for m in messages %}{{ m.contents }}{% endfor %}",
    "first message": "{{ messages[0].content }}",
    "number of characters": "{% for c in messages[-1].content %}x{% endfor %}",
    "images": "{% for p in messages[-1].content if p.type == 'image' %}<image>{% endfor %}",
    "length": "{% for p in messages[-1].content %}{{ p.texts }}.{% endfor %}",
    "list": "{{ messages[-1].content if messages[-1].content[0] is mapping }}",
    "parts": "{% for p in messages[-1].content if p is mapping %}{{ p }}{% endfor %}",
}


@pytest.mark.parametrize("template", LOST.values(), ids=LOST)
def test_renderings_without_the_text_of_the_user_are_refused(template):
    for given in BOTH_FORMS.values():
        for question in (QUESTION, "sum", "5"):
            error = error_of(rendered, template, talk(given, question), error=PromptError)
            assert error.field == "messages"


def test_a_lost_part_is_refused():
    template = "{{ messages[0].content[0].text }}"
    parts = [{"type": "text", "text": text} for text in ("ab", "cd")]
    assert rendered(template, [{"role": "user", "content": parts[:1]}]) == "ab"
    with pytest.raises(PromptError, match="leaves out the text of the last user message"):
        rendered(template, [{"role": "user", "content": parts}])


SHOWN = {
    "trim": "{{ messages[-1].content | trim }}",
    "json": "{{ messages | tojson }}",
    "escaped": "{{ messages[-1].content | e }}",
    "urlencoded": "{{ messages[-1].content | urlencode }}",
    "upper case": "{{ messages[-1].content | upper }}",
    "wrapped": "{{ messages[-1].content | wordwrap(9) }}",
    "one line": "{{ messages[-1].content.split() | join(' ') }}",
    "one word a line": "{{ messages[-1].content.split() | join('\n') }}",
    "reversed": "{{ messages[-1].content | reverse }}",
    "shortened": "{{ messages[-1].content | truncate(12) }}",
    "first line": "{{ messages[-1].content.strip().split('\n')[0] }}",
    "spelt": "{% for m in messages %}{% for c in m.content %}{{ c }}-{% endfor %}{% endfor %}",
    "spelt again": "{% set t = messages[-1].content + '' %}{% for c in t %}{{ c }}-{% endfor %}",
    "digits": "{% if '4' in messages[-1].content %}{{ raise_exception('none') }}{% endif %}"
    "{{ messages[-1].content | e }}",
}


def test_templates_may_change_the_text():
    for question in (f' {QUESTION}\n\nAnd <a & "b">?\t', "\n<é>"):
        messages = [{"role": "user", "content": question}]
        for name, template in SHOWN.items():
            assert rendered(template, messages) == reference(template, messages), name


def test_other_messages_may_be_left_out():
    template = "{{ messages[-1].content }}"
    assert rendered(template, talk(BOTH_FORMS["part"])) == QUESTION


def test_the_refusal_of_a_template_is_reported():
    for style in (*PARTS_STYLES.values(), *BOTH_STYLES.values()):
        template = "{{ raise_exception('no answers') }}" + style
        with pytest.raises(PromptError, match="the chat template failed: no answers"):
            rendered(template, talk(BOTH_FORMS["part"]))


def test_an_empty_system_message():
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": QUESTION}]
    for style in (GEMMA_3, PIXTRAL, *PARTS_STYLES.values()):
        assert QUESTION in rendered(style, messages)


def test_named_templates_of_a_tokenizer():
    tokenizer = byte_tokenizer({"default": "{{ messages[0].content }}", "vision": SMOLVLM})
    messages = talk(BOTH_FORMS["part"])[3:]
    assert render_chat(tokenizer, messages, ChatTemplateParams()) == QUESTION
    chosen = render_chat(tokenizer, messages, ChatTemplateParams("vision"))
    assert chosen == reference(SMOLVLM, messages)
    tokenizer = byte_tokenizer({"one": "{{ messages[0].content }}", "two": SMOLVLM})
    with pytest.raises(PromptError, match="the chat template failed") as caught:
        render_chat(tokenizer, messages, ChatTemplateParams())
    assert caught.value.field == "messages"


def test_malformed_messages():
    for message, field, expected in (
        (5, "messages[1]", "must have a 'role' and a 'content'"),
        ({"role": "user"}, "messages[1]", "must have a 'role' and a 'content'"),
        ({"role": "user", "content": 5}, "messages[1].content", "text parts, got 5"),
        ({"role": "user", "content": {"text": "a"}}, "messages[1].content", "text parts, got"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]", "must be a part"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
            "messages[1].content[1].type",
            "must be 'text', the only supported type; got 'image'",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[1].content[0].type",
            "got 'input_audio'",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 5}]},
            "messages[1].content[0].text",
            "must be a string, got 5",
        ),
    ):
        messages = [{"role": "user", "content": "a"}, message]
        error = error_of(rendered, SMOLVLM, messages, error=PromptError)
        assert error.field == field
        assert expected in error.message
