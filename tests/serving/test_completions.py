"""Answers of the server, compared with those of the engine and with the schema."""

import json

from draftwise.params import SamplingParams
from draftwise.serving import openapi

PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples has he?\nAnswer:"
CHAT = [{"role": "user", "content": "What is 2 plus 3?"}]
TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}


def events(response):
    """The chunks of a stream, which must end with [DONE]."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ask(client, path="/v1/completions", **body):
    return client.post(path, json=body)


def test_greedy_text_is_the_targets(client, offline):
    expected = offline.generate(PROMPT, SamplingParams(max_tokens=48, temperature=0))[0]
    response = ask(client, prompt=PROMPT, max_tokens=48, temperature=0)
    answer = openapi.Completion.model_validate(response.json())
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.speculation.lossless
    assert answer.usage.speculation.num_steps < len(expected.token_ids)


def test_a_seed_gives_the_same_text_offline(client, offline):
    params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9, seed=5)
    expected = offline.generate(PROMPT, params)[0].text
    alone = {"speculation": {"enabled": False}}
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    assert ask(client, **body, **alone).json()["choices"][0]["text"] == expected
    first, second = (ask(client, **body).json()["choices"][0]["text"] for _ in range(2))
    assert first == second


def test_chunks_concatenate_to_the_answer(client):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "return_tokens": True}
    whole = ask(client, **body).json()["choices"][0]
    options = {"include_usage": True}
    with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "stream_options": options}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    *parts, last = chunks
    assert "".join(each["choices"][0]["text"] for each in parts) == whole["text"]
    pieces = [piece for each in parts for piece in each["choices"][0]["tokens"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert {piece["source"] for piece in pieces} > {"draft"}
    assert parts[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 40
    assert len(parts) < 40  # several tokens come at once
    for each in chunks:
        openapi.Completion.model_validate(each)


def test_several_answers_to_several_prompts(client):
    answer = ask(client, prompt=[PROMPT, "def f(x):"], n=3, max_tokens=12, seed=1).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) > 2
    again = ask(client, prompt=[PROMPT, "def f(x):"], n=3, max_tokens=12, seed=1).json()
    assert [choice["text"] for choice in again["choices"]] == texts
    two = [len(ask(client, "/tokenize", prompt=p).json()["tokens"]) for p in (PROMPT, "def f(x):")]
    assert answer["usage"]["prompt_tokens"] == sum(two)


def test_stop_strings_end_the_text(client):
    whole = ask(client, prompt=PROMPT, max_tokens=40, temperature=0).json()["choices"][0]["text"]
    stop = whole[10:13]
    cut = ask(client, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop]).json()
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_each_answer_begins_with_the_echo_of_its_prompt(client, offline):
    prompts = [offline.tokenize(text) for text in ("one two", "three")]
    answer = ask(client, prompt=prompts, max_tokens=4, echo=True, n=2, temperature=0.7).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 4
    assert all(text.startswith("one two") for text in texts[:2])
    assert all(text.startswith("three") for text in texts[2:])


def test_speculation_settings_of_a_request(client):
    def speculation(**own):
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "speculation": own}
        return ask(client, **body).json()["usage"]["speculation"]

    alone = speculation(enabled=False)
    assert alone["seconds_saved"] == 0
    assert alone["num_drafted"] == 0
    assert alone["num_steps"] == 24
    assert speculation(policy="fixed", num_speculative_tokens=2)["mean_accepted_length"] <= 3
    served = client.get("/v1/speculation").json()["num_speculative_tokens"]
    longer = {"num_speculative_tokens": served + 1}
    refused = ask(client, prompt=PROMPT, max_tokens=24, speculation=longer)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation.num_speculative_tokens"
    lenient = ask(client, prompt=PROMPT, max_tokens=24, speculation={"lenience": 0.5}).json()
    assert not lenient["usage"]["speculation"]["lossless"]


def test_logit_bias_and_penalties_reach_the_engine(client, offline):
    token = offline.tokenize("7")[0]
    answer = ask(client, prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={str(token): 100})
    assert answer.json()["choices"][0]["text"] == "7777"
    params = SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.3)
    expected = offline.generate(PROMPT, params)[0].text
    answer = ask(client, prompt=PROMPT, max_tokens=24, temperature=0, repetition_penalty=1.3)
    assert answer.json()["choices"][0]["text"] == expected


def test_tokenize_and_detokenize(client, offline):
    tokens = ask(client, "/tokenize", prompt=PROMPT).json()
    assert tokens["tokens"] == offline.tokenize(PROMPT)
    assert ask(client, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": PROMPT}
    chat = ask(client, "/tokenize", messages=CHAT).json()
    assert chat["tokens"] == offline.tokenize(CHAT)


def test_errors_name_the_field(client):
    for path, body, status, param in (
        (TEXT, {}, 400, "prompt"),
        (TEXT, {"prompt": ""}, 400, "prompt"),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
        (TEXT, {"prompt": "a", "temperature": 1e-9}, 400, "temperature"),
        (TEXT, {"prompt": "a", "tempreature": 1}, 400, "tempreature"),
        (TEXT, {"prompt": "a", "model": "gpt"}, 404, "model"),
        (TEXT, {"prompt": [10**6]}, 400, "prompt"),
        (TEXT, {"prompt": "a " * 2000}, 400, "prompt"),
        (TEXT, {"prompt": "a", "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        (TEXT, {"prompt": "a", "n": 129}, 400, "n"),
        (TEXT, {"prompt": ["a"] * 100, "n": 2}, 400, "n"),
        (TEXT, {"prompt": "a", "best_of": 3}, 400, "best_of"),
        (TEXT, {"prompt": "a", "speculation": {"policy": "no"}}, 400, "policy"),
        (TEXT, {"prompt": "a", "speculation": {"lenience": 0}}, 400, "speculation.lenience"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}, 3]}, 400, "messages[1]"),
        ("/tokenize", {}, 400, "prompt"),
        ("/nowhere", {}, 404, None),
    ):
        for more in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
            content = json.dumps({**body, **more}).encode()  # surrogates as clients may send them
            response = client.post(path, content=content, headers=JSON)
            assert response.status_code == status, response.text
            error = openapi.ErrorBody.model_validate(response.json()).error
            assert (error.param, error.code) == (param, status)
            assert error.message


def test_health_version_and_metrics_are_served(client):
    ask(client, prompt=PROMPT, max_tokens=8)
    assert client.get("/health").json() == {"status": "ok", "reason": None}
    assert client.get("/version").json()["version"]
    text = client.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
        "draftwise:dropped_tokens_total",
        'draftwise:step_seconds_by_part_total{part="draft"}',
    ):
        assert name in text
    stats = openapi.StatisticsState.model_validate(client.get("/v1/stats").json())
    assert stats.uptime_seconds > 0
    assert (stats.status, stats.reason) == ("ok", None)


def test_min_tokens_is_the_minimum_length(client, offline):
    """Neither a stop token nor a stop string ends the answer early, streamed or not."""
    whole = ask(client, prompt=PROMPT, max_tokens=24, temperature=0).json()["choices"][0]["text"]
    token = offline.tokenize(whole)[3]
    ends = {"stop_token_ids": [token], "stop": [whole[:2]], "max_tokens": 24, "temperature": 0}
    short = ask(client, prompt=PROMPT, **ends).json()
    assert short["usage"]["completion_tokens"] < 12
    long = ask(client, prompt=PROMPT, **ends, min_tokens=12).json()
    assert long["usage"]["completion_tokens"] >= 12
    alone = {"speculation": {"enabled": False}}
    again = ask(client, prompt=PROMPT, **ends, **alone, min_tokens=12).json()
    assert again["choices"][0]["text"] == long["choices"][0]["text"]
    refused = ask(client, prompt=PROMPT, max_tokens=4, min_tokens=5)
    assert refused.json()["error"]["param"] == "min_tokens"
