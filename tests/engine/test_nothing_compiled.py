"""The engine compiles nothing while it serves requests."""

import subprocess

import pytest
import torch
from torch._dynamo.utils import counters

from draftwise import LLM, SamplingParams

from ..stand_ins import unguarded
from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=48, context=128)


def test_five_hundred_mixed_steps_compile_nothing(models, monkeypatch):
    speculation = unguarded(models.folder(TARGET.draft()), policy="svip", num_speculative_tokens=6)
    llm = LLM(models.folder(TARGET), speculation, dtype="float32", device="cpu", max_batch_size=12)
    engine = llm.engine

    def refuse(*arguments, **_):
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "run", refuse)
    counters.clear()
    sizes, added = set(), 0
    generator = torch.Generator().manual_seed(0)
    for step in range(500):
        # Requests arrive in bursts, with prompts and outputs of all lengths.
        for _ in range(int(torch.randint(0, 3, (1,), generator=generator)) * (step % 20 < 12)):
            length = int(torch.randint(1, 60, (1,), generator=generator))
            params = SamplingParams(
                max_tokens=1 + length % 37, temperature=added % 3 / 2, top_p=1 - added % 2 / 5
            )
            engine.add(None, [(added + i) % 48 for i in range(length)], params)
            added += 1
        sizes.add(sum(request.stats.num_steps > 0 for request in engine.step()))
    assert added > 100
    assert len(sizes) > 8
    assert not counters["stats"]
    assert not counters["frames"]
