"""Muon, compared with PyTorch's and with the singular values that it promises."""

import torch
from torch import nn

from draftwise import devices
from draftwise.training.optimizers import Muon, orthogonalized

SHAPES = (8, 8), (6, 20), (20, 6)


def test_singular_values_come_close_to_one():
    for shape in SHAPES:
        for dtype in [torch.float32, torch.bfloat16]:
            torch.manual_seed(0)
            result = orthogonalized(torch.randn(shape), dtype)
            assert result.shape == shape
            assert result.dtype == dtype, shape
            values = torch.linalg.svdvals(result.float())
            assert values.min() > 0.6, shape
            assert values.max() < 1.3, shape


def test_a_gradient_of_zeros_gives_no_update():
    assert torch.equal(orthogonalized(torch.zeros(4, 6)), torch.zeros(4, 6))


def _trained(optimizer_of, num_steps=5):
    torch.manual_seed(1)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
    optimizer = optimizer_of(model)
    for _ in range(num_steps):
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return [parameter.detach() for parameter in model], optimizer.state_dict()


def test_the_steps_are_those_of_pytorch(monkeypatch):
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: True)
    parameters, state = _trained(lambda model: Muon(model, 0.02, 0.1))
    expected, expected_state = _trained(
        lambda model: torch.optim.Muon(
            model, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
    )
    for parameter, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter, other, atol=2e-3, rtol=0)
    # A checkpoint of PyTorch's optimiser can be continued.
    for number, each in expected_state["state"].items():
        own = state["state"][number]
        assert own.keys() == each.keys()
        torch.testing.assert_close(own["momentum_buffer"], each["momentum_buffer"])


def test_float32_and_bfloat16_take_nearly_the_same_steps(monkeypatch):
    results = []
    for is_fast in (True, False):
        monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device, fast=is_fast: fast)
        results.append(_trained(lambda model: Muon(model, 0.02, 0.0), 1)[0])
    for narrow, wide in zip(*results, strict=True):
        moved = 0.02 * 0.2 * max(wide.shape) ** 0.5
        assert (narrow - wide).abs().max() < 0.1 * moved
