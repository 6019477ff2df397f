"""The unrolled chains against the published forward pass, evaluated one token after the other."""

import dataclasses

import pytest
import torch

from draftwise.distillation.documents import pack_documents
from draftwise.distillation.head import Eagle3Head
from draftwise.distillation.start import new_config
from draftwise.distillation.unrolled import unroll

from .conftest import LENGTH, outputs_everywhere, random_documents, randomised_head, tiny_teacher

TARGET_IDS = torch.arange(0, 24, 2)
NUM_STEPS = 5


def norm(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def turn(x, position, theta):
    """Rotary embedding of one vector per head: pairs of the two halves, in complex numbers."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1).float()


class Published:
    """The forward pass of EAGLE-3 for one document, by its equations and with a list as cache.

    Reads the tensors of a written folder, whose fc has the scale of the states folded in.
    """

    def __init__(self, config, weights, embedding):
        self.config, self.w, self.embedding = config, weights, embedding
        self.cache = []

    def step(self, token, g, position):
        """One token; appends its key and value. Returns the output before the final norm."""
        c, w = self.config, self.w
        layer = "layers.0."
        normed = norm(g, w[layer + "hidden_norm.weight"], c.rms_norm_eps)
        embedded = norm(self.embedding[token], w[layer + "input_layernorm.weight"], c.rms_norm_eps)
        wide = torch.cat([embedded, normed])
        attention = layer + "self_attn."
        theta = c.rope_parameters["rope_theta"]
        query, key, value = (
            (w[f"{attention}{name}_proj.weight"] @ wide).view(-1, c.head_size) for name in "qkv"
        )
        query, key = turn(query, position, theta), turn(key, position, theta)
        self.cache.append((key, value))
        outputs = []
        for head in range(c.num_heads):
            own = head * c.num_kv_heads // c.num_heads
            keys = torch.stack([k[own] for k, _ in self.cache])
            values = torch.stack([v[own] for _, v in self.cache])
            outputs.append(((keys @ query[head]) / c.head_size**0.5).softmax(0) @ values)
        residual = normed if c.norm_before_residual else g
        x = residual + w[attention + "o_proj.weight"] @ torch.cat(outputs)
        y = norm(x, w[layer + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = (w[f"{layer}mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return x + w[layer + "mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    def chain(self, tokens, states, anchor, num_steps):
        """Outputs and logits of a chain that starts from the true state at ``anchor``."""
        self.cache.clear()
        w = self.w
        for position in range(anchor + 1):
            out = self.step(tokens[position + 1], w["fc.weight"] @ states[position], position)
        outs = [out]
        for depth in range(1, num_steps):
            g = norm(out, w["norm.weight"], self.config.rms_norm_eps)
            out = self.step(
                tokens[anchor + 1 + depth], g if self.config.norm_output else out, anchor + depth
            )
            outs.append(out)
        normed = [norm(each, w["norm.weight"], self.config.rms_norm_eps) for each in outs]
        return torch.stack([w["lm_head.weight"] @ each for each in normed])


@pytest.mark.parametrize("norm_before_residual", [True, False])
@pytest.mark.parametrize("norm_output", [True, False])
def test_chains_equal_the_published_forward(models, norm_before_residual, norm_output):
    teacher = tiny_teacher(models)
    new = randomised_head(teacher, TARGET_IDS)
    config = dataclasses.replace(
        new_config(teacher, len(TARGET_IDS)),
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
    )
    head = Eagle3Head(config)
    head.load_state_dict(new.state_dict())
    documents = random_documents()
    rows = pack_documents(documents, LENGTH)
    reading = teacher.read(rows)
    with torch.no_grad():
        outs = outputs_everywhere(head, rows, reading.states, teacher.embedding, NUM_STEPS)
        logits = head.logits(outs)
    published = Published(config, head.weights(), teacher.embedding)
    compared = 0
    for number, document in enumerate(documents):
        mask = rows.documents == number
        states, own = reading.states[mask], logits[:, mask]
        for anchor in range(len(document.tokens) - NUM_STEPS):
            expected = published.chain(document.tokens, states, anchor, NUM_STEPS)
            torch.testing.assert_close(own[:, anchor], expected, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared > 30


def test_chains_ignore_other_documents_of_the_row(models):
    teacher = tiny_teacher(models)
    head = randomised_head(teacher, TARGET_IDS)
    documents = random_documents(2)
    together = pack_documents(documents, LENGTH)
    alone = pack_documents(documents[:1], LENGTH)
    assert len(together) == 1
    outs = []
    for rows in (together, alone):
        states = teacher.read(rows).states
        mask = rows.documents == 0
        with torch.no_grad():
            found = outputs_everywhere(head, rows, states, teacher.embedding, 2)
            # The last two tokens have no token ahead in their document.
            outs.append(found[:, mask][:, :-2])
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


def test_a_chain_does_not_depend_on_where_others_begin(models):
    teacher = tiny_teacher(models)
    head = randomised_head(teacher, TARGET_IDS)
    rows = pack_documents(random_documents(8), LENGTH)
    assert len(rows) > 1
    states = teacher.read(rows).states
    begins = torch.rand(rows.tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    # Rows may have different numbers of chains, and none.
    begins[0] = False
    with torch.no_grad():
        expected = outputs_everywhere(head, rows, states, teacher.embedding, NUM_STEPS)
        found = torch.stack(list(unroll(head, rows, states, teacher.embedding, begins, NUM_STEPS)))
    torch.testing.assert_close(found, expected[:, begins], atol=1e-5, rtol=1e-5)
