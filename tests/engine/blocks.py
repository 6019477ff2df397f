"""The equations of DFlash and DSpark written out, for one request and without a cache."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ..tiny_blocks import BlockRecipe
from .heads import TARGET, engine_with_head, head_folder, rms_norm, rotate, target_states

HEAD = BlockRecipe(vocab=12, layers=(-1, 0), sharpness=0.4)
KINDS = {
    "dflash": HEAD,
    "vanilla": HEAD.changed(markov="vanilla"),
    "gated": HEAD.changed(markov="gated", confidence=True),
    "rnn": HEAD.changed(markov="rnn"),
    "dflash-2": HEAD.changed(second=True),
}
WINDOWED = HEAD.changed(windows=(6, 6), markov="vanilla")


def engine_of(models, head, layout="z-lab", target=TARGET, **settings):
    """An engine whose draft is a head. It samples its proposals and stores no prefixes."""
    defaults = {"num_speculative_tokens": 8, "caches_prefixes": False, "proposals": "sampled"}
    folder = head_folder(models, head, layout)
    return engine_with_head(models, target, folder=folder, **{**defaults, **settings})


def visible(rows, keys, anchor, window, from_anchor, causal):
    """``[rows, keys]`` whether each row of the block attends to each position."""
    rows, keys = rows[:, None], keys[None]
    sees = (keys <= rows) | torch.tensor(not causal)
    if window is not None:
        if from_anchor:
            sees = sees & (keys >= anchor - window)
        else:
            sees = sees & (rows - keys < window) & (keys - rows < window)
    return sees


def attention(weights, name, context, sees, x):
    """Rows ``x`` of a block attend to a context and to themselves, with grouped heads."""
    heads, groups, size = 4, 2, 6
    both = torch.cat((context, x))
    q = (x @ weights[name + "q_proj.weight"].T).view(len(x), heads, size)
    k = (both @ weights[name + "k_proj.weight"].T).view(len(both), groups, size)
    v = (both @ weights[name + "v_proj.weight"].T).view(len(both), groups, size)
    q = rms_norm(q, weights[name + "q_norm.weight"])
    k = rms_norm(k, weights[name + "k_norm.weight"])
    positions = torch.arange(len(both))
    q, k = rotate(q, positions[len(context) :]), rotate(k, positions)
    out = []
    for head in range(heads):
        group = head * groups // heads
        scores = q[:, head] @ k[:, group].T / size**0.5
        out.append(scores.masked_fill(~sees, -torch.inf).softmax(dim=-1) @ v[:, group])
    return torch.cat(out, dim=1) @ weights[name + "o_proj.weight"].T


def convolved(weights, name, side, coefficients, rows, recipe):
    """Rows of a block after one side of a convolution, number by number.

    Args:
        weights, name: the convolution.
        side: 0 in front of the part, 1 behind it.
        coefficients: ``[rows, 2, taps, groups]`` deviations.
        rows: ``[rows, hidden]``.
        recipe: the head.
    """
    base, out = weights[name + "base_kernel"], torch.zeros_like(rows)
    for row in range(len(rows)):
        for tap in range(min(recipe.taps, row + 1)):
            own = coefficients[row, side, tap].repeat_interleave(recipe.group_size)
            out[row] += (base[side, tap] + own) * rows[row - tap]
    return out


def around(weights, name, recipe, normed, part):
    """A part of a layer between its convolutions, if the head has any."""
    if not recipe.second:
        return part(normed)
    deviations = normed @ weights[name + "kernel_projection.weight"].T
    deviations = deviations.view(len(normed), 2, recipe.taps, -1)
    out = part(convolved(weights, name, 0, deviations, normed, recipe))
    return convolved(weights, name, 1, deviations, out, recipe)


def feed_forward(weights, name, rows):
    gate, up = (rows @ weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return (F.silu(gate) * up) @ weights[name + "mlp.down_proj.weight"].T


@torch.no_grad()
def block_hidden(target, recipe, text, from_anchor=False, causal=None, layers=None):
    """``[block_size, hidden]`` the rows of the block after the final norm.

    Args:
        target: Hugging Face's model.
        recipe: the head.
        text: tokens of the request. The last one is the anchor.
        from_anchor: whether windows end before the anchor.
        causal: ``[layers]``; by default layers with a window are, if the recipe says so.
        layers: layers whose output is read; by default the recipe's.
    """
    weights, anchor = recipe.tensors(), len(text) - 1
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
    every = target_states(target, text)
    chosen = torch.cat([every[k + 1] for k in layers or recipe.layers], dim=1)[:anchor]
    context = rms_norm(chosen @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    x = embedding[[text[-1]] + [recipe.mask] * (recipe.block_size - 1)]
    rows, keys = torch.arange(anchor, anchor + len(x)), torch.arange(anchor + len(x))
    causal = causal or [recipe.causal and w is not None for w in recipe.windows]
    for index, window in enumerate(recipe.windows):
        name = f"layers.{index}."
        sees = visible(rows, keys, anchor, window, from_anchor, causal[index])
        normed = rms_norm(x, weights[name + "input_layernorm.weight"])
        attend = partial(attention, weights, name + "self_attn.", context, sees)
        x = x + around(weights, name + "attention_conv.", recipe, normed, attend)
        normed = rms_norm(x, weights[name + "post_attention_layernorm.weight"])
        forward = partial(feed_forward, weights, name)
        x = x + around(weights, name + "mlp_conv.", recipe, normed, forward)
    return rms_norm(x, weights["norm.weight"])


def selected(weights, recipe, unary, before, h):
    """Scores of the most likely tokens after a token, and −∞ for the others."""
    name, scores = "candidate_selector.", torch.full_like(unary, -torch.inf)
    context = weights[name + "predecessor_codebook"][before] * (
        weights[name + "hidden_projection.weight"] @ h
    )
    for token in unary.topk(recipe.num_candidates).indices:
        scores[token] = unary[token] + context @ weights[name + "successor_codebook"][token]
    return scores


@torch.no_grad()
def published_confidence(target, recipe, text, drafted):
    """``[drafted]`` of each token, given those before it and not itself."""
    weights, before = recipe.tensors(), [text[-1], *drafted[:-1]]
    hidden = block_hidden(target, recipe, text)[int(recipe.discards_anchor) :]
    inputs = hidden[: len(drafted)]
    if recipe.markov:
        inputs = torch.cat((inputs, weights["markov_head.markov_w1.weight"][before]), dim=1)
    score = inputs @ weights["confidence_head.proj.weight"].T
    score = (score + weights["confidence_head.proj.bias"]).squeeze(1)
    temperatures = recipe.settings.get("confidence_temperatures", [1.0] * recipe.num_drafted)
    return torch.sigmoid(score / torch.tensor(temperatures)[: len(drafted)])


@torch.no_grad()
def published_logits(target, recipe, text, drafted, **settings):
    """``[drafted, own_vocab]`` logits of drafted tokens, each given those before it."""
    weights = recipe.tensors()
    hidden = block_hidden(target, recipe, text, **settings)[int(recipe.discards_anchor) :]
    head = weights.get("lm_head.weight", target.get_output_embeddings().weight)
    w1, w2 = (weights.get(f"markov_head.markov_w{n}.weight") for n in (1, 2))
    before, state, logits = text[-1], torch.zeros(recipe.rank), []
    for h, token in zip(hidden, drafted, strict=False):
        bias = torch.zeros(len(head))
        if recipe.markov:
            e = w1[before]
            if recipe.markov == "gated":
                joint = weights["markov_head.gate_proj.weight"] @ torch.cat((h, e))
                e = torch.sigmoid(joint + weights["markov_head.gate_proj.bias"]) * e
            elif recipe.markov == "rnn":
                joint = weights["markov_head.joint_proj.weight"] @ torch.cat((state, e, h))
                gate, new, out = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
                gate = torch.sigmoid(gate)
                state, e = gate * state + (1 - gate) * torch.tanh(new), torch.tanh(out)
            bias = w2 @ e
        logits.append(head @ h + bias)
        if recipe.second:
            logits[-1] = selected(weights, recipe, logits[-1], before, h)
        before = token
    return torch.stack(logits)


def farthest(models, drafts, head, target=TARGET, **settings):
    """The largest difference between log-probabilities of drafts and those of the equations."""
    ids, reference, largest = head.target_ids(), models.reference(target), 0.0
    for drafted in drafts:
        logits = published_logits(reference, head, drafted.text, drafted.tokens, **settings)
        got = drafted.q[:, ids]
        assert got.sum() == pytest.approx(len(drafted.tokens), abs=1e-4)
        expected = logits.softmax(dim=-1)
        assert torch.equal(got > 0, expected > 0)
        difference = (got.log() - expected.log())[expected > 0]
        largest = max(largest, float(difference.abs().max()))
    return largest
