import pytest
import torch
from torch import nn

from draftwise.models.blocked_linear import BlockedLinear, can_block, padded_rows

needs_packing = pytest.mark.skipif(
    not can_block(torch.float32, torch.device("cpu")), reason="this build packs no weights"
)


def test_rows_are_padded_to_few_sizes():
    sizes = [padded_rows(n) for n in range(1, 513)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size <= n + max(3, n / 4) for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 30
    assert [padded_rows(n) for n in (1, 2, 3, 4, 5, 32, 33, 65)] == [1, 2, 3, 4, 8, 32, 40, 80]


@needs_packing
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (33,), (1, 64)])
def test_padding_rows_does_not_change_results(shape):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40)
    inputs = torch.randn(*shape, 24)
    packed = BlockedLinear(linear.weight, linear.bias)
    with torch.no_grad():
        torch.testing.assert_close(packed(inputs), linear(inputs))
