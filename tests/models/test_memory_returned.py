"""A model that is deleted or closed returns its memory to the system."""

import subprocess
import sys

import pytest

from draftwise import LLM, SamplingParams
from draftwise.errors import ClosedError

from ..stand_ins import unguarded
from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

RECIPE = Recipe(vocab=32, seed=11, tokenizer=True)
GREEDY = SamplingParams(max_tokens=12, temperature=0)

# Prints the memory of the process before, with and after each of some models.
PROGRAM = """
import gc, sys
from pathlib import Path
from draftwise import LLM, SamplingParams, SpeculationConfig

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

def use(target, how, **speculation):
    before = resident()
    llm = LLM(target, {"draft": "zoo:draft", **speculation}, max_batch_size=4)
    llm.generate(["def f(x):"] * 3, SamplingParams(max_tokens=8, temperature=0))
    full = resident()
    if how == "close":
        llm.close()
    del llm
    print(before, full, resident())

gc.disable()  # no reference cycle may keep a model alive
for words in sys.argv[1:]:
    target, how, policy, companion = words.split()
    companion = None if companion == "-" else companion
    use(target, how, policy=policy, num_speculative_tokens=3, companion=companion)
"""


def figures(*runs):
    """KiB before, with and after each model."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *runs], capture_output=True, text=True, check=True
    )
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@needs_linux
def test_most_memory_of_a_large_model_is_released():
    large = "zoo:target@200m"
    ((before, full, after),) = figures(f"{large} del fixed -")
    assert full - before > 500 * 1024
    assert full - after > 0.85 * (full - before)


@needs_linux
def test_models_loaded_in_sequence_do_not_accumulate_memory():
    uses = ["del sv zoo:companion", "close staged draft:int8"]
    runs = figures(*(f"zoo:target {use}" for use in uses * 2))
    settled, last = runs[1], runs[-1]
    # The growth is a fraction of one model.
    assert last[2] - settled[2] < 0.3 * (settled[1] - settled[0])


def build(models):
    speculation = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
    return LLM(models.folder(RECIPE), speculation, dtype="float32")


class TestClosed:
    def test_every_use_of_a_closed_llm_raises(self, models):
        llm = build(models)
        stream = llm.stream("ab", GREEDY)
        engine = llm.engine
        llm.close()
        llm.close()
        uses = [
            lambda: llm.generate("ab", GREEDY),
            lambda: next(stream),
            lambda: next(llm.stream("ab", GREEDY)),
            lambda: llm.tokenize("ab"),
            lambda: llm.change_speculation(num_speculative_tokens=1),
            lambda: llm.with_speculation(None),
            lambda: llm.load_models(llm.speculation),
            lambda: llm.target,
            lambda: llm.draft,
            lambda: llm.engine,
            lambda: engine.add(None, [1], GREEDY),
            engine.step,
            lambda: engine.change_speculation(lenience=1.0),
            lambda: engine.policies,
        ]
        for use in uses:
            with pytest.raises(ClosedError, match="closed; "):
                use()
        engine.close()
        assert engine.num_unfinished == 0

    def test_a_with_block_closes_the_llm(self, models):
        with build(models) as llm:
            (output,) = llm.generate("ab", GREEDY)
        assert len(output.token_ids) == 12
        with pytest.raises(ClosedError):
            llm.generate("ab", GREEDY)

    def test_an_llm_with_shared_models_stays_usable(self, models):
        both, first = [build(models)], 0
        both.append(both[0].with_speculation(None))
        expected = both[0].generate("ab", GREEDY)[0].token_ids
        both.pop(first).close()
        assert both[0].generate("ab", GREEDY)[0].token_ids == expected

    def test_an_engine_outlives_its_llm(self, models):
        engine = build(models).engine
        request = engine.add(None, [1, 2], GREEDY)
        while request.finish_reason is None:
            engine.step()
        assert len(request.output().token_ids) == 12
