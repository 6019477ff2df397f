"""What a GPU runs is tried on a CPU too, where kernels of our own would take its place."""

import pytest

from draftwise.models import packed_model


@pytest.fixture(autouse=True, scope="module")
def _in_pytorch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_model, "native_pass", lambda _: None)
        yield
