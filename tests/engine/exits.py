"""Engines with early exits of the target, and the exits' logits by Hugging Face's own modules."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from draftwise.checkpoints.exits.files import ExitConfig, write_exit
from draftwise.models.hidden_states import decoder_layers
from draftwise.models.model_part import ModelPart

from ..tiny_models import Recipe
from .assembly import assemble

TARGET = Recipe(vocab=12, seed=3, config={"num_hidden_layers": 4})
DRAFT, DEEPER = "target:exit=2", "target:exit=3"


def engine_with_exit(models, target=TARGET, draft=DRAFT, companion=None, **settings):
    """An engine whose draft is an exit.

    Args:
        models: writes the target.
        target: what it is made of.
        draft: name of the draft, or a recipe of it.
        companion: name of the companion, or a recipe of it; by default a deeper exit.
        **settings: of :func:`assemble`.
    """
    draft, companion = (
        models.folder(each) if isinstance(each, Recipe) else each
        for each in (draft, companion or DEEPER)
    )
    return assemble(models.folder(target), draft, companion, **settings)


@dataclass(frozen=True)
class AdapterRecipe:
    """A random adapter of an exit of a target with four layers of size 16.

    Attributes:
        exit: number of layers before it.
        rank: its rank.
        num_layers: number of the target's layers.
        epsilon: added to the mean square in its norm.
    """

    exit: int = 2
    rank: int = 5
    num_layers: int = 4
    epsilon: float = 1e-6

    def tensors(self):
        generator = torch.Generator().manual_seed(self.rank)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        return {
            "norm.weight": 1 + 0.2 * random(16),
            "down.weight": random(self.rank, 16) / 4,
            "up.weight": random(16, self.rank) / self.rank**0.5,
        }

    def save(self, folder):
        """Write the folder, and return its name."""
        config = ExitConfig(self.exit, self.num_layers, 16, self.rank, self.epsilon)
        folder.mkdir(exist_ok=True)
        write_exit(folder, config, self.tensors())
        return str(folder)

    def __call__(self, hidden):
        """What the final norm reads."""
        norm, down, up = self.tensors().values()
        normed = norm * hidden / (hidden.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return hidden + normed @ down.T @ up.T


@torch.no_grad()
def exit_logits(reference, num_layers, text, adapter=None):
    """``[tokens, vocab]`` of an exit, by the model's own layers, norm and head.

    Args:
        reference: Hugging Face's model.
        num_layers: number of the exit's layers.
        text: tokens.
        adapter: maps the stream; ``None`` for none.
    """
    layers, left = decoder_layers(reference), []

    def adapted(*_):
        if adapter is None:
            return left[0]
        is_tuple = isinstance(left[0], tuple)
        return (adapter(left[0][0]),) if is_tuple else adapter(left[0])

    first = layers[num_layers - 1].register_forward_hook(lambda *args: left.append(args[-1]))
    last = layers[-1].register_forward_hook(adapted)
    logits = reference(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    first.remove()
    last.remove()
    return logits


def assert_drafts_of_exit(models, drafts, target=TARGET, num_layers=2, adapter=None):
    """Every drafted token is drawn from the distribution of Hugging Face's own layers."""
    reference = models.reference(target)
    assert len(drafts) > 5
    for drafted in drafts:
        text = [*drafted.text, *drafted.tokens[:-1]]
        logits = exit_logits(reference, num_layers, text, adapter)[len(drafted.text) - 1 :]
        torch.testing.assert_close(drafted.q, logits.softmax(dim=-1), atol=1e-4, rtol=1e-3)


@contextmanager
def recorded_passes(monkeypatch):
    """The layers and the number of tokens of every pass over a part of the layers."""
    forward, passes = ModelPart.forward, []

    def recording(self, cache, tokens, *arguments, **named):
        passes.append(((self.layers.start, self.layers.stop), len(tokens)))
        return forward(self, cache, tokens, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ModelPart, "forward", recording)
        yield passes
