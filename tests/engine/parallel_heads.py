"""The pass of P-EAGLE heads written out."""

import torch

from ..tiny_heads import HeadRecipe
from .heads import TARGET, head_layers, projected, rms_norm, target_states

MASK = 5
HEAD = HeadRecipe(
    vocab=12,
    draft_vocab=9,
    num_layers=2,
    own_embedding=True,
    settings={"norm_before_residual": True},
    mask_token=MASK,
)
WINDOWED = HEAD.changed(
    layer={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
)


@torch.no_grad()
def published_logits(target, recipe, text, num_drafted):
    """``[drafted, draft_vocab]`` of one pass: the newest token, and mask tokens after it."""
    weights = recipe.tensors()
    every = target_states(target, text[:-1])
    states = torch.stack([every[layer] for layer in recipe.layers], dim=1)
    masks = weights["mask_hidden"].view(1, len(recipe.layers), -1).expand(num_drafted - 1, -1, -1)
    g = projected(weights, recipe, torch.cat((states, masks)))
    tokens = [*text[1:], *[MASK] * (num_drafted - 1)]
    out = head_layers(weights, recipe, weights["embed_tokens.weight"][tokens], g)[-num_drafted:]
    return rms_norm(out, weights["norm.weight"]) @ weights["lm_head.weight"].T


def assert_published(models, drafts, head, target=TARGET):
    """Every drafted token's logits are those of the equations, up to a constant."""
    reference = models.reference(target)
    for drafted in drafts:
        logits = published_logits(reference, head, drafted.text, len(drafted.tokens))
        got = drafted.q[:, head.target_ids()].log()
        assert torch.allclose(got, logits.log_softmax(dim=-1), atol=1e-4)
    assert max(len(each.tokens) for each in drafts) == 5
