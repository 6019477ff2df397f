"""Triton's compiler accepts the kernels for GPUs that are not there."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
# Bytes that a thread block may use, by compute capability.
SHARED_MEMORY = {86: 99 * 1024, 90: 227 * 1024}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton (make test-interpreted)")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit(capability):
    environment = {key: each for key, each in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in kernels} == {
        "_add_norm",
        "_gated",
        "_rotate_and_store",
        "_attend",
        "_join",
    }
    assert max(int(size) for _, size in kernels) <= SHARED_MEMORY[capability]
