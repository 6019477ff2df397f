"""Finished requests release their memory."""

import subprocess
import sys

import pytest

from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=32, context=64)

# In a separate process, because memory that other tests left allocated would hide a leak.
SCRIPT = """
import gc, pathlib, sys, torch
from draftwise import LLM, SamplingParams

torch.set_num_threads(1)
target, draft = sys.argv[1:]
speculation = {"draft": draft, "policy": "fixed", "num_speculative_tokens": 3, "guard": False}
llm = LLM(target, speculation, dtype="float32")
params = SamplingParams(max_tokens=4, temperature=1, repetition_penalty=1.1)

def serve(num_requests):
    for start in range(0, num_requests, 100):
        llm.generate([[1 + (start + i) % 30, 2, 3] for i in range(100)], params)
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1])

# The first thousand requests compile kernels for the batches that occur.
print(serve(1000), serve(2000), llm.engine.num_unfinished)
"""


def test_memory_does_not_grow_over_two_thousand_requests(models):
    folders = [models.folder(TARGET), models.folder(TARGET.draft())]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *folders], capture_output=True, text=True, check=True
    )
    before, after, num_unfinished = map(int, done.stdout.split())
    assert abs(after - before) <= 0.05 * before
    assert num_unfinished == 0
