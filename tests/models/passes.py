"""Random models, and their passes: in pieces, with any number of threads, as of large ones."""

import torch
import transformers

from draftwise.kernels.native import suitability
from draftwise.models.segment import Segment

from ..tiny_models import randomise

# Sizes without whole vectors.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


def random_model(family, **settings):
    """A model of ``transformers``.

    Args:
        family: beginning of the name of its configuration; what follows a comma is ignored.
        **settings: of the configuration, in place of :data:`SIZES`.
    """
    name = family.partition(",")[0]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    torch.manual_seed(2)  # decays are drawn
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, 3, 2.0)
    return model


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
