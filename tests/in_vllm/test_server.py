"""Concurrent requests to the server that ``draftwise vllm-serve`` starts."""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from .conftest import ONE_THREAD, answer

pytestmark = pytest.mark.slow

START_SECONDS = 1200  # only ends a failing test
NUM_AT_ONCE, NUM_REQUESTS = 16, 64


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def prompts(zoo):
    tokenizer = AutoTokenizer.from_pretrained(zoo["target"])
    return [
        tokenizer.encode(f"Question: what is {3 * number} times {number + 5}?\nAnswer:")
        for number in range(NUM_REQUESTS)
    ]


MODELS = ("--draft", "zoo:draft", "--companion", "zoo:companion")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(MODELS, id="models"),
        pytest.param(("--draft", "suffix"), id="suffix", marks=pytest.mark.exhaustive),
    ],
)
def drafts(request):
    """The arguments that name what drafts."""
    return request.param


@pytest.fixture(scope="module")
def server(tmp_path_factory, drafts):
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [
        str(Path(sys.executable).with_name("draftwise")),
        *("vllm-serve", "zoo:target", *drafts),
        *("--num-speculative-tokens", "4", "--", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(1 << 29), "--served-model-name", "zoo"),
    ]
    with log.open("w") as file:
        environment = os.environ | ONE_THREAD | {"VLLM_LOGGING_LEVEL": "WARNING"}
        # The worker runs in the engine's process, which saves an import of vLLM.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        give_up = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < give_up, log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)
        assert "draftwise.integrations.vllm.worker" in log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


# Requested number of tokens of each request.
LENGTHS = [5 + 11 * (number % 7) for number in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def answers(server, prompts):
    """Tokens of many concurrent requests, ``None`` for those that disconnected."""
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    left = threading.Event()

    def ask(number):
        if number % 5 == 4:  # disconnects before its answer is complete
            stream = client.completions.create(
                model="zoo", prompt=prompts[number], max_tokens=80, temperature=0, stream=True
            )
            next(iter(stream))
            stream.close()
            left.set()
            return None
        done = client.completions.create(
            model="zoo",
            prompt=prompts[number],
            max_tokens=LENGTHS[number],
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return done.choices[0].token_ids

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = list(pool.map(ask, range(NUM_REQUESTS)))
    client.close()
    assert left.is_set()
    return answers


def test_texts_equal_those_of_the_target_alone(answers, zoo, prompts):
    engine = {
        "model": zoo["target"],
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 29,
    }
    expected = answer(engine, prompts, {"temperature": 0.0, "max_tokens": max(LENGTHS)}).tokens
    for number, tokens in enumerate(answers):
        if tokens is not None:
            assert tokens == expected[number][: LENGTHS[number]], number


@pytest.mark.usefixtures("answers")
def test_metrics_are_consistent(server, drafts):
    with urllib.request.urlopen(f"{server}/metrics") as reply:
        text = reply.read().decode()
    assert "vllm:spec_decode_num_draft_tokens" in text
    counts = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("draftwise:")
    )
    count = {name.partition("{")[0]: float(value) for name, value in counts.items()}
    assert count["draftwise:request_steps_total"] > count["draftwise:steps_total"] > 0
    verified = count["draftwise:verified_tokens_total"]
    assert verified >= count["draftwise:accepted_tokens_total"] > 0
    assert count["draftwise:drafted_tokens_total"] >= verified
    # Whether the companion pays depends on the machine.
    assert count["draftwise:scored_steps_total"] == 0 or drafts == MODELS
    assert count["draftwise:gained_tokens_total"] > count["draftwise:request_steps_total"]
