"""vLLM's configuration of a companion, which is that of a second draft model."""

from __future__ import annotations

from vllm.config import SpeculativeConfig, VllmConfig

from draftwise.errors import UnsupportedModelError


def as_draft(vllm_config: VllmConfig, name: str) -> SpeculativeConfig:
    """A speculative config with the companion as the draft model.

    Args:
        vllm_config: a configuration with a ``draft_model`` speculative config.
        name: folder or hub id of the companion.

    Raises:
        UnsupportedModelError: vLLM cannot use the companion as a draft of this target.
    """
    draft = vllm_config.speculative_config
    try:
        return SpeculativeConfig(
            method="draft_model",
            model=name,
            num_speculative_tokens=draft.num_speculative_tokens,
            target_model_config=draft.target_model_config,
            target_parallel_config=draft.target_parallel_config,
            draft_tensor_parallel_size=draft.draft_parallel_config.tensor_parallel_size,
        )
    except (ValueError, OSError) as error:
        raise UnsupportedModelError("draftwise.companion", f"{name!r}: {error}") from error
