"""What recurrent layers cost in passes of a hybrid, beside modules and beside attention alone.

    python benchmarks/recurrent.py --output recurrent.json
    python benchmarks/recurrent.py --models zoo:hybrid@200m modules:zoo:hybrid@200m zoo:target@200m

"hybrid" has the shape of Qwen3.5-0.8B with random weights and a smaller vocabulary, and "attention"
as many weights in layers of attention alone. "modules:" runs the modules of transformers. All take
turns. Every pass over 8 tokens keeps one of them, as after a rejection. The kernels of recurrences
and convolutions are also called alone, with states that other passes have displaced from the cache.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from draftwise.benchmark.report import write_report
from draftwise.benchmark.turns import ratios_of_turns, spread, time_calls
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.structures import ConvolutionCall, RecurrenceCall
from draftwise.models import pretrained
from draftwise.models.loading import load_model
from draftwise.models.packed_model import PackedModel
from draftwise.models.pretrained import PretrainedModel
from draftwise.models.recurrent.cache import MAX_ROWS, RecurrentCache
from draftwise.models.segment import Segment

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 65_536,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "max_position_embeddings": 4096,
}
HYBRID = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# 491 M parameters in layers, where the hybrid has 498 M.
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
CAPACITY = 1024


def load(name: str) -> PackedModel:
    """A random model, or a named one; in modules if the name begins so."""
    own = name.removeprefix("modules:")
    kernels = pretrained.native_pass
    try:
        if own != name:
            pretrained.native_pass = lambda _: None
        if own not in ("hybrid", "attention"):
            return load_model(own, "target", torch.bfloat16, CPU, CAPACITY).model
        is_hybrid = own == "hybrid"
        kind, sizes = (Qwen3_5TextConfig, HYBRID) if is_hybrid else (Qwen3Config, ATTENTION)
        torch.manual_seed(0)
        config = kind(**SIZES, **sizes)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        return PretrainedModel(module, "target", CAPACITY)
    finally:
        pretrained.native_pass = kernels


def steps(model: PackedModel, size: int, count: int, context: int) -> Callable[[], object]:
    """Passes over ``count`` tokens of each request, of which one stays."""
    cache = model.new_cache(size, CAPACITY, context)
    tokens = list(range(context)) * size
    model.forward(cache, tokens, [Segment(slot, 0, context) for slot in range(size)], None)
    for slot in range(size):
        cache.truncate(slot, context)

    def run() -> None:
        starts = list(cache.lengths)
        segments = [Segment(slot, start, count) for slot, start in enumerate(starts)]
        model.forward(cache, list(range(count)) * size, segments, range(count * size))
        for slot, start in enumerate(starts):
            cache.truncate(slot, start + 1)

    return run


def prompts(model: PackedModel, length: int) -> Callable[[], object]:
    """Passes over a prompt."""
    cache = model.new_cache(1, CAPACITY, length)

    def run() -> None:
        cache.clear(0)
        model.forward(cache, list(range(length)), [Segment(0, 0, length)], [length - 1])

    return run


def kernels(model: PackedModel, size: int, count: int) -> Callable[[], object]:
    """The recurrences and convolutions of a pass, as :func:`steps` has them."""
    library = native_library()
    assert library is not None
    threads = library.threads()
    cache = RecurrentCache(model.recurrent, size, torch.bfloat16, CPU)
    kept: list[object] = [cache]
    segments = np.array([(slot, 0, count, 0) for slot in range(size)], np.int64)
    tokens = size * count

    def keep(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return tensor.data_ptr()

    recurrences, convolutions = [], []
    for index, shape in enumerate(model.recurrent.states):
        heads = tokens, shape.heads
        rows = (cache.states, cache.decays, cache.keys, cache.updates)
        keys = [torch.nn.functional.normalize(torch.randn(*heads, shape.keys), dim=2) for _ in "kq"]
        recurrences.append(
            RecurrenceCall(
                *(each[index].data_ptr() for each in rows),
                cache.bases[index].ctypes.data,
                segments.ctypes.data,
                *map(
                    keep, (torch.full((*heads, 1), 0.9), *keys, torch.randn(*heads, shape.values))
                ),
                keep(torch.rand(*heads)),
                keep(torch.empty(*heads, shape.values)),
                *(size, shape.heads, shape.keys, shape.values, shape.decay_size, MAX_ROWS),
            )
        )
    for ring, convolution in zip(cache.inputs, model.recurrent.convolutions, strict=True):
        inputs = torch.randn(tokens, convolution.channels).to(torch.bfloat16)
        convolutions.append(
            ConvolutionCall(
                *(ring.data_ptr(), keep(inputs)),
                *(keep(torch.randn(convolution.width, convolution.channels)), None),
                keep(torch.empty(tokens, convolution.channels)),
                *(segments.ctypes.data, size, convolution.width, ring.shape[1]),
                *(convolution.channels, True),
            )
        )

    def run(_: object = kept) -> None:
        for each in recurrences:
            library.recur(ctypes.byref(each), ctypes.byref(threads))
        for each in convolutions:
            library.convolve(ctypes.byref(each), ctypes.byref(threads))
        # The next pass begins a token later, and the state advances to it.
        segments[:, 1] += 1
        segments[:, 3] = segments[:, 1]

    return run


def compared(
    models: dict[str, PackedModel], calls: dict[str, Callable[[], object]], turns: int
) -> dict[str, Any]:
    """Milliseconds of each call, and the ratio of every other call to the first model's."""
    times = time_calls(calls, turns)
    first = next(iter(models))
    medians = {name: statistics.median(own) for name, own in times.items()}
    others = [name for name in times if name != first]
    ratios = {f"{name} / {first}": ratios_of_turns(times[name], times[first]) for name in others}
    print(medians, {name: spread(own) for name, own in ratios.items()}, flush=True)
    return {"milliseconds": medians, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["hybrid", "modules:hybrid", "attention"])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--prompt-turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    models = {name: load(name) for name in arguments.models}
    first = next(iter(models.values()))
    rows = []
    for size in arguments.batch_sizes:
        for count in arguments.tokens:
            calls = {
                name: steps(model, size, count, arguments.context) for name, model in models.items()
            }
            calls["recurrences alone"] = kernels(first, size, count)
            row = {"batch_size": size, "tokens": count}
            rows.append(row | compared(models, calls, arguments.turns))
    calls = {name: prompts(model, arguments.prompt) for name, model in models.items()}
    row = {"batch_size": 1, "tokens": arguments.prompt}
    rows.append(row | compared(models, calls, arguments.prompt_turns))
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": rows})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
