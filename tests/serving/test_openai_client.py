"""OpenAI's client, used as in its documentation, against a real server."""

import json

import openai
import pytest
from pydantic import BaseModel

from draftwise.params import SamplingParams

from .test_tools import ADD

pytestmark = pytest.mark.slow

MODEL = "zoo:target"
ASKED = [{"role": "user", "content": "What is 2 plus 3?"}]
SHORT = {"model": MODEL, "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def tools(tooled):
    """The client of a server whose chat template supports tools."""
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_chat_completion(tools):
    answer = tools.chat.completions.create(messages=ASKED, **SHORT, store=False, user="me")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 32


def test_developer_messages_and_parts_are_accepted(tools):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 "}]},
    ]
    assert tools.chat.completions.create(messages=messages, **SHORT).choices[0].message.content


def test_chat_completion_stream(tools):
    expected = tools.chat.completions.create(messages=ASKED, **SHORT).choices[0].message.content
    stream = tools.chat.completions.create(
        messages=ASKED, **SHORT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == expected
    assert chunks[-1].usage.completion_tokens == 32


def test_streaming_helper_of_the_client(tools):
    form = {"structured_outputs": {"choice": ["The sum is five."]}}
    with tools.chat.completions.stream(messages=ASKED, **SHORT, extra_body=form) as stream:
        content = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == content == "The sum is five."


def test_logprobs_of_a_chat(tools):
    answer = tools.chat.completions.create(messages=ASKED, **SHORT, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    text = answer.choices[0].message.content
    assert "".join(each.token for each in content) == text
    assert bytes(byte for each in content for byte in each.bytes).decode() == text
    for each in content:
        # Greedy decoding takes the most likely token.
        assert each.top_logprobs[0].token == each.token
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob)
        assert len(each.top_logprobs) == 3


def add(a, b):
    return a + b


def test_a_conversation_with_a_tool_call(tools):
    """The model calls, the client computes, and the model answers with the result."""
    messages = list(ASKED)
    first = tools.chat.completions.create(
        messages=messages, tools=[ADD], tool_choice="required", parallel_tool_calls=False,
        **SHORT | {"max_tokens": 80},
    )  # fmt: skip
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.content is None
    messages.append(message)
    for call in message.tool_calls:
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    second = tools.chat.completions.create(messages=messages, tools=[ADD], **SHORT)
    assert second.choices[0].message.role == "assistant"
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


class Sum(BaseModel):
    """Type of the parsed answer."""

    even: bool
    digit: int


def test_an_answer_matches_a_json_schema(tools):
    schema = {"name": "sum", "strict": True, "schema": ADD["function"]["parameters"]}
    answer = tools.chat.completions.create(
        messages=ASKED,
        response_format={"type": "json_schema", "json_schema": schema},
        **SHORT | {"max_tokens": 80},
    )
    assert json.loads(answer.choices[0].message.content).keys() == {"a", "b"}


def test_parse_into_a_pydantic_model(tools):
    options = SHORT | {"max_tokens": 200}
    answer = tools.chat.completions.parse(messages=ASKED, response_format=Sum, **options)
    assert isinstance(answer.choices[0].message.parsed, Sum)


class Add(BaseModel):
    """Adds two numbers."""

    even: bool


def test_parse_calls_into_pydantic_models(tools):
    answer = tools.chat.completions.parse(
        messages=ASKED,
        tools=[openai.pydantic_function_tool(Add)],
        tool_choice={"type": "function", "function": {"name": "Add"}},
        **SHORT | {"max_tokens": 80},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Add)


def test_completions_with_echo_and_logprobs(tools, offline):
    """Log-probabilities of the prompt equal those of the engine in this process."""
    prompt = "Question: What is 2 plus 3?\nAnswer:"
    answer = tools.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=0
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "".join(logprobs.tokens) == prompt
    assert logprobs.token_logprobs[0] is None
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    expected = offline.generate(prompt, params)[0].prompt_logprobs[1:]
    assert logprobs.token_logprobs[1:] == pytest.approx([e.logprob for e in expected], abs=1e-4)


def test_completions_stream(tools):
    about = {"model": MODEL, "prompt": "Question:", "max_tokens": 24, "temperature": 0}
    whole = tools.completions.create(**about)
    stream = tools.completions.create(**about, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_errors_are_mapped_to_exceptions_of_the_client(tools):
    with pytest.raises(openai.BadRequestError) as refused:
        tools.chat.completions.create(messages=ASKED, **SHORT, extra_body={"temprature": 1})
    assert refused.value.param == "temprature"
    assert "did you mean 'temperature'?" in refused.value.message


def test_streaming_helper_with_tools(tools):
    """The helper accumulates a call whose arguments arrive in pieces."""
    with tools.chat.completions.stream(
        messages=ASKED,
        tools=[openai.pydantic_function_tool(Add)],
        tool_choice={"type": "function", "function": {"name": "Add"}},
        **SHORT | {"max_tokens": 80},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Add)
    assert final.choices[0].finish_reason == "tool_calls"
