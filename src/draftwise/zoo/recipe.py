"""Training recipe of every model of the bundled family: shape, data mixture and schedule.

Counts are in tokens, times in minutes. The target, the spare and the hybrid were trained on two CPU
cores, and the other distilled models on a GPU. The spare and the mid model are not bundled.
:mod:`draftwise.zoo.train` has options that adapt the schedules to another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from draftwise.training.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import LlamaConfig, Qwen3_5TextConfig

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
MAX_POSITIONS = 2048

# Fraction of packed rows from each source. The test suite of Python is the largest and the least
# useful source. MBPP has only 374 tasks, so a higher fraction would overfit it.
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
            **self._settings,
            initializer_range=0.03,
        )

    @property
    def _settings(self) -> dict[str, Any]:
        """What the configurations of all families call by the same names."""
        return {
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": END_OF_TEXT_ID,
        }


@dataclass(frozen=True)
class HybridShape(ModelShape):
    """Dimensions of a Qwen3.5 with tied embeddings and one MTP layer.

    Three of four layers have a gated delta net. Its heads have the size of those of attention.
    """

    def config(self) -> Qwen3_5TextConfig:
        """Return the configuration for :class:`draftwise.zoo.hybrid.Hybrid`."""
        from transformers import Qwen3_5TextConfig

        return Qwen3_5TextConfig(
            **self._settings,
            linear_num_key_heads=self.num_heads,
            linear_num_value_heads=self.num_heads,
            linear_key_head_dim=self.head_dim,
            linear_value_head_dim=self.head_dim,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 1.0,
            },
        )


@dataclass(frozen=True)
class Distillation:
    """Second phase of a small model's training: forward KL from the target (see ``distill.py``).

    ``continuation_share`` is the fraction of rows that are continuations of training prompts,
    sampled from the target; 0 for text alone.
    """

    schedule: Schedule
    teacher: str = "target"
    num_continuations: int = 32_768
    prompt_length: int = 128
    continuation_length: int = 384
    continuation_share: float = 0.6


@dataclass(frozen=True)
class Stage:
    """Training of one model: its shape, its schedules, and the seed of weights and data order."""

    name: str
    shape: ModelShape
    schedule: Schedule
    seed: int
    distillation: Distillation | None = None
    mixture: Mapping[str, float] = field(default_factory=lambda: MIXTURE)


# A single step on text, as a distilled model learns from the target from the start.
_ONE_STEP = Schedule(tokens=65_536, batch_tokens=65_536)


def _distillation(num_steps: int) -> Distillation:
    return Distillation(schedule=Schedule(tokens=num_steps * 65_536, batch_tokens=65_536))


def _brief(tokens: int) -> Schedule:
    """Small batches and careful steps, for a model that begins with trained weights."""
    return Schedule(
        tokens=tokens,
        batch_tokens=2_048,
        micro_batch_tokens=2_048,
        muon_learning_rate=1.5e-3,
        adamw_learning_rate=1e-3,
    )


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
    Stage(
        name="hybrid",
        shape=HybridShape(384, 4, 6, 2, 64, 896),
        schedule=_brief(2_048),
        seed=6,
        distillation=Distillation(schedule=_brief(4_000_000), continuation_share=0.0),
    ),
)

STAGES: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in _STAGES})
