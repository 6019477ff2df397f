"""Engines with drafting heads, and the published forward pass of EAGLE-3 written out."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from ..tiny_heads import HeadRecipe
from ..tiny_models import Recipe
from .assembly import assemble

TARGET = Recipe(vocab=12, seed=3, config={"num_hidden_layers": 2})
GAMMA = 5
HEAD = HeadRecipe(vocab=12, draft_vocab=9, settings={"norm_before_residual": True})


def head_folder(models, head, layout=None):
    """The folder of a head, written once."""
    folder = models._root / f"head-{abs(hash(repr((head, layout))))}"
    return str(folder) if folder.is_dir() else head.save(folder, layout)


def engine_with_head(models, target=TARGET, head=HEAD, folder=None, companion=None, **settings):
    """An engine whose draft is a head.

    Args:
        models: writes the target.
        target, head: what they are made of.
        folder: the head's folder, if it is written already.
        companion: recipe of a companion; by default the target with noise.
        **settings: of :func:`assemble`; ``drafts`` are used beside the head.
    """
    draft = (*settings.pop("drafts", ()), folder or head_folder(models, head))
    companion = models.folder(companion or target.draft(noise=0.2, noise_seed=2))
    return assemble(models.folder(target), draft if draft[1:] else draft[0], companion, **settings)


@dataclass(frozen=True)
class Drafted:
    """The draft of one request in one step.

    Attributes:
        text: the request's tokens before the step.
        tokens: drafted tokens.
        q: ``[tokens, vocab]`` the distributions that they are drawn from.
    """

    text: list[int]
    tokens: list[int]
    q: torch.Tensor


def recorded_drafts(engine):
    """A list to which every draft of an engine is added, in the order of the steps."""
    pipeline, found = engine._pipeline, []
    propose = pipeline.propose

    def recording(batch):
        draft = propose(batch)
        for index, request in enumerate(batch.generating):
            length = draft.lengths[index]
            if length:
                q = draft.probs[index, :length].clone()
                found.append(Drafted(list(request.tokens), draft.host_tokens[index][:length], q))
        return draft

    pipeline.propose = recording
    return found


def rms_norm(x, weight, epsilon=1e-5):
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()


def rotate(x, positions, theta=10000.0):
    """Rotary embedding of ``[tokens, heads, size]`` (Su et al. 2021, equation 34)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(weights, name, x, recipe, window):
    """Causal attention of ``[tokens, input]`` with grouped heads."""
    sizes, count = recipe.sizes, len(x)
    heads, groups, size = 4, 2, sizes["head_dim"]
    q, k, v = (
        x @ weights[f"{name}{part}_proj.weight"].T + weights.get(f"{name}{part}_proj.bias", 0.0)
        for part in "qkv"
    )
    q, k, v = q.view(count, heads, size), k.view(count, groups, size), v.view(count, groups, size)
    if recipe.qwen:
        q, k = (
            rms_norm(each, weights[f"{name}{n}_norm.weight"])
            for n, each in zip("qk", (q, k), strict=True)
        )
    positions = torch.arange(count)
    q, k = rotate(q, positions), rotate(k, positions)
    distance = positions[:, None] - positions[None]
    hidden = (distance < 0) | (distance >= window)
    out = []
    for head in range(heads):
        group = head * groups // heads
        scores = q[:, head] @ k[:, group].T / size**0.5
        out.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v[:, group])
    return torch.cat(out, dim=1) @ weights[f"{name}o_proj.weight"].T


def head_layers(weights, recipe, embedded, g):
    """The residual stream after the head's layers, for inputs ``[tokens, hidden]``."""
    for index in range(recipe.num_layers):
        name = f"layers.{index}."
        types = recipe.layer.get("layer_types", ["full_attention"] * recipe.num_layers)
        window = recipe.layer["sliding_window"] if types[index] == "sliding_attention" else 1000
        if index == 0:
            normed = rms_norm(g, weights["layers.0.hidden_norm.weight"])
            x = torch.cat((rms_norm(embedded, weights[name + "input_layernorm.weight"]), normed), 1)
            stream = normed if recipe.settings.get("norm_before_residual") else g
        else:
            x = rms_norm(stream, weights[name + "input_layernorm.weight"])
        stream = stream + attention(weights, name + "self_attn.", x, recipe, window)
        x = rms_norm(stream, weights[name + "post_attention_layernorm.weight"])
        gate, up = (x @ weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        stream = stream + (F.silu(gate) * up) @ weights[name + "mlp.down_proj.weight"].T
    return stream


def projected(weights, recipe, states):
    """g of every position, of the target's states ``[tokens, states, hidden]``."""
    if recipe.settings.get("norm_before_fc"):
        flat = rms_norm(states.flatten(1), weights["input_norm.weight"])
        states = flat.view(states.shape)
    if recipe.settings.get("fc_norm"):
        parts = [
            rms_norm(states[:, i], weights[f"fc_norm.{i}.weight"]) for i in range(states.shape[1])
        ]
        states = torch.stack(parts, dim=1)
    return states.flatten(1) @ weights["fc.weight"].T


def target_states(target, text):
    """The input of each layer of a Llama ``[tokens, hidden]``, and the output of the last one."""
    last = []
    hook = target.model.layers[-1].register_forward_hook(lambda *args: last.append(args[-1][0]))
    every = target(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return [state[0] for state in every[:-1]] + last


@torch.no_grad()
def published_logits(target, recipe, text, drafted, layers=None):
    """Logits of each drafted token by the equations of EAGLE-3 (Li et al. 2025, section 3.1).

    Args:
        target: Hugging Face's model.
        recipe: the head.
        text: tokens x_0 … x_n of the request.
        drafted: tokens that follow.
        layers: ids of the target's states, as the input of a layer.

    Returns:
        ``[drafted, draft_vocab]``.
    """
    weights = recipe.tensors()
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
    every = target_states(target, text[:-1])
    chosen = [every[layer] for layer in layers or recipe.layers]
    g = projected(weights, recipe, torch.stack(chosen, dim=1))
    tokens, logits = list(text[1:]), []
    for token in drafted:
        out = head_layers(weights, recipe, embedding[tokens], g)[-1:]
        normed = rms_norm(out, weights["norm.weight"])
        logits.append(
            recipe.settings.get("logit_scale", 1.0) * normed @ weights["lm_head.weight"].T
        )
        g = torch.cat((g, normed if recipe.settings.get("norm_output") else out))
        tokens.append(token)
    return torch.cat(logits)


def assert_published(models, drafts, head, target=TARGET, layers=None):
    """Every drafted token's logits are those of the published forward pass, up to a constant."""
    ids, reference = head.target_ids(), models.reference(target)
    for drafted in drafts:
        expected = published_logits(reference, head, drafted.text, drafted.tokens, layers)
        got = drafted.q[:, ids].log()
        assert torch.allclose(got, expected.log_softmax(dim=-1), atol=1e-4)
        # No other token has any probability.
        assert drafted.q.sum() == pytest.approx(len(drafted.tokens), abs=1e-4)
        assert drafted.q[:, ids].sum() == pytest.approx(len(drafted.tokens), abs=1e-4)
    assert any(len(drafted.tokens) == GAMMA for drafted in drafts)
