from types import SimpleNamespace

import pytest

from draftwise.llm import LLM
from draftwise.serving import link
from draftwise.serving.settings import EngineSettings, ServerSettings

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


# A short version of Hermes' and Qwen's templates.
TEMPLATE = (
    "{% for tool in tools or [] %}"
    "Tool {{ tool.function.name }}: {{ tool | tojson }}{{ '\\n' }}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "Result of {{ message.tool_call_id }}: {{ message.content }}"
    "{% else %}"
    "{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "assistant:"
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


@pytest.fixture(scope="session")
def tooled():
    """A server whose chat template supports tools, like that of Hermes."""
    with running(ZOO, ServerSettings(chat_template=TEMPLATE)) as server:
        yield server


@pytest.fixture(scope="session")
def offline():
    """The same target without speculation, in this process."""
    return LLM(ZOO.target, None, ZOO.dtype, max_model_len=ZOO.max_model_len)


@pytest.fixture
def client(server):
    """An HTTP client of the server."""
    with server.client() as client:
        yield client
