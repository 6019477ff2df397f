"""Signals interrupt one thread at random moments while other threads generate."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..levels import exhaustive_unless
from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

RECIPE = Recipe(vocab=32, seed=11, tokenizer=True)
NUM_SIGNALS = 30

PROGRAM = """
import os, random, signal, sys, threading, time
from draftwise import LLM, SamplingParams
from draftwise.errors import EngineError

# A background process of a shell is started with SIGINT ignored, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
target, draft = sys.argv[1:3]
overlap, num_signals = sys.argv[3] == "True", int(sys.argv[4])
speculation = {"draft": draft, "policy": "fixed", "num_speculative_tokens": 3, "guard": False}
llm = LLM(target, speculation, "float32", max_batch_size=6, max_chunk_tokens=16, overlap=overlap)
work = [
    ([1 + i, 2, 3] * (1 + i % 4), SamplingParams(max_tokens=20 + 5 * i, seed=i)) for i in range(8)
]
expected = [llm.generate([prompt], params)[0].token_ids for prompt, params in work]
stop, problems, counts = threading.Event(), [], {"equal": 0, "cut": 0, "interrupted": 0}

def caller(seed):
    draw = random.Random(seed)
    try:
        while not stop.is_set():
            index = draw.randrange(len(work))
            prompt, params = work[index]
            try:
                (output,) = llm.generate([prompt], params)
            except EngineError:
                counts["cut"] += 1  # the signal came while this very request was changed
                continue
            assert output.token_ids == expected[index]
            counts["equal"] += 1
    except BaseException as error:
        problems.append(error)

threads = [threading.Thread(target=caller, args=(seed,), daemon=True) for seed in range(4)]
for thread in threads:
    thread.start()

armed = threading.Event()

def interrupting():
    draw = random.Random(9)
    for _ in range(num_signals):
        armed.wait()
        time.sleep(draw.uniform(0.0, 0.03))
        armed.clear()
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupting, daemon=True).start()
while counts["interrupted"] < num_signals:
    try:
        armed.set()
        while True:
            llm.generate([work[0][0], work[7][0]], work[7][1])
    except KeyboardInterrupt:
        counts["interrupted"] += 1
stop.set()
for thread in threads:
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
if problems:
    raise problems[0]
assert llm.engine.num_unfinished == 0
assert counts["equal"] > 10 * counts["cut"], counts
print(counts)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no such signals")
@pytest.mark.parametrize("overlap", exhaustive_unless(bool, [False, True]))
def test_signals_in_one_thread_do_not_affect_other_threads(models, overlap):
    folders = models.folder(RECIPE), models.folder(RECIPE.draft())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *folders, str(overlap), str(NUM_SIGNALS)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"'interrupted': {NUM_SIGNALS}" in done.stdout
