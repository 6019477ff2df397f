"""Length of a training run, and its learning rates along the way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable phase and linear decay over a number of tokens, or of minutes if shorter.

    ``minutes`` limits the training time. Progress is the larger of the fractions of tokens and of
    time, so the decay completes on a machine of any speed. Without ``minutes``, a run is a
    deterministic function of its seed.

    Attributes:
        tokens: training tokens of the run, repetitions included.
        minutes: limit of the training time, in minutes.
        batch_tokens: tokens per optimiser step.
        micro_batch_tokens: tokens per forward pass.
        length: tokens per row.
        long_length: tokens per row in the last part of the run.
        long_fraction: share of the run that has long rows.
        warmup_fraction: share of the run in which the learning rates rise.
        decay_fraction: share of the run in which they fall.
        muon_learning_rate: peak learning rate of matrices.
        adamw_learning_rate: peak learning rate of all other parameters.
        weight_decay: weight decay of matrices.
        gradient_norm: largest norm of a gradient; longer ones are scaled down.
    """

    tokens: int
    minutes: float | None = None
    batch_tokens: int = 8192
    micro_batch_tokens: int = 4096
    length: int = 512
    long_length: int = 2048
    long_fraction: float = 0.1
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.72
    muon_learning_rate: float = 3e-3
    adamw_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    gradient_norm: float = 1.0

    def progress(self, num_tokens: int, elapsed_seconds: float) -> float:
        """Completed fraction of the run, 0 … 1."""
        share = num_tokens / self.tokens
        if self.minutes is not None:
            share = max(share, elapsed_seconds / (60.0 * self.minutes))
        return min(share, 1.0)

    def learning_rate_factor(self, progress: float) -> float:
        """Multiplier of both learning rates at ``progress``."""
        warmup = min(1.0, (progress + 0.05 * self.warmup_fraction) / self.warmup_fraction)
        decay = min(1.0, (1.0 - progress) / self.decay_fraction)
        return max(0.0, min(warmup, decay))

    def row_length(self, progress: float) -> int:
        """Tokens per packed row: short rows first, rows of the full context at the end."""
        return self.long_length if progress >= 1.0 - self.long_fraction else self.length
