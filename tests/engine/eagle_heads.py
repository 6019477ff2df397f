"""The published forward pass of EAGLE-1 and EAGLE-2 heads, written out."""

import pytest
import torch
import torch.nn.functional as F

from ..tiny_eagle_heads import EagleRecipe
from .heads import GAMMA, TARGET, attention, rms_norm

HEAD = EagleRecipe(vocab=12, bias=True, own_embedding=True)
SPECULATORS = HEAD.changed(layout="speculators", bias=False, own_embedding=False)
# Its distributions are so flat that several tokens of a draft are often accepted.
FLAT = TARGET.draft(0.0, sharpness=0.7)


def layers(weights, recipe, x):
    """The residual stream after the head's layers, for inputs ``[tokens, hidden]``."""
    for index in range(recipe.num_layers):
        name = f"layers.{index}."
        norm = weights.get(name + "input_layernorm.weight")
        normed = x if norm is None else rms_norm(x, norm)
        x = x + attention(weights, name + "self_attn.", normed, recipe, window=1000)
        normed = rms_norm(x, weights[name + "post_attention_layernorm.weight"])
        gate, up = (normed @ weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[name + "mlp.down_proj.weight"].T
    return x


@torch.no_grad()
def published_logits(target, recipe, text, drafted):
    """Logits of each drafted token (Li et al. 2024, arXiv 2401.15077, section 3.1).

    Args:
        target: Hugging Face's model.
        recipe: the head.
        text: tokens x_0 … x_n of the request.
        drafted: tokens that follow.

    Returns:
        ``[drafted, vocab]``.
    """
    weights, config = recipe.tensors(), target.config
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
    read = target(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True)
    # The last one is after the final norm: the projection of it gives the target's logits.
    features = read.hidden_states[-1][0]
    tokens, logits = list(text[1:]), []
    for token in drafted:
        embedded = embedding[tokens]
        if recipe.layernorms:
            embedded = rms_norm(embedded, weights["embedding_layernorm.weight"])
        x = torch.cat((embedded, features), dim=1) @ weights["fc.weight"].T
        out = layers(weights, recipe, x + weights.get("fc.bias", 0.0))[-1:]
        normed = rms_norm(out, weights["norm.weight"]) if recipe.layernorms else out
        if recipe.own_projection:
            logits.append(normed @ weights["lm_head.weight"].T)
        else:
            raw = normed @ target.get_output_embeddings().weight.T
            raw = raw / getattr(config, "logits_scaling", 1.0)
            cap = getattr(config, "final_logit_softcapping", None)
            logits.append(cap * torch.tanh(raw / cap) if cap else raw)
        features = torch.cat((features, out))
        tokens.append(token)
    return recipe.settings.get("logit_scale", 1.0) * torch.cat(logits)


def assert_published(models, drafts, head, target=TARGET):
    """Every drafted token's logits are those of the published forward pass, up to a constant."""
    reference, whole = models.reference(target), 0
    for drafted in drafts:
        expected = published_logits(reference, head, drafted.text, drafted.tokens)
        assert torch.allclose(drafted.q.log(), expected.log_softmax(dim=-1), atol=1e-4)
        assert drafted.q.sum() == pytest.approx(len(drafted.tokens), abs=1e-4)
        whole += len(drafted.tokens) == GAMMA
    assert whole
