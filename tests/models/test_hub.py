"""Hub ids without a network: one request, then the local cache or a typed error."""

import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import constants

from draftwise import LLM, SamplingParams
from draftwise.checkpoints.hub import find_on_hub
from draftwise.errors import ModelNotFoundError
from draftwise.models.loading import load_model

from ..stand_ins import unguarded
from ..tiny_models import Recipe

TARGET = Recipe(vocab=300, context=64, tokenizer=True)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that responds to every request with one status, and an empty cache."""

    class Hub(BaseHTTPRequestHandler):
        status = 503
        asked: ClassVar[list[str]] = []

        def do_HEAD(self):
            self.asked.append(self.path)
            self.send_response(self.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cached(models):
    """A function that puts a tiny model into the local cache, as a download does.

    It returns the model's folder there.
    """

    def put(name):
        repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        folder = repository / "snapshots" / COMMIT
        shutil.copytree(models.folder(TARGET), folder)
        return str(folder)

    return put


def test_one_request_is_sent_to_the_hub(hub):
    with pytest.raises(
        ModelNotFoundError, match=r"'org/m' .*local cache.* responds with status 503"
    ):
        LLM("org/m")
    assert hub.asked == ["/"]


def test_one_request_is_sent_for_a_draft(hub, models):
    with pytest.raises(ModelNotFoundError, match=r"'org/m' .*local cache") as caught:
        LLM(models.folder(TARGET), unguarded("org/m"))
    assert caught.value.field == "draft"
    assert hub.asked == ["/"]


def test_an_unreachable_hub_is_reported(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match=r"127\.0\.0\.1:9 cannot be reached \("):
        find_on_hub("org/m", "target")


def test_no_request_is_sent_offline(hub, monkeypatch, cached):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        LLM("org/m")
    folder = cached("org/m")
    assert find_on_hub("org/m", "target") == folder
    assert LLM("org/m").target.name == "org/m"
    assert hub.asked == []


def test_a_cached_model_loads_without_the_hub(hub, cached):
    cached("org/m")
    llm = LLM("org/m", unguarded("org/m", policy="fixed"))
    assert hub.asked == ["/", "/"]
    (output,) = llm.generate("a bed", SamplingParams(max_tokens=4))
    assert len(output.token_ids) == 4
    quantised = load_model("org/m:int8", "target", torch.float32, torch.device("cpu"))
    assert quantised.name == "org/m:int8"


def test_transformers_handles_a_hub_that_responds(hub, cached):
    hub.status = 404
    cached("org/m")
    assert find_on_hub("org/m", "target") == "org/m"
    assert find_on_hub("org/other", "target") == "org/other"


def test_no_request_is_sent_for_an_invalid_id(hub):
    with pytest.raises(ModelNotFoundError, match=r"'a b/c' is neither a folder nor a hub id"):
        find_on_hub("a b/c", "target")
    assert hub.asked == []
