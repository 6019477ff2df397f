"""What a model loses that the native kernels do not compute: passes of decoding in turns, on a CPU.

    python benchmarks/fast_path.py --output benchmarks/results/fast_path.json

The same weights are computed in several ways in one process:

- native: a whole pass by the kernels, which is the fast path;
- written out: PyTorch's operations without Hugging Face's modules, attention by our kernel, as for
  a Llama with something that the kernels leave out;
- no kernels: the same with PyTorch's attention, as without a compiler;
- modules: Hugging Face's modules, attention by our kernel, as for other architectures.

Printed are medians of ratios: the time of a pass over that of the native one of the same turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from turns import ratio_of_turns, take_turns

from draftwise.benchmark.report import write_report
from draftwise.kernels.native import suitability
from draftwise.kernels.native.library import kernel_in_use
from draftwise.models import forward, packed_model, packing
from draftwise.models.loading import LoadedModel, load_model
from draftwise.models.segment import Segment

CONTEXT = 160
CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
# How the weights of each type are computed; the first one of all is the measure of a model.
CASES = (
    ("native", "bfloat16"),
    ("native", "float32"),
    *((how, "bfloat16") for how in ("written out", "no kernels", "modules")),
    *((how, "float32") for how in ("written out", "no kernels", "modules")),
    ("written out", "float16"),
)


@contextmanager
def patched(*changes: tuple[Any, str, object]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def load(name: str, how: str, dtype: str) -> LoadedModel:
    if how == "native":  # also where the kernels are not the fastest
        changes: list[tuple[Any, str, object]] = [(suitability, "_SMALL_MODEL", float("inf"))]
    else:
        changes = [(packed_model, "native_pass", lambda _: None)]
    if how == "modules":
        changes.append((forward, "why_not_described", lambda _: "it is not described"))
    with patched(*changes):
        model = load_model(name, "target", DTYPES[dtype], CPU, 2 * CONTEXT)
    assert (model.model.native is not None) == (how == "native")
    return model


def passes(model: LoadedModel, how: str, batch_size: int) -> Callable[[], None]:
    """One token of each request."""
    cache = model.model.new_cache(batch_size, 2 * CONTEXT)
    segments = [Segment(row, CONTEXT, 1) for row in range(batch_size)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.model.vocab_size, (batch_size,), generator=generator).tolist()
    plan = (lambda *_: None) if how == "no kernels" else packing.native_attention

    def run() -> None:
        with patched((packing, "native_attention", plan)):
            model.model.forward(cache, tokens, segments, range(batch_size))

    return run


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["zoo:draft", "zoo:target@200m"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if kernel_in_use() != "native":
        raise SystemExit(f"there is nothing to compare: {kernel_in_use()}")
    rows = []
    for name in arguments.models:
        models = {(how, dtype): load(name, how, dtype) for how, dtype in CASES}
        for batch_size in arguments.batch_sizes:
            runs = {case: passes(model, case[0], batch_size) for case, model in models.items()}
            names = {"/".join(case): run for case, run in runs.items()}
            times = take_turns(names, arguments.repeats)
            for how, dtype in CASES:
                ratio, error = ratio_of_turns(times["/".join(CASES[0])], times[f"{how}/{dtype}"])
                rows.append(
                    {
                        "model": name,
                        "batch_size": batch_size,
                        "computed": how,
                        "dtype": dtype,
                        "over_native_bfloat16": round(ratio, 3),
                        "standard_error": round(error, 3),
                        "shortest_ms": round(min(times[f"{how}/{dtype}"]), 3),
                    }
                )
                print(*rows[-1].values(), sep="  ", flush=True)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"passes": rows})


if __name__ == "__main__":
    main()
