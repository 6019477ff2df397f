"""Masks that are added to logits, made from bit sets of allowed tokens."""

from types import SimpleNamespace

import numpy as np
import torch

from draftwise.engine.masks import masks_along, next_masks

CPU = torch.device("cpu")


class Known:
    """Allows a random half of its tokens after each draft, the same half each time."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def allows(self, drafted):
        rng = np.random.default_rng([7, *drafted])
        return rng.random(self.num_tokens) < 0.5

    def allowed(self, drafted):
        return np.packbits(self.allows(drafted), bitorder="little")


def request(num_tokens=None):
    matcher = None if num_tokens is None else Known(num_tokens)
    return SimpleNamespace(
        matcher=matcher, is_masked=matcher is not None, must_continue=lambda num_drafted: False
    )


def test_allowed_tokens_have_zero_and_others_minus_infinity():
    """Logits may be wider or narrower than the tokenizer's vocabulary."""
    for vocab in [8, 13, 32, 37, 64]:
        places = [(request(32), []), (request(), [1, 2]), (request(32), [4, 5]), (request(24), [1])]
        masks = next_masks(places, vocab, CPU)
        assert masks.shape == (4, vocab)
        assert masks.dtype == torch.float32, vocab
        for (each, drafted), mask in zip(places, masks, strict=True):
            expected = np.ones(vocab, dtype=bool)
            if each.matcher is not None:
                known = each.matcher.allows(drafted)
                expected = np.pad(known, (0, max(0, vocab - len(known))))[:vocab]
            assert np.array_equal(mask == 0, expected), vocab
            assert bool((mask[~torch.from_numpy(expected)] == -torch.inf).all()), vocab


def test_masks_along_drafts_equal_those_of_each_prefix():
    requests = [request(16), request(), request(16)]
    drafted = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    masks = masks_along(requests, drafted, [3, 2, 1], 16, CPU)
    places = [
        (requests[index], drafted[index][:place])
        for index, count in enumerate([3, 2, 1])
        for place in range(count)
    ]
    assert torch.equal(masks, next_masks(places, 16, CPU))
    assert masks_along(requests[1:2], drafted[1:2], [2], 16, CPU) is None
