"""CUDA paths also run on the CPU, without the native kernels that would replace them there."""

import pytest

from draftwise.models import packed_model


@pytest.fixture(autouse=True, scope="module")
def _in_pytorch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_model, "native_pass", lambda _: None)
        yield
