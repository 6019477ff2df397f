"""Fuzz test of the server with random request bodies.

python benchmarks/fuzz.py --num-bodies 20000
    Half of the bodies are generated from the server's OpenAPI schema by schemathesis, both valid
    and invalid. The other half come from a grammar of nested, huge, mistyped and malformed values.
    Several clients send them to all endpoints. The test fails if a response is a 5xx other than a
    503 or 504 with a reason, if a response times out, if `/health` fails in between, or if the
    memory of the server or its engine grows.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import hypothesis
import schemathesis
from schemathesis import GenerationMode

from draftwise.benchmark.report import write_report
from draftwise.serving.app import create_app
from draftwise.serving.service import Service
from draftwise.serving.settings import EngineSettings
from serving import Server

PATIENCE_SECONDS = 60.0
# Allocators retain slightly more memory over time. A leak of 1 kB per body would be 20 MiB.
_MAX_GROWTH = 0.05
JSON = {"Content-Type": "application/json"}
WORDS = [
    "Once",
    "upon",
    "a time",
    "é",
    "\u3042",
    "\U0001f600",
    "",
    " ",
    "\x00",
    "\ufffd",
    "<|im_end|>",
]
ENDPOINTS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("PATCH", "/v1/speculation"),
    ("GET", "/v1/speculation"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/zoo:target"),
    ("GET", "/v1/stats"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("POST", "/nowhere"),
    ("DELETE", "/v1/completions"),
]


class Grammar:
    """Generates request bodies that are mostly valid, with a few absurd values."""

    def __init__(self, seed, schema):
        self.random = random.Random(seed)
        bodies = schema["components"]["schemas"]
        self.keys = {
            path: sorted(bodies[name]["properties"])
            for path, name in (
                ("/v1/completions", "CompletionBody"),
                ("/v1/chat/completions", "ChatBody"),
                ("/tokenize", "TokenizeBody"),
                ("/detokenize", "DetokenizeBody"),
                ("/v1/speculation", "SpeculationChange"),
            )
        }

    def request(self):
        """Method, path, content and headers."""
        method, path = self.random.choices(ENDPOINTS, [10, 10, 3, 3, 2] + [0.3] * 8)[0]
        body = self.body(path)
        content = self.encode(body)
        headers = dict(JSON)
        if self.random.random() < 0.03:
            headers = self.random.choice(
                [{}, {"Content-Type": "text/plain"}, {**JSON, "Content-Encoding": "gzip"}]
            )
        if self.random.random() < 0.05:
            headers["X-Request-Id"] = "x" * self.random.choice([1, 100, 1000])
        if method == "PATCH" and isinstance(body, dict):
            # A valid change would affect all clients. The last key wins, so this one is invalid.
            content = content.rstrip()[:-1] + b',"policy":"none such"}' if body else content
        return method, path, content, headers

    def body(self, path):
        """A body, mostly an object with keys of the endpoint."""
        if path not in self.keys or self.random.random() < 0.03:
            return self.junk(3)
        body = {"max_tokens": 2} if "completions" in path else {}
        if path == "/v1/completions":
            body["prompt"] = "Once"
        elif path == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": "Hi"}]
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 3])):
            key = self.random.choice(self.keys[path])
            if self.random.random() < 0.03:
                key = self.text()
            body[key] = self.value(key)
        return body

    def value(self, key):
        """A value for a key, plausible in about half of the cases."""
        pick = self.random.random()
        if pick < 0.45:
            return self.plausible(key)
        if pick < 0.95:
            return self.junk(3)
        return self.huge()

    def plausible(self, key):
        """A value that is probably valid."""
        rng = self.random
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        choices = {
            "prompt": ["Once", [5, 6], ["a", "b"], [[5], [6, 7]], "x" * 3000],
            "messages": [
                [{"role": "user", "content": self.text()}],
                [{"role": "user", "content": [{"type": "text", "text": self.text()}]}],
                [{"role": self.text(), "content": None}],
            ],
            "tools": [[], [{"type": "function", "function": {"name": "f", "parameters": schema}}]],
            "tool_choice": [
                "auto",
                "none",
                "required",
                {"type": "function", "function": {"name": "f"}},
            ],
            "response_format": [
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            ],
            "structured_outputs": [
                {"json": schema},
                {"regex": "[a-c]{1,3}"},
                {"choice": ["a", "b"]},
                {"grammar": 'start: "a"'},
                {"regex": "(((a{1000}){1000}){1000})"},
                {"regex": "("},
                {"json": {"$ref": "#"}},
            ],
            "stream": [True, False],
            "stream_options": [{"include_usage": True}],
            "stop": ["a", ["b", "c"], []],
            "logit_bias": [{"5": 1}, {"5": -100, "6": 100}, {"-1": 1}, {"99999999": 1}],
            "speculation": [{"enabled": False}, {"policy": "fixed", "num_speculative_tokens": 2}],
            "tokens": [[5, 6, 7], [], [0], [2**31 - 1]],
            "policy_options": [{}, {"threshold": 0.5}, {"h": "a"}],
            "chat_template_kwargs": [{}, {"a": 1}, {"messages": []}, {"tokenize": True}],
        }
        if key in choices:
            return rng.choice(choices[key])
        return rng.choice([0, 1, 2, 0.5, 1.0, -1, True, False, None, self.text()])

    def junk(self, depth):
        """An arbitrary JSON value."""
        rng = self.random
        pick = rng.random()
        if depth and pick < 0.25:
            return [self.junk(depth - 1) for _ in range(rng.randrange(4))]
        if depth and pick < 0.5:
            return {self.text(): self.junk(depth - 1) for _ in range(rng.randrange(4))}
        return rng.choice(
            [
                None,
                True,
                False,
                0,
                -1,
                1,
                3.5,
                1e308,
                -0.0,
                1e-320,
                2**31,
                2**63,
                2**64,
                -(2**70),
                10**300,
                "",
                "a",
                "5",
                "true",
                "null",
                "../../etc/passwd",
                "{{7*7}}",
                "\x00",
                self.text(),
            ]
        )

    def huge(self):
        """A very large value."""
        rng = self.random
        size = rng.choice([300, 5_000, 100_000])
        return rng.choice(
            [
                lambda: "a" * (10 * size),
                lambda: " \n" * (5 * size),
                lambda: "é\U0001f600" * size,
                lambda: [None] * size,
                lambda: [5] * size,
                lambda: ["a"] * size,
                lambda: [[5]] * size,
                lambda: [{"role": "user", "content": "a"}] * size,
                lambda: {f"k{number}": 1 for number in range(size)},
                lambda: {str(number): 1 for number in range(size)},
                lambda: _Nested(size),
                lambda: 10 ** min(size, 4000),
                lambda: {"choice": [f"c{number}" for number in range(size)]},
                lambda: {"json": {"enum": [f"c{number}" for number in range(size)]}},
                lambda: {"regex": "(a|aa)*" * (size // 7)},
                lambda: {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "schema": {
                            "properties": {f"k{number}": {"maxLength": 9} for number in range(size)}
                        },
                    },
                },
            ]
        )()

    def text(self):
        """A few words."""
        return "".join(self.random.choices(WORDS, k=self.random.randrange(5)))

    def encode(self, body):
        """Encode as bytes, which are sometimes malformed."""
        rng = self.random
        deep = []
        content = json.dumps(body, default=lambda value: deep.append(value) or "DEEP")
        for each in deep:
            content = content.replace('"DEEP"', each.text(rng), 1)
        encoded = content.encode()
        pick = rng.random()
        if pick < 0.02:
            return encoded[: rng.randrange(len(encoded) + 1)]
        if pick < 0.04:
            at = rng.randrange(len(encoded) + 1)
            return encoded[:at] + bytes([rng.randrange(256)]) + encoded[at:]
        if pick < 0.045:
            return encoded.replace(b'"Once"', b'"\\ud800"')
        if pick < 0.05:
            return encoded.replace(b"2", b"NaN", 1)
        return encoded


class _Nested:
    """Deeply nested brackets, beyond what an encoder supports."""

    def __init__(self, depth):
        self.depth = depth

    def text(self, rng):
        opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('{"properties":{"a":', "}}")])
        return opening * self.depth + "1" + closing * self.depth


def from_schema(schema, count):
    """Generate valid and invalid requests from the schema with schemathesis."""
    operations = [each.ok() for each in schema.get_all_operations()]
    operations = [each for each in operations if each.method.lower() in ("post", "patch")]
    each_count = -(-count // (2 * len(operations)))
    requests = []
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            requests += _cases(operation, mode, each_count)
    return requests[:count]


def _cases(operation, mode, count):
    requests = []

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def collect(case):
        body = case.body
        if operation.path == "/v1/speculation" and isinstance(body, dict):
            body["policy"] = "none such"
        try:
            content = json.dumps(body).encode()
        except (TypeError, ValueError):
            return
        requests.append((operation.method.upper(), operation.path, content, dict(JSON)))

    collect()
    return requests


class Clients:
    """Sends requests and records statuses, faults and memory."""

    def __init__(self, server):
        self.server, self.url = server, server.url
        self.statuses, self.faults, self.memory = Counter(), [], []
        self.slowest = 0.0, ""
        self._lock = threading.Lock()
        self._local = threading.local()

    def send(self, request):
        """Send one request and check the response."""
        if not hasattr(self._local, "client"):
            self._local.client = httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS)
        method, path, content, headers = request
        start = time.monotonic()
        shown = f"{method} {path} {content[:300]!r} ({len(content)} bytes)"
        try:
            answer = self._local.client.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            with self._lock:
                self.faults.append(f"{type(error).__name__} {shown}")
            return
        seconds = time.monotonic() - start
        with self._lock:
            self.statuses[answer.status_code] += 1
            self.slowest = max(self.slowest, (seconds, shown))
            if answer.status_code >= 500 and not self._has_reason(answer):
                self.faults.append(f"{answer.status_code} {answer.text[:200]} {shown}")

    @staticmethod
    def _has_reason(answer):
        return answer.status_code in (503, 504) and bool(answer.json()["error"]["message"])

    def check_server(self):
        """Record the server's memory and check its health."""
        self.memory.append(self.server.memory_mib())
        answer = httpx.get(f"{self.url}/health", timeout=PATIENCE_SECONDS)
        if answer.status_code != 200:
            self.faults.append(f"/health: {answer.text}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-bodies", type=int, default=20_000)
    parser.add_argument("--num-clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policy", default="svip")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=64)
    parser.add_argument("--companion")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    app = create_app(Service(EngineSettings(options.target)))
    document = app.openapi()
    half = options.num_bodies // 2
    requests = from_schema(schemathesis.openapi.from_dict(document), half)
    grammar = Grammar(options.seed, document)
    requests += [grammar.request() for _ in range(options.num_bodies - len(requests))]
    random.Random(options.seed).shuffle(requests)
    print(f"{len(requests)} bodies", flush=True)
    with closing(Server(options, "--max-queue", "32")) as server:
        clients = Clients(server)
        start = time.monotonic()
        with ThreadPoolExecutor(options.num_clients) as pool:
            for at in range(0, len(requests), 500):
                list(pool.map(clients.send, requests[at : at + 500]))
                clients.check_server()
                print(at + 500, dict(clients.statuses), clients.memory[-1], flush=True)
        seconds = time.monotonic() - start
    early = clients.memory[len(clients.memory) // 5]
    growth = {name: clients.memory[-1][name] / early[name] - 1 for name in early}
    report = {
        "num_bodies": len(requests),
        "seconds": seconds,
        "statuses": dict(sorted(clients.statuses.items())),
        "slowest_seconds": clients.slowest[0],
        "slowest": clients.slowest[1][:120],
        "faults": clients.faults[:20],
        "num_faults": len(clients.faults),
        "memory_mib": {name: [each[name] for each in clients.memory] for name in early},
        "growth_after_a_fifth": growth,
    }
    print(json.dumps({key: each for key, each in report.items() if key != "memory_mib"}, indent=1))
    if options.output is not None:
        write_report(options.output, vars(options) | {"output": None}, report)
    sys.exit(1 if clients.faults or max(growth.values()) > _MAX_GROWTH else 0)


if __name__ == "__main__":
    main()
