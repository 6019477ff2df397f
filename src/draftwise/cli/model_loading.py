"""Loading of models for commands that profile them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwise.llm import LLM

if TYPE_CHECKING:
    from draftwise.engine.assembly import Models
    from draftwise.speculation import SpeculationConfig


def load_for_profiling(
    target: str,
    speculation: SpeculationConfig | None,
    dtype: str,
    device: str,
    max_model_len: int | None,
    trust_remote_code: bool,
) -> tuple[LLM, Models]:
    """Load a target for batches of one request, and the draft and the companion of a configuration.

    Args:
        target: name of the target.
        speculation: configuration with the names of the small models; ``None`` for none.
        dtype: data type of the weights.
        device: device of the models.
        max_model_len: context length; ``None`` for that of the target.
        trust_remote_code: allow models to run code from their repositories.

    Returns:
        The target without speculation, and all models.

    Raises:
        DraftwiseError: a model cannot be loaded, or its vocabulary differs from the target's.
    """
    llm = LLM(
        target,
        None,
        dtype=dtype,
        device=device,
        max_batch_size=1,
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
    )
    if speculation is None:
        from draftwise.engine.assembly import Models

        return llm, Models(llm.target)
    return llm, llm.load_models(speculation)
