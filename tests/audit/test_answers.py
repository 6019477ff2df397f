"""Answers are read from the formats of OpenAI's API, vLLM and llama.cpp."""

import pytest

from draftwise.audit.answers import (
    Answer,
    Response,
    ScoredToken,
    joined_chunks,
    read_response,
)
from draftwise.audit.greedy import Difference, difference

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "details": {"x": 1}}


def test_a_completion_with_log_probabilities():
    logprobs = {
        "tokens": [" a", " b"],
        "token_logprobs": [-0.1, -3.0],
        "top_logprobs": [{" a": -0.1, " c": -2.5}, {" c": -0.1, " d": -2.0, " b": -3.0}],
        "text_offset": [0, 2],
    }
    choice = {"index": 0, "text": " a b", "finish_reason": "length", "logprobs": logprobs}
    response = read_response({"choices": [choice], "usage": USAGE})
    answer = response.answers[0]
    assert (answer.text, answer.finish_reason) == (" a b", "length")
    assert answer.tokens[1] == ScoredToken(" b", -3.0, logprobs["top_logprobs"][1])
    assert answer.tokens[0].margin == pytest.approx(2.4)
    assert response.usage == {key: USAGE[key] for key in list(USAGE)[:3]}
    assert response.num_tokens == 2
    assert response.num_drafted is None


def test_a_chat_completion_and_llama_cpps_completion():
    """llama.cpp has the format of chats for completions too, and counts drafts in the timings."""
    content = [
        {
            "token": " a",
            "logprob": -0.5,
            "bytes": [32, 97],
            "top_logprobs": [
                {"token": "\ufffd", "logprob": -0.7},
                {"token": "\ufffd", "logprob": -3.0},
            ],
        }
    ]
    timings = {"draft_n": 9, "draft_n_accepted": 4}
    for own in ({"message": {"role": "assistant", "content": " a"}}, {"text": " a"}):
        choice = {**own, "index": 0, "finish_reason": "stop", "logprobs": {"content": content}}
        response = read_response({"choices": [choice], "timings": timings})
        (token,) = response.answers[0].tokens
        assert token == ScoredToken(" a", -0.5, {"\ufffd": -0.7})
        assert token.margin is None
        assert (response.num_drafted, response.num_accepted) == (9, 4)
        assert response.num_tokens is None


def test_tool_calls_and_answers_out_of_order():
    function = {"name": "add", "arguments": "{}"}
    message = {"content": None, "tool_calls": [{"id": "1", "function": function}]}
    choices = [
        {"index": 1, "message": {"content": "b"}, "finish_reason": "stop"},
        {"index": 0, "message": message, "finish_reason": "tool_calls"},
    ]
    response = read_response({"choices": choices})
    assert response.indices == (0, 1)
    assert response.answers[0].tool_calls == (("add", "{}"),)
    assert [answer.text for answer in response.answers] == ["", "b"]


def test_streams_are_joined():
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": USAGE},
    ]
    response = joined_chunks(chunks)
    assert response.answers[0].text == "a"
    assert response.answers[0].finish_reason == "length"
    assert response.num_tokens == 2
    with pytest.raises(ValueError, match="lost"):
        joined_chunks([{"error": {"message": "lost"}}])


VLLM = {
    "mean_acceptance_length": 1.5,
    "draft_acceptance_rate": 0.25,
    "acceptance_histogram": [3, 0, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 8,
    "num_spec_tokens": 2,
}


@pytest.mark.parametrize(
    ("last", "drafts"),
    [
        ({"usage": USAGE}, (None, 0, ())),
        ({"usage": USAGE, "metrics": None}, (None, 0, ())),
        ({"usage": USAGE, "metrics": {"speculative_decoding": VLLM}}, (8, 2, (3, 0, 1))),
        ({"timings": {"draft_n": 9, "draft_n_accepted": 4}}, (9, 4, ())),
        ({"usage": {"speculation": {"num_verified": 6, "num_accepted": 5}}}, (6, 5, ())),
    ],
)
def test_drafts_of_streams_and_of_whole_answers(last, drafts):
    first = {"choices": [{"index": 0, "text": "a"}], "timings": {"draft_n": 1}}
    if "timings" not in last:
        del first["timings"]
    for response in (
        joined_chunks([first, {"choices": [], **last}]),
        read_response({**first, **last}),
    ):
        counts = response.num_drafted, response.num_accepted, response.acceptance_histogram
        assert counts == drafts


def test_the_first_different_token_is_found_in_texts():
    def response(text, tokens, end="length"):
        scored = tuple(ScoredToken(t, -0.1, {t: -0.1, "?": -0.1 - i}) for i, t in enumerate(tokens))
        return Response((Answer(text, end, scored),), {})

    one = response(" red car.", [" red", " car", "."])
    assert difference(one, one) is None
    for other, position in ((" red cat", 1), (" blue", 0), (" red car!", 2), (" red car", 2)):
        found = difference(one, response(other, []))
        assert found == Difference(position, pytest.approx(float(position)))
    assert difference(one, response(" red car. More", [])) == Difference(3, None)
    assert difference(one, response(" red car.", [], "stop")).position == 2
    # Tokens that were decoded alone have no blanks.
    alone = response("red car.", ["red", "car", "."])
    assert difference(alone, response("red cow.", [])).position == 1
    assert difference(response("ab", []), response("ac", [])) == Difference(1, None)
