"""Passes of single models: in pieces, with any number of threads, and as of large models."""

import torch

from draftwise.kernels.native import suitability
from draftwise.models.segment import Segment


@torch.inference_mode()
def logits_of(model, tokens, pieces=None, cache=None, slot=0):
    """``[tokens, vocab]`` of a request, in float32.

    Args:
        model: a packed model.
        tokens: of the request, from its beginning.
        pieces: numbers of tokens of its passes; by default one pass.
        cache: the cache; by default a new one.
        slot: the request's cache slot.
    """
    cache = cache or model.new_cache(slot + 2, len(tokens))
    results, start = [], 0
    for count in pieces or [len(tokens)]:
        segment = Segment(slot, start, count)
        results.append(model.forward(cache, tokens[start : start + count], [segment], range(count)))
        start += count
        cache.truncate(slot, start)
    return torch.cat(results).float()


def rms_error(got, expected):
    """Root mean square of differences, relative to the standard deviation of what is expected."""
    return (got.float() - expected.float()).square().mean().sqrt() / expected.float().std()


def assert_same_with_any_threads(compute, repeats=1):
    """Results have the same bits with any number of threads, whichever takes which piece."""
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            results += [compute() for _ in range(repeats)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, results[0]) for each in results)


def treat_as_large(monkeypatch):
    """Let every model have the kernels and the compressed weights of large ones."""
    monkeypatch.setattr(suitability, "_SMALL_MODEL", 0)
    monkeypatch.setattr(suitability, "_why_slower", lambda *_: None)
