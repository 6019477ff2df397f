import os
from importlib.util import find_spec

import pytest
import torch
from transformers.utils import logging as transformers_logging

from . import levels, progress
from .tiny_models import ModelShelf

# The matrices here are too small to share between threads.
torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
# Has an environment of its own: `make test-vllm`.
collect_ignore = [] if find_spec("vllm") else ["in_vllm"]
# Models that are not part of the repository, and the variables that name them: `make test-real`.
_REAL = {
    "test_gemma.py": "DRAFTWISE_GEMMA",
    "test_qwen.py": "DRAFTWISE_QWEN_TARGET",
    "test_files.py": "DRAFTWISE_GGUF",
}
collect_ignore += [f"real/{name}" for name, variable in _REAL.items() if variable not in os.environ]


def pytest_addoption(parser):
    progress.add_options(parser)


def pytest_configure(config):
    record = config.getoption("record")
    if record is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Recorder(record))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    levels.mark(items)
    result = yield  # -m and -k select
    progress.select(config, items)
    return result


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders with tiny models, each created on first use."""
    return ModelShelf(tmp_path_factory.mktemp("models"))
