"""``draftwise benchmark --server``: what is refused, and what it prints and writes."""

import json

import pytest

from ..benchmark.stub_server import PLAIN, StubServer, chunk, http, stream
from .running import assert_refused, write_prompts

URL = "http://127.0.0.1:9"


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        {"turns": [f"question {n}"], "category": ("letters", "others")[n % 2]} for n in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def command(draftwise, prompt_file, tmp_path):
    def run(*arguments, columns=160):
        own = ("--workload", prompt_file, "-o", tmp_path / "out", *arguments)
        return draftwise("benchmark", *own, columns=columns)

    return run


@pytest.mark.parametrize(
    ("arguments", "begin"),
    [
        (["--server=http://example.org"], "--server: 'example.org' is not this machine"),
        (["--server=ftp://127.0.0.1"], "--server: must be http://HOST:PORT"),
        ([f"--server=a={URL}", f"--server=a={URL}"], "--server: two servers have the name 'a'"),
        ([f"--server={URL}", "--concurrency=0"], "--concurrency: must be at least 1"),
        ([f"--server={URL}", "--concurrency=x"], "--concurrency: must be integers"),
        ([f"--server={URL}", "--request-rate=0"], "--request-rate: must lie in (0"),
        ([f"--server={URL}", "--requests=0"], "--requests: must be at least 1"),
        ([f"--server={URL}", "--target=zoo:target"], "--target: has no effect on servers"),
        ([f"--server={URL}", "--batch-sizes=1"], "--batch-sizes: has no effect on servers"),
        ([f"--server={URL}", "--no-guard"], "--guard: has no effect on servers"),
        ([f"--server={URL}", "--max-tokens=0"], "--max-tokens: must be at least 1"),
        (["--concurrency=2"], "--concurrency: requires --server"),
        (["--note=x"], "--note: requires --server"),
        ([f"--server={URL}"], f"{URL}: does not list its models"),
    ],
)
def test_what_is_refused(command, arguments, begin):
    assert_refused(command(*arguments, columns=200), begin)


def test_other_hosts_are_asked_by_name(command):
    _, _, err = command("--server=http://host.invalid", "--allow-host=host.invalid")
    assert "does not list its models" in err


def test_tables_and_files(command, tmp_path):
    """Two servers in turns: every request is stored, and the key is not."""
    counts = {"num_verified": 4, "num_accepted": 3}
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12, "speculation": counts}
    drafted = stream(chunk("one two"), {"choices": [], "usage": usage})
    with StubServer(lambda _: http(drafted)) as one, StubServer(refuses=("ignore_eos",)) as two:
        servers = ("--server", f"drafts={one.url}/v1", "--server", two.url)
        status, out, err = command(
            *servers,
            *("--concurrency", "1,3", "--temperature", "0,1", "--rounds", "2", "--requests", "3"),
            *("--max-tokens", "7", "--api-key", "SECRET", "--note", "serve one"),
        )
    assert (status, err) == (0, "")
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == {
        *("results.json", "requests.jsonl", "summary.jsonl")
    }
    texts = [path.read_text() for path in folder.iterdir()]
    assert not any("SECRET" in text for text in (out, *texts))
    report = json.loads((folder / "results.json").read_text())
    assert report["is_complete"]
    assert [(c["temperature"], c["concurrency"]) for c in report["cells"]] == [
        *((0.0, 1), (0.0, 3), (1.0, 1), (1.0, 3))
    ]
    for cell in report["cells"]:
        assert list(cell["contenders"]) == ["drafts", "tests"]
        own, other = cell["contenders"].values()
        assert (own["requests"], own["num_tokens"], own["failed_requests"]) == (6, 42, 0)
        assert own["acceptance_rate"] == 0.75
        assert own["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert set(other["categories"]) == {"letters", "others"}
        assert "acceptance_rate" not in other
        assert ("same_texts" in own) == (cell["temperature"] == 0)
    assert report["contenders"]["tests"]["not_taken"] == ["ignore_eos"]
    assert report["settings"]["notes"] == "serve one"
    assert report["settings"]["workload"] == "questions.jsonl"
    lines = (folder / "requests.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    assert len(requests) == 4 * 2 * 2 * 3
    assert {each["text"] for each in requests} == {"one two", "one two three four"}
    # The commands that repeat a request, and what one of the servers does not take.
    assert out.count("$ curl -s ") == 2
    assert "does not take ignore_eos" in out
    assert "questions, temperature 1, 3 at once" in out
    assert " of 4 results are slower than drafts" in out
    assert len(report["slower"]) == out.split(" results are")[1].count("temperature")
    summary = [json.loads(line) for line in (folder / "summary.jsonl").read_text().splitlines()]
    cells = [each for each in summary if each.get("cell") == "cells/contenders/drafts"]
    assert [each["concurrency"] for each in cells] == [1, 3, 1, 3]
    assert str(tmp_path) not in (folder / "summary.jsonl").read_text()


def test_requests_at_a_rate_in_a_narrow_terminal(command, tmp_path):
    metrics = "vllm:spec_decode_num_draft_tokens_total 4.0\n"
    with StubServer(lambda _: http(PLAIN), metrics=metrics) as stub:
        status, out, _ = command(
            *("--server", stub.url, "--request-rate", "200", "--requests", "4", "--rounds", "1"),
            *("--seed", "3"),
            columns=80,
        )
    assert status == 0
    assert "200 requests/s" in out
    (cell,) = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert cell["request_rate"] == 200
    assert "slower" not in out


def test_conversations_are_asked_as_chats(command, tmp_path):
    write_prompts(tmp_path / "questions.jsonl", [["a", "b"]] * 4, "turns")
    with StubServer() as stub:
        status, _, err = command(
            *("--server", stub.url, "--multi-turn", "--concurrency", "1", "--requests", "1"),
            *("--rounds", "1"),
        )
        assert (status, err) == (0, "")
        assert [len(each["messages"]) for each in stub.bodies] == [1, 3, 1, 3]
