"""The kinds of drafts that read the target's states: heads and exits, made and judged alike."""

from collections.abc import Callable
from dataclasses import dataclass

from draftwise.models.exits.model import ExitModel
from draftwise.models.heads.block_model import BlockHeadModel
from draftwise.models.heads.model import HeadModel

from ..tiny_models import Recipe
from . import blocks, eagle_heads, exits, heads, parallel_heads

PROMPTS = [[1], [3, 0, 2, 2, 1, 7, 11], [5, 4], [(i * 7) % 12 for i in range(21)]]
PREFIX = [(5 * i * i + i) % 12 for i in range(100)]


@dataclass(frozen=True)
class Kind:
    """A kind of draft.

    Attributes:
        make: makes an engine of ``models``, a target and settings.
        check: fails if recorded drafts are not those of equations that are written out. Its
            arguments are ``models``, the drafts and the target.
        passes: class and method of the draft's passes.
        target: the target.
        is_head: whether it keeps states of the target until it reads them.
    """

    make: Callable
    check: Callable
    passes: tuple[type, str]
    target: Recipe = heads.TARGET
    is_head: bool = True

    def engine(self, models, target=None, **settings):
        """An engine with sampled proposals of five tokens."""
        settings = {"num_speculative_tokens": 5, **settings}
        return self.make(models, target or self.target, **settings)

    def long(self):
        """The target, with a longer context."""
        return self.target.draft(0.0, context=256)


def _autoregressive(head, module=heads):
    return Kind(
        lambda models, target, **settings: heads.engine_with_head(models, target, head, **settings),
        lambda models, drafts, target: module.assert_published(models, drafts, head, target),
        (HeadModel, "read"),
    )


def _one_pass(head, check, passes):
    def make(models, target, **settings):
        settings = {"proposals": "sampled", **settings}
        return heads.engine_with_head(models, target, head, **settings)

    return Kind(make, lambda models, drafts, target: check(models, drafts, head, target), passes)


def _follows_equations(models, drafts, head, target):
    assert blocks.farthest(models, drafts, head, target) < 1e-4


def _block(head):
    return _one_pass(head, _follows_equations, (BlockHeadModel, "read"))


_WINDOWED = heads.HEAD.changed(layer={"layer_types": ["sliding_attention"], "sliding_window": 24})
KINDS = {
    "eagle-3": _autoregressive(heads.HEAD),
    "eagle-3 with a window": _autoregressive(_WINDOWED),
    "eagle-1": _autoregressive(eagle_heads.HEAD, eagle_heads),
    "p-eagle": _one_pass(parallel_heads.HEAD, parallel_heads.assert_published, (HeadModel, "read")),
    "dspark": _block(blocks.KINDS["rnn"]),
    "dspark with windows": _block(blocks.WINDOWED),
    "exit": Kind(
        exits.engine_with_exit,
        exits.assert_drafts_of_exit,
        (ExitModel, "leave"),
        exits.TARGET,
        is_head=False,
    ),
}
HEADS = {name: kind for name, kind in KINDS.items() if kind.is_head} | {
    "dflash": _block(blocks.HEAD),
    "dflash-2": _block(blocks.KINDS["dflash-2"]),
    "dspark, vanilla": _block(blocks.KINDS["vanilla"]),
}
