from importlib.util import find_spec

import pytest
import torch
from transformers.utils import logging as transformers_logging

from .tiny_models import ModelShelf

# The matrices here are too small to share between threads.
torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
# Has an environment of its own: `make test-vllm`.
collect_ignore = [] if find_spec("vllm") else ["in_vllm"]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders with tiny models, each written when it is first asked for."""
    return ModelShelf(tmp_path_factory.mktemp("models"))
