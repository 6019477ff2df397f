"""Counter-based random numbers: one stream per request, independent of the batch.

Every number is a pure function of (seed, position, offset), so a request draws the same numbers
alone and in a batch. ``position`` is the number of tokens the request had when the step began. It
grows by at least one per step, so no number is used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = npt.NDArray[np.uint64]


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        counter: ``[..., 4]`` 32-bit words held in uint64.
        key: ``[..., 2]`` 32-bit words held in uint64, broadcast against ``counter``.

    Returns:
        ``[..., 4]`` independent 32-bit words held in uint64.
    """
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return np.stack([c0, c1, c2, c3], axis=-1)


@dataclass(frozen=True)
class StageUniforms:
    """Uniform numbers in [0, 1) for a verification stage between draft and target.

    They are independent of the other numbers of the step.

    Attributes:
        accept: ``[batch, num_tokens]`` float32, for the acceptance test of each token.
        final: ``[batch, num_tokens]`` float64, for drawing the corrected token at each position.
    """

    accept: Tensor
    final: Tensor


@dataclass(frozen=True)
class StepUniforms:
    """The uniform numbers in [0, 1) of one step, on the host.

    Attributes:
        draft: ``[batch, num_tokens]`` float64, for drawing each drafted token.
        accept: ``[batch, num_tokens]`` float32, for the acceptance test of each token.
        final: ``[batch]`` float64, for drawing the corrected or bonus token.
        following: ``[batch, num_tokens]`` float64, ``final`` of a step that begins after each
            drafted token. With one-hot proposals, each position is drawn with its own number.
        stage: for a policy that verifies the draft itself before the target does.
    """

    draft: Tensor
    accept: Tensor
    final: Tensor
    following: Tensor
    stage: StageUniforms

    @classmethod
    def from_streams(
        cls, drawing: npt.NDArray[np.float64], accepting: npt.NDArray[np.float32]
    ) -> StepUniforms:
        """The numbers by their purpose.

        Args:
            drawing: ``[batch, 3 * num_tokens + 1]`` numbers of 53 bits of three streams: one per
                drafted token, one at the step's position and at each of ``num_tokens`` later ones,
                and one per drafted token for the middle stage.
            accepting: numbers of 24 bits of the same streams.
        """
        num_tokens = drawing.shape[1] // 3
        drafted, final, staged = _streams(num_tokens)
        return cls(
            draft=torch.from_numpy(drawing[:, drafted].copy()),
            accept=torch.from_numpy(accepting[:, drafted].copy()),
            final=torch.from_numpy(drawing[:, final.start].copy()),
            following=torch.from_numpy(drawing[:, final.start + 1 : final.stop].copy()),
            stage=StageUniforms(
                accept=torch.from_numpy(accepting[:, staged].copy()),
                final=torch.from_numpy(drawing[:, staged].copy()),
            ),
        )

    def rows(self, index: Tensor) -> StepUniforms:
        """Select requests by ``index``, ``[rows]`` int64."""
        stage = StageUniforms(self.stage.accept[index], self.stage.final[index])
        return StepUniforms(
            self.draft[index],
            self.accept[index],
            self.final[index],
            self.following[index],
            stage,
        )


def _streams(num_tokens: int) -> tuple[slice, slice, slice]:
    """The places of the three streams of a step."""
    return (
        slice(0, num_tokens),
        slice(num_tokens, 2 * num_tokens + 1),
        slice(2 * num_tokens + 1, 3 * num_tokens + 1),
    )


def step_uniforms(seeds: list[int], positions: list[int], num_tokens: int) -> StepUniforms:
    """Generate all random numbers that one step may need.

    Args:
        seeds: ``[batch]`` 64-bit seeds, one per request.
        positions: ``[batch]`` number of tokens (prompt and output) of each request.
        num_tokens: the longest draft of the step.

    Returns:
        Uniforms with as many random bits as their type represents exactly: 53 and 24.
    """
    places = np.arange(num_tokens + 1, dtype=np.uint64)
    drafted, final, staged = _streams(num_tokens)
    counter = np.zeros((len(seeds), 3 * num_tokens + 1, 4), dtype=np.uint64)
    counter[:, drafted, 0] = counter[:, staged, 0] = places[:-1]
    counter[..., 1] = np.asarray(positions, dtype=np.uint64)[:, None]
    counter[:, final, 1] += places
    counter[:, final, 2], counter[:, staged, 2] = 1, 2
    seed = np.asarray([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    key = np.stack([seed & _MASK, seed >> _SHIFT], axis=-1)[:, None, :]
    words = philox(counter, key)
    bits = ((words[..., 0] << _SHIFT) | words[..., 1]) >> np.uint64(11)
    drawing = bits.astype(np.float64) * 2.0**-53
    accepting = (words[..., 2] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return StepUniforms.from_streams(drawing, accepting)
