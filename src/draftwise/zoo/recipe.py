"""What every model of the bundled family is made of: shape, data mixture and schedule.

Counts are in tokens, times in minutes. The target and the spare were trained on two CPU cores, the
three distilled models on a GPU; :mod:`draftwise.zoo.train` fits the schedules to another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import LlamaConfig

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
MAX_POSITIONS = 2048

# How often a packed row is taken from each source. The test suite of Python is the largest source
# and the least instructive, MBPP has 374 tasks only and would be learnt by heart at a higher share.
MIXTURE: Mapping[str, float] = MappingProxyType(
    {"stdlib": 0.41, "tests": 0.08, "docs": 0.04, "gsm8k": 0.40, "mbpp": 0.07}
)


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a Llama model with tied embeddings."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    def config(self) -> LlamaConfig:
        """Return the configuration for :class:`transformers.LlamaForCausalLM`."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            initializer_range=0.03,
            rms_norm_eps=1e-5,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=END_OF_TEXT_ID,
        )


@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable phase and linear decay over a number of tokens, or of minutes if shorter.

    ``minutes`` bounds the wall time: progress is the larger of the share of tokens seen and the
    share of time spent, so that the decay completes on a machine of unknown speed. With ``minutes``
    unset a run is a deterministic function of its seed.
    """

    tokens: int
    minutes: float | None = None
    batch_tokens: int = 8192
    micro_batch_tokens: int = 4096
    length: int = 512
    long_length: int = MAX_POSITIONS
    long_fraction: float = 0.1
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.72
    muon_learning_rate: float = 3e-3
    adamw_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    gradient_norm: float = 1.0

    def progress(self, num_tokens: int, elapsed_seconds: float) -> float:
        """Share of the run that is done, 0 … 1."""
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
        """Tokens per packed row: short rows first, the whole context at the end."""
        return self.long_length if progress >= 1.0 - self.long_fraction else self.length


@dataclass(frozen=True)
class Distillation:
    """Second part of a small model's training: forward KL from the target (see ``distill.py``).

    ``continuation_share`` of the rows are the target's own continuations of training prompts.
    """

    schedule: Schedule
    teacher: str = "target"
    num_continuations: int = 32_768
    prompt_length: int = 128
    continuation_length: int = 384
    continuation_share: float = 0.6


@dataclass(frozen=True)
class Stage:
    """One model: its shape, how it is trained, and the seed of its weights and data order."""

    name: str
    shape: ModelShape
    schedule: Schedule
    seed: int
    distillation: Distillation | None = None
    mixture: Mapping[str, float] = field(default_factory=lambda: MIXTURE)


# One step on text: a distilled model learns from the target from the start.
_ONE_STEP = Schedule(tokens=65_536, batch_tokens=65_536)


def _distillation(num_steps: int) -> Distillation:
    return Distillation(schedule=Schedule(tokens=num_steps * 65_536, batch_tokens=65_536))


_STAGES = (
    Stage(
        name="target",
        shape=ModelShape(384, 5, 6, 2, 64, 896),
        schedule=Schedule(tokens=27_000_000),
        seed=1,
    ),
    Stage(
        name="companion",
        shape=ModelShape(160, 2, 5, 1, 32, 336),
        schedule=_ONE_STEP,
        seed=2,
        distillation=_distillation(5_291),
    ),
    Stage(
        name="spare",
        shape=ModelShape(96, 3, 3, 1, 32, 224),
        schedule=Schedule(tokens=3_000_000),
        seed=3,
    ),
    Stage(
        name="mid",
        shape=ModelShape(192, 4, 3, 1, 64, 512),
        schedule=_ONE_STEP,
        seed=4,
        distillation=_distillation(3_849),
    ),
    Stage(
        name="draft",
        shape=ModelShape(128, 2, 2, 1, 64, 320),
        schedule=_ONE_STEP,
        seed=5,
        distillation=_distillation(5_687),
    ),
)

STAGES: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in _STAGES})
