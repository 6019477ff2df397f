"""Many threads using one ``LLM``: correctness of the texts, and overhead of the threads.

    python benchmarks/threads.py soak --seconds 120
    python benchmarks/threads.py speed --output benchmarks/results/threads.json

``soak`` runs eight threads that generate, stream and cancel at random. It compares every text with
that of a single thread for the same request, and exits with status 1 at the first difference.
``speed`` compares one caller with all requests to eight callers with an eighth each, interleaved.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from turns import ratio_of_turns, take_turns

from draftwise import LLM, SamplingParams
from draftwise.benchmark.report import write_report
from draftwise.prompts import load_prompts

PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
NUM_THREADS = 8
# With these policies, the sampled text of a seed depends on step times.
TIMED_POLICIES = ("smartspec", "adaptive", "sv", "sv-predictable", "sv-published")
Work = tuple[str | list[int], SamplingParams]


def mixed_work(count: int, greedy: bool = False) -> list[Work]:
    """Requests of mixed lengths with seeds; half of them sampled, or all greedy."""
    draw = random.Random(0)
    texts = load_prompts(PROMPTS)
    work: list[Work] = []
    for index in range(count):
        text = draw.choice(texts)
        prompt = (text * 8)[: draw.choice((5, 40, 200, 900))]
        sampled = {"temperature": 0.0}
        if index % 2 and not greedy:
            sampled = {"temperature": 0.8, "top_p": 0.95}
        if index % 7 == 3:
            sampled["repetition_penalty"] = 1.2
        params = SamplingParams(max_tokens=draw.choice((1, 8, 32, 96)), seed=index, **sampled)
        work.append((prompt, params))
    return work


def soak(
    llm: LLM, work: list[Work], seconds: float, num_threads: int = NUM_THREADS
) -> Counter[str]:
    """Compare texts from many threads with those from one; returns counts of operations.

    Raises:
        AssertionError: a text differs.
    """
    expected = [llm.generate([prompt], params)[0].token_ids for prompt, params in work]
    end = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    problems: list[BaseException] = []
    lock = threading.Lock()

    def caller(seed: int) -> None:
        draw = random.Random(seed)
        own: Counter[str] = Counter()
        try:
            while time.monotonic() < end and not problems:
                chosen = draw.sample(range(len(work)), draw.choice((1, 1, 2, 5)))
                prompts = [work[index][0] for index in chosen]
                params = [work[index][1] for index in chosen]
                kind = draw.choice(("generate", "on_step", "stream", "cancel", "drop", "tokenize"))
                own[kind] += 1
                if kind == "tokenize":
                    assert llm.tokenize(prompts[0])
                    continue
                if kind in ("generate", "on_step"):
                    on_step = (lambda requests: None) if kind == "on_step" else None
                    texts = [each.token_ids for each in llm.generate(prompts, params, on_step)]
                    whole = True
                else:
                    texts, whole = [[] for _ in prompts], kind == "stream"
                    stream = llm.stream(prompts, params)
                    for number, piece in enumerate(stream):
                        texts[piece.index] += piece.token_ids
                        if not whole and number >= draw.choice((0, 3, 10)):
                            break
                    if kind == "cancel":
                        stream.close()
                    del stream
                for index, text in zip(chosen, texts, strict=True):
                    own["tokens"] += len(text)
                    assert text == (expected[index] if whole else expected[index][: len(text)])
        except BaseException as error:  # reported by the main thread
            problems.append(error)
        with lock:
            counts.update(own)

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    assert llm.engine.num_unfinished == 0
    return counts


def seconds_of(llm: LLM, work: list[Work], num_threads: int) -> float:
    """Seconds for the requests, divided between ``num_threads`` threads."""
    shares = [work[index::num_threads] for index in range(num_threads)]

    def caller(share: list[Work]) -> None:
        llm.generate([prompt for prompt, _ in share], [params for _, params in share])

    threads = [threading.Thread(target=caller, args=(share,)) for share in shares]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def resident_mib() -> float:
    """Resident memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> int:
    """Run ``soak`` or ``speed``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("soak", "speed"))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policy", default="fixed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    speculation = {"draft": "zoo:draft", "policy": options.policy, "num_speculative_tokens": 3}
    llm = LLM(options.target, speculation, options.dtype, max_batch_size=8)
    if options.what == "soak":
        work = mixed_work(60, greedy=options.policy in TIMED_POLICIES)
        counts = soak(llm, work, options.seconds)
        print(f"{options.policy}: no difference in {options.seconds:g} s:", dict(counts))
        return 0
    work = mixed_work(32)
    compare_speed(llm, work, options)
    return 0


def compare_speed(llm: LLM, work: list[Work], options: argparse.Namespace) -> None:
    """Compare one caller with eight; print the result and optionally write it."""
    seconds_of(llm, work, 1)
    memory = {"one": resident_mib()}
    taken = take_turns(
        {
            "one": lambda: seconds_of(llm, work, 1),
            "eight": lambda: seconds_of(llm, work, NUM_THREADS),
        },
        options.rounds,
        num_untimed=1,
    )
    memory["eight"] = resident_mib()
    speed, error = ratio_of_turns(taken["eight"], taken["one"])
    print(f"speed of eight callers relative to one: {speed:.3f} ± {error:.3f}; MiB: {memory}")
    if options.output is not None:
        figures = {"milliseconds": taken, "speed_of_eight": [speed, error], "mib": memory}
        write_report(options.output, vars(options), figures)


if __name__ == "__main__":
    sys.exit(main())
