from types import SimpleNamespace

import pytest

from draftwise.llm import LLM
from draftwise.serving import link
from draftwise.serving.settings import EngineSettings

from .. import forked
from ..stand_ins import unguarded
from .running import running

ZOO = EngineSettings(
    "zoo:target",
    unguarded("zoo:draft", policy="svip"),
    dtype="float32",
    max_batch_size=8,
    max_model_len=512,
    num_threads=1,
)


@pytest.fixture(scope="session", autouse=True)
def quick_starts():
    """Fork engines from a process that has imported PyTorch, in place of a new interpreter.

    The tests of ``draftwise serve`` in a separate process start engines as users do.
    """
    context = forked.context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
        yield


@pytest.fixture(scope="session")
def server():
    """A server with the bundled models, for tests that do not change its state."""
    with running(ZOO) as server:
        yield server


@pytest.fixture
def client(server):
    """An HTTP client of the server."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def offline():
    """The target of the server without speculation, in this process."""
    return LLM(ZOO.target, None, ZOO.dtype, max_model_len=ZOO.max_model_len)
