"""A server under load: throughput, overload, and a soak test.

python benchmarks/serving.py throughput --prompts gsm8k_test.jsonl
    Runs the same prompts through `LLM.generate` and through the server, interleaved, with whole and
    with streamed answers. Reports the server's tokens per second relative to offline.

python benchmarks/serving.py overload --prompts gsm8k_test.jsonl
    Runs four times as many clients as the server admits. Each sends its next request after a
    response, and retries after a refusal. Reports time to first token and throughput.

python benchmarks/serving.py soak --prompts gsm8k_test.jsonl --num-requests 10000
    Runs requests of mixed kinds (completions of several lengths, JSON of a schema, and turns of
    conversations) with four times the capacity in clients, of which a third disconnects early.
    Checks that every request has a response and that every answer is that of the engine. Reports
    the growth of memory from the first tenth of the requests to the end.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from draftwise.audit.budget import Budget
from draftwise.audit.client import Server as Client
from draftwise.benchmark.report import write_report
from draftwise.benchmark.servers.load import at_once
from draftwise.benchmark.servers.requests import ask as ask_once
from draftwise.llm import LLM
from draftwise.params import SamplingParams
from draftwise.prompts import load_prompts
from draftwise.speculation import SpeculationConfig
from draftwise.structured_outputs import StructuredOutputs

PATIENCE_SECONDS = 900.0
# The soak test: tokens of completions and of a turn, and turns of a conversation.
_LENGTHS, _TURN_TOKENS, _NUM_TURNS = (4, 12, 24, 48), 16, 5
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}


@dataclass
class Answer:
    """Response that a client received."""

    status: int
    num_tokens: int = 0
    text: str = ""
    left: bool = False
    error: str | None = None
    retry_after: str | None = None


class Server:
    """`draftwise serve` in a separate process."""

    def __init__(self, options, *further):
        command = [Path(sys.executable).with_name("draftwise"), "serve", options.target]
        command += ["--draft", options.draft, "--dtype", options.dtype, "--port", "0"]
        command += ["--policy", options.policy, "--log-level", "warning"]
        command += ["--num-speculative-tokens", str(options.num_speculative_tokens)]
        command += ["--max-batch-size", str(options.batch_size)]
        command += ["--max-model-len", str(options.max_model_len)]
        if options.companion:
            command += ["--companion", options.companion]
        self.process = subprocess.Popen(
            [*map(str, command), *map(str, further)], stderr=subprocess.PIPE, text=True
        )
        for line in self.process.stderr:
            if " is served at " in line:
                self.url = line.split(" is served at ")[1].split()[0]
                return
            print(line, end="", file=sys.stderr)
        raise SystemExit("the server did not start")

    def close(self):
        self.process.terminate()
        self.process.wait()

    def memory_mib(self):
        """Resident memory of the server and of its engine."""
        sizes = {}
        for name, pid in (("server", self.process.pid), ("engine", self._engine())):
            fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
            sizes[name] = int(fields[0]) / 1024
        return sizes

    def _engine(self):
        """The child process with the most memory; the others are resource trackers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return max(
            (int(pid) for pid in children.split()),
            key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]),
        )


async def full_answers(url, bodies, num_clients):
    """An :class:`Answer` to each body, with `num_clients` concurrent requests."""
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits) as client:
        return await at_once(bodies, lambda body: ask(client, body), num_clients)


async def ask(client, body):
    """Send one request; the client disconnects after `leave_after` pieces of the answer."""
    body = dict(body)
    leave_after = body.pop("leave_after", None)
    while True:
        if not body.get("stream"):
            response = await client.post("/v1/completions", json=body)
            if response.status_code != 429:
                break
            wait = response.headers["retry-after"]
        else:
            answer = await stream(client, body, leave_after)
            if answer.status != 429:
                return answer
            wait = answer.retry_after
        await asyncio.sleep(int(wait))
    answer = Answer(response.status_code)
    content = response.json()
    if answer.status == 200:
        answer.text = content["choices"][0]["text"]
        answer.num_tokens = content["usage"]["completion_tokens"]
    else:
        answer.error = content["error"]["message"]
    return answer


async def stream(client, body, leave_after):
    body = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        answer = Answer(response.status_code)
        if response.status_code != 200:
            answer.error = (await response.aread()).decode()
            answer.retry_after = response.headers.get("retry-after")
            return answer
        num_pieces = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = chunk["error"]["message"]
                continue
            if chunk.get("usage"):
                answer.num_tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                answer.text += choice["text"]
                num_pieces += 1
            if leave_after is not None and num_pieces >= leave_after:
                answer.left = True
                break
    return answer


def load(url, bodies, num_clients):
    """Send requests with minimal client work, `num_clients` at once; refused ones are sent again.

    Returns:
        What is known of each request (:class:`draftwise.benchmark.servers.requests.Answered`).
    """
    client, start = Client(url, Budget(0, 0.0)), time.perf_counter()

    async def one(body):
        fields = {name: value for name, value in body.items() if name != "prompt"}
        return await ask_once(client, body["prompt"], fields, start)

    try:
        answers = asyncio.run(at_once(bodies, one, num_clients))
    finally:
        client.close()
    failed = [each.error for each in answers if each.error is not None]
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    return answers


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def offline(options):
    config = SpeculationConfig(
        options.draft,
        companion=options.companion,
        policy=options.policy,
        num_speculative_tokens=options.num_speculative_tokens,
    )
    return LLM(
        options.target,
        config,
        options.dtype,
        max_batch_size=options.batch_size,
        max_model_len=options.max_model_len,
    )


def throughput(options):
    """Tokens per second of the server relative to the engine."""
    prompts = load_prompts(options.prompts, options.num_requests)
    llm, server = offline(options), Server(options, "--max-queue", 100_000)
    params = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, seed=0, ignore_eos=True
    )
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": 0,
            "ignore_eos": True,
        }
        for prompt in prompts
    ]
    modes = {
        "offline": lambda: [len(o.token_ids) for o in llm.generate(prompts, params)],
        "whole": lambda: counts(bodies, stream=False),
        "streamed": lambda: counts(bodies, stream=True),
    }

    # Enough to keep the engine busy, without a burst of requests at the start.
    num_clients = 2 * options.batch_size

    def counts(bodies, stream):
        fields = {"stream": stream, "stream_options": {"include_usage": True}}
        asked = [{**body, **fields} for body in bodies]
        return [each.num_tokens for each in load(server.url, asked, num_clients)]

    speeds = {name: [] for name in modes}
    try:
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(list(modes), len(modes)):
                start = time.perf_counter()
                counts = modes[name]()
                speed = sum(counts) / (time.perf_counter() - start)
                if number:  # the first round warms up
                    speeds[name].append(speed)
                print(f"round {number} {name}: {speed:.0f} tokens/s", flush=True)
    finally:
        server.close()
    ratios = {
        name: statistics.median(
            ours / theirs for ours, theirs in zip(speeds[name], speeds["offline"], strict=True)
        )
        for name in ("whole", "streamed")
    }
    print({name: round(ratio, 3) for name, ratio in ratios.items()}, "of offline (median)")
    return {"tokens_per_second": speeds, "ratio_to_offline": ratios}


def overload(options):
    """Time to first token at capacity and with four times as many clients."""
    prompts = load_prompts(options.prompts, options.num_requests)
    capacity = options.batch_size + options.max_queue
    # The same prompts come again, and their prefixes would be in the cache.
    server = Server(options, "--max-queue", options.max_queue, "--no-enable-prefix-caching")
    common = {"max_tokens": options.max_tokens, "ignore_eos": True, "stream": True}
    common["stream_options"] = {"include_usage": True}
    bodies = [{"prompt": prompt} | common for prompt in prompts]
    result = {}
    try:
        # A policy that learns has learnt before the first of the three.
        load(server.url, bodies, options.batch_size)
        for name, num_clients in (
            ("places", options.batch_size),
            ("capacity", capacity),
            ("over", 4 * capacity),
        ):
            start = time.perf_counter()
            answers = load(server.url, bodies, num_clients)
            seconds = time.perf_counter() - start
            # From the request that was admitted.
            first = [each.ttft_seconds - each.refused_seconds for each in answers]
            result[name] = {
                "clients": num_clients,
                "tokens_per_second": sum(each.num_tokens for each in answers) / seconds,
                "first_token_seconds": {
                    "median": percentile(first, 0.5),
                    "p99": percentile(first, 0.99),
                    "most": max(first),
                },
            }
            print(name, json.dumps(result[name]), flush=True)
    finally:
        server.close()
    return result


class Case(NamedTuple):
    """A request of the soak test, and the engine's answer to it."""

    body: dict
    text: str
    num_tokens: int


def cases_of(llm, texts):
    """Completions of several lengths, JSON of a schema, and the turns of conversations.

    The prompt of a turn contains all turns before it, with the engine's answers, so the server's
    prefix cache has most of it.
    """
    requests = [(text, {"max_tokens": n, "ignore_eos": True}) for text in texts for n in _LENGTHS]
    requests += [
        (f"{text}\nJSON:", {"max_tokens": 48, "structured_outputs": {"json": _SCHEMA}})
        for text in texts
    ]
    cases = answered(llm, requests)
    history = [""] * (len(texts) // _NUM_TURNS)
    for turn in range(_NUM_TURNS):
        said = texts[turn::_NUM_TURNS]
        history = [f"{past}{text}\n" for past, text in zip(history, said, strict=False)]
        turns = answered(llm, [(past, {"max_tokens": _TURN_TOKENS}) for past in history])
        history = [f"{past}{case.text}\n" for past, case in zip(history, turns, strict=True)]
        cases += turns
    return cases


def answered(llm, requests):
    """The engine's answers to prompts, each with the fields of its body."""
    params = []
    for _, fields in requests:
        fields = dict(fields)
        form = fields.pop("structured_outputs", None)
        constraint = None if form is None else StructuredOutputs(json_schema=form["json"])
        params.append(SamplingParams(temperature=0, structured_outputs=constraint, **fields))
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise SystemExit(f"the engine refused a request of the soak test: {failed[0]}")
    return [
        Case({"prompt": prompt, "temperature": 0} | fields, output.text, len(output.token_ids))
        for (prompt, fields), output in zip(requests, outputs, strict=True)
    ]


def soak(options):
    """Send many requests of all kinds, a third of which the client aborts."""
    draw = random.Random(0)
    llm = offline(options)
    cases = cases_of(llm, load_prompts(options.prompts, 60))
    llm.close()
    server = Server(options, "--max-queue", options.max_queue)
    num_clients = 4 * (options.batch_size + options.max_queue)
    tenth = options.num_requests // 10
    memory, wrong, kinds = [], [], Counter()
    try:
        start = time.perf_counter()
        for part in range(10):
            chosen = [draw.choice(cases) for _ in range(tenth)]
            bodies = []
            for number, case in enumerate(chosen):
                body = {**case.body, "stream": number % 2 == 0 or number % 3 == 0}
                if number % 3 == 0:
                    body["leave_after"] = draw.randint(1, 3)
                bodies.append(body)
            answers = asyncio.run(full_answers(server.url, bodies, num_clients))
            for case, answer in zip(chosen, answers, strict=True):
                if answer.left and answer.error is None:
                    kinds["left"] += 1
                    good = case.text.startswith(answer.text)
                elif answer.status == 200 and answer.error is None:
                    kinds["answered"] += 1
                    good = case.text == answer.text and answer.num_tokens == case.num_tokens
                else:
                    # Refusals for a full queue are sent again, so any other one is a fault.
                    kinds["refused"] += 1
                    good = False
                if not good:
                    wrong.append((case, answer))
            memory.append(server.memory_mib())
            print(f"{(part + 1) * tenth} requests", dict(kinds), memory[-1], flush=True)
        seconds = time.perf_counter() - start
        inside = httpx.get(f"{server.url}/v1/stats").json()
    finally:
        server.close()
    for case, answer in wrong[:5]:
        print("wrong:", case.body, answer, "expected", case.text)
    growth = {name: memory[-1][name] / memory[0][name] - 1 for name in memory[0]}
    print(f"{len(wrong)} wrong, memory grew by {growth}, {seconds:.0f} s")
    return {
        "requests": sum(kinds.values()),
        "different_requests": len(cases),
        "kinds": dict(kinds),
        "wrong": len(wrong),
        "memory_mib": memory,
        "memory_growth": growth,
        "left_in_the_engine": inside["num_running"] + inside["num_waiting"],
        "recent_prefix_cache_hit_rate": inside["prefix_cache_hit_rate"],
        "seconds": seconds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["throughput", "overload", "soak"])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-queue", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = {"throughput": throughput, "overload": overload, "soak": soak}[options.what](options)
    if options.output:
        write_report(options.output, vars(options), figures)


if __name__ == "__main__":
    main()
