"""What trained heads of all kinds consist of: they read states of the target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.checkpoints.heads.config import DraftHeadConfig
from draftwise.models.heads.spec import head_rotary


class RMSNorm(nn.RMSNorm):
    """Root mean square norm, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """``[…, size]`` -> ``[…, size]``."""
        return super().forward(x.float())


class MLP(nn.Module):
    """Gated feed-forward block of Llama."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[…, hidden]`` -> ``[…, hidden]``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TrainedHead(nn.Module):
    """The trained parameters of a head, under the names that its folder has.

    The states of a target differ by orders of magnitude between layers and channels. ``fc`` is
    therefore trained on states divided by ``state_scale``, and :meth:`weights` folds the scale into
    its weight.

    Attributes:
        fc: the projection of the states.
        state_scale: ``[num_states * target_hidden]`` root mean square of each channel.
    """

    state_scale: Tensor

    def __init__(self, config: DraftHeadConfig, num_states: int) -> None:
        """Create what all heads have.

        Args:
            config: sizes of the head.
            num_states: number of states that it reads.
        """
        super().__init__()
        num_inputs = num_states * config.target_hidden_size
        self.fc = nn.Linear(num_inputs, config.hidden_size, bias=False)
        self.register_buffer("state_scale", torch.ones(num_inputs))
        self._rotary = head_rotary(config)

    def initialise(self) -> None:
        """Give all matrices random weights, so that the layers start as the identity."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # As the identity, a layer has gradients that are well scaled.
                nn.init.zeros_(parameter)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary embedding. ``[…]`` -> ``[…, head_size]`` twice."""
        flat = positions.reshape(1, -1)
        cos, sin = self._rotary(torch.zeros((), device=positions.device), flat)
        shape = (*positions.shape, -1)
        return cos.view(shape), sin.view(shape)

    def weights(self) -> dict[str, Tensor]:
        """The weights by the names of the folder, with the scale of the states folded in."""
        found = {name: parameter.detach() for name, parameter in self.named_parameters()}
        found["fc.weight"] = found["fc.weight"] / self.state_scale
        return found

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor], state_scale: Tensor) -> None:
        """Start from the weights of a head, with the given scale of the states."""
        self.state_scale.copy_(state_scale)
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])
        self.fc.weight.mul_(self.state_scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding of Llama.

    Args:
        x: ``[…, heads, head_size]``.
        cos: ``[…, head_size]``.
        sin: ``[…, head_size]``.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)
