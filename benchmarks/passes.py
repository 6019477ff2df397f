"""Whole passes on the CPU: native kernels, PyTorch's operations and memory reads, interleaved.

python benchmarks/passes.py --output passes.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stored_weights import stored_bytes

from draftwise.benchmark.report import write_report
from draftwise.benchmark.turns import ratios_of_turns, time_calls
from draftwise.core.sampling import LogitControls
from draftwise.kernels.native.drafting import DraftRun
from draftwise.kernels.native.library import kernel_in_use
from draftwise.models import pretrained
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.models.loading import LoadedModel, load_model
from draftwise.models.segment import Segment

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
TOKENS_EACH = (1, 2, 4, 6)
CONTEXT = 160
DRAFTED = 5
READ_BYTES = 400 * 2**20
CPU = torch.device("cpu")


def load(name: str, role: str, native: bool) -> LoadedModel:
    kernels = pretrained.native_pass
    try:
        if not native:
            pretrained.native_pass = lambda _: None
        return load_model(name, role, torch.bfloat16, CPU, 2 * CONTEXT)
    finally:
        pretrained.native_pass = kernels


def passes(model: LoadedModel, batch_size: int, tokens_each: int) -> Callable[[], object]:
    cache = model.model.new_cache(batch_size, 2 * CONTEXT)
    generator = torch.Generator().manual_seed(0)
    count = batch_size * tokens_each
    tokens = torch.randint(0, model.model.vocab_size, (count,), generator=generator).tolist()
    segments = [Segment(row, CONTEXT, tokens_each) for row in range(batch_size)]
    return lambda: model.model.forward(cache, tokens, segments, range(count))


def drafts(model: LoadedModel, batch_size: int) -> Callable[[], object]:
    """Draft five tokens for each request at temperature 1, with their signals."""
    native, vocab = model.model.native, model.model.vocab_size
    assert native is not None
    cache = model.model.new_cache(batch_size, 2 * CONTEXT)
    buffers = DraftBuffers(batch_size, DRAFTED, vocab)
    controls = LogitControls(torch.ones(batch_size), False, False)
    uniforms = torch.rand(batch_size, DRAFTED, dtype=torch.float64)
    all_requests = list(range(batch_size))

    def run() -> None:
        limits = [DRAFTED] * batch_size
        drafting = DraftRun(native, cache, buffers, controls, None, uniforms, True, limits)
        drafting.read([1] * batch_size, [(row, CONTEXT, 1) for row in all_requests], all_requests)
        drafting.follow(all_requests, all_requests, [CONTEXT] * batch_size)
        drafting.draw(DRAFTED)

    return run


def measure(
    models: dict[str, LoadedModel], draft: LoadedModel, setting: tuple[int, int], repeats: int
) -> dict[str, Any]:
    batch_size, tokens_each = setting
    big = torch.zeros(READ_BYTES // 4)
    runs = {name: passes(model, batch_size, tokens_each) for name, model in models.items()}
    times = time_calls(
        {**runs, "read": big.sum, "draft": drafts(draft, batch_size)},
        repeats,
    )
    medians = {name: statistics.median(every) for name, every in times.items()}
    ratios = ratios_of_turns(times["native"], times["pytorch"])
    read = stored_bytes(models["native"]) / medians["native"] / (READ_BYTES / medians["read"])
    return {
        "batch_size": batch_size,
        "tokens_each": tokens_each,
        "native_ms": round(medians["native"], 3),
        "pytorch_ms": round(medians["pytorch"], 3),
        "native_over_pytorch": round(statistics.median(ratios), 3),
        "weights_read_over_plain_read": round(read, 3),
        "draft_ms_per_token": round(medians["draft"] / DRAFTED, 4),
        "draft_over_target": round(medians["draft"] / DRAFTED / medians["native"], 4),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if kernel_in_use() != "native":
        raise SystemExit(f"the native kernels are not available: {kernel_in_use()}")
    models = {
        name: load(arguments.target, "target", name == "native") for name in ("native", "pytorch")
    }
    if models["native"].model.native is None:
        raise SystemExit("the target does not run on the native kernels on this machine")
    draft = load(arguments.draft, "draft", True)
    rows = []
    for setting in itertools.product(BATCH_SIZES, TOKENS_EACH):
        rows.append(measure(models, draft, setting, arguments.repeats))
        print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"passes": rows})


if __name__ == "__main__":
    main()
