import pytest

from draftwise.params import SpeculationConfig
from draftwise.serving.settings import EngineSettings

from .running import running

ZOO = EngineSettings(
    "zoo:target",
    SpeculationConfig("zoo:draft", policy="svip"),
    dtype="float32",
    max_batch_size=8,
    max_model_len=512,
    num_threads=1,
)


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
