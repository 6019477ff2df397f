"""CUDA paths also run on the CPU, without the native kernels that would replace them there."""

import pytest

from draftwise.models import pretrained
from draftwise.models.heads import model as head_model

from ..in_vllm.interpreted_triton import patch_language_once
from .placing import IS_INTERPRETED

if IS_INTERPRETED:
    patch_language_once()


@pytest.fixture(autouse=True, scope="module")
def _in_pytorch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "native_pass", lambda _: None)
        patch.setattr(head_model, "native_head", lambda *_: None)
        yield
