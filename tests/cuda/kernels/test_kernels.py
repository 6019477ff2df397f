"""The fused kernels, in every variant, against PyTorch's operations."""

import pytest
import torch
import torch.nn.functional as F

from draftwise.models.decoder_spec import Activation, NormSpec
from draftwise.models.norm import Norm

from ..placing import IS_INTERPRETED, NEEDS_TRITON, TRITON_DEVICE

pytestmark = [pytest.mark.slow, NEEDS_TRITON]

# The interpreter does not compute in bfloat16.
DTYPES = [torch.float32, torch.float16 if IS_INTERPRETED else torch.bfloat16]
NEAR = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}
ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
}


def norm(size, dtype, adds_one=False, epsilon=1e-3):
    """A norm whose weight has the digits of the dtype, or of 1 + weight."""
    weight = torch.randn(size, device=TRITON_DEVICE).to(dtype).float()
    weight[0] = 2.0**-12  # 1 + weight then never has the digits of the dtype alone
    made = Norm(NormSpec(weight + 1.0 if adds_one else weight, epsilon), dtype)
    assert made.weight.dtype == (torch.float32 if adds_one else dtype)
    return made


@pytest.mark.parametrize(
    ("size", "has_delta_norm", "has_norm", "scale"),
    [
        (16, True, True, 1.0),
        (100, True, False, 0.7),
        (3840, False, True, 0.7),
        (100, False, False, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adding_and_normalising(dtype, size, has_delta_norm, has_norm, scale):
    from draftwise.kernels.triton.layers import add_norm

    hidden, delta = torch.randn(2, 3, size, device=TRITON_DEVICE, dtype=dtype)
    before = norm(size, dtype, adds_one=size == 100) if has_delta_norm else None
    after = norm(size, dtype, epsilon=0.5) if has_norm else None
    expected = hidden + scale * (delta if before is None else before(delta))
    total, normed = add_norm(hidden, delta, before, after, scale)
    torch.testing.assert_close(total, expected, **NEAR[dtype])
    wanted = total if after is None else after(total)
    torch.testing.assert_close(normed, wanted, **NEAR[dtype])


@pytest.mark.parametrize("has_norm", [True, False])
def test_the_beginning_has_nothing_to_add(has_norm):
    from draftwise.kernels.triton.layers import add_norm

    hidden = torch.randn(3, 20, device=TRITON_DEVICE)
    after = norm(20, torch.float32) if has_norm else None
    total, normed = add_norm(hidden, None, None, after, 0.5)
    assert total is hidden
    wanted = hidden if after is None else after(hidden)
    torch.testing.assert_close(normed, wanted, **NEAR[torch.float32])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of infinity
@pytest.mark.parametrize(
    ("activation", "size"), list(zip(ACTIVATIONS, [16, 100, 3840], strict=True))
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activations(dtype, size, activation):
    from draftwise.kernels.triton.layers import gated

    both = 3 * torch.randn(3, 2 * size, device=TRITON_DEVICE, dtype=dtype)
    # Where exponentials are infinite.
    both[0, :4] = torch.tensor([-100.0, 100.0, -20.0, 20.0])
    expected = ACTIVATIONS[activation](both[:, :size].float()) * both[:, size:].float()
    torch.testing.assert_close(gated(both, activation).float(), expected, **NEAR[dtype])


# Heads that are rotated as a whole or in part, of sizes that are powers of two and others.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated", "has_norms"),
    [(6, 2, 64, 64, True), (3, 1, 10, 10, False), (20, 4, 24, 16, True), (3, 1, 10, 2, False)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotating_and_storing(dtype, heads, kv_heads, size, rotated, has_norms):
    from draftwise.kernels.triton.layers import rotate_and_store

    numbers = {"device": TRITON_DEVICE, "dtype": dtype}
    qkv = torch.randn(5, (heads + 2 * kv_heads) * size, **numbers)
    angle = torch.randn(5, rotated // 2, **numbers)
    cosine, sine = angle.cos(), angle.sin()
    keys, values = torch.zeros(2, 20, kv_heads, size, **numbers)
    slots = torch.tensor([3, 7, 1, 0, 19], device=TRITON_DEVICE)
    norms = None, None
    x = qkv.view(5, -1, size)
    q, k = x[:, :heads], x[:, heads : heads + kv_heads]
    if has_norms:
        norms = norm(size, dtype, adds_one=True), norm(size, dtype, epsilon=0.5)
        q, k = norms[0](q), norms[1](k)

    def turned(x):
        left, right, rest = x.float().tensor_split((rotated // 2, rotated), dim=-1)
        cos, sin = cosine.float().unsqueeze(1), sine.float().unsqueeze(1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)

    queries = rotate_and_store(qkv, cosine, sine, *norms, slots, keys, values, heads)
    torch.testing.assert_close(queries.float(), turned(q), **NEAR[dtype])
    torch.testing.assert_close(keys[slots].float(), turned(k), **NEAR[dtype])
    assert torch.equal(values[slots], x[:, heads + kv_heads :])
    others = torch.tensor([2, *range(8, 19)], device=TRITON_DEVICE)
    assert not keys[others].any()
    assert not values[others].any()
