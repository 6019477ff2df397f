"""What a study is about and how large it is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from draftwise.errors import InvalidParameterError
from draftwise.params import MAX_SPECULATIVE_TOKENS, SamplingParams

_LEAST = {
    "num_prompts": 2,
    "longest_prompt": 1,
    "max_tokens": 4,
    "num_speculative_tokens": 2,
    "long_text": 8,
    "rounds": 2,
    "warm_up_steps": 1,
}


@dataclass(frozen=True)
class StudySettings:
    """Models, prompts and sizes of a study.

    Attributes:
        target: name of the target; what is timed.
        draft: name of the draft.
        companion: name of the companion; ``None`` for studies that need none.
        models: names of models that take each other's places in studies that compare them.
        prompts: files of JSON lines.
        num_prompts: of each task, drawn with ``seed``.
        longest_prompt: in tokens; longer ones are left out.
        max_tokens: generated per prompt.
        long_text: tokens of a long generation.
        num_speculative_tokens: longest draft.
        temperature: of all models; studies of distributions need it above 0.
        top_p: of all models.
        batch_sizes: requests at once, of timed studies.
        contexts: tokens before what is generated, of the study of contexts.
        turn: seconds that count of a contender's turn.
        rounds: turns of each contender.
        warm_up_steps: untimed steps before, of policies that learn.
        chat: send prompts through the chat template, where the target has one.
        seed: of everything that is drawn.
        dtype: of the models that are timed.
        device: of all models.
        max_model_len: longest context of the target; ``None`` for its own.
        trust_remote_code: run code that comes with a model.

    Raises:
        InvalidParameterError: a value is out of its range; names it.
    """

    prompts: tuple[Path, ...]
    target: str = "zoo:target@200m"
    draft: str = "zoo:draft"
    companion: str | None = "zoo:companion"
    models: tuple[str, ...] = ("zoo:draft", "zoo:mid", "zoo:companion", "zoo:spare")
    num_prompts: int = 8
    longest_prompt: int = 300
    max_tokens: int = 64
    long_text: int = 384
    num_speculative_tokens: int = 5
    temperature: float = 1.0
    top_p: float = 1.0
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    turn: float = 0.2
    rounds: int = 4
    warm_up_steps: int = 60
    chat: bool = True
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise InvalidParameterError(
                    name, f"must be at least {least}, got {getattr(self, name)!r}"
                )
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise InvalidParameterError(
                "num_speculative_tokens", f"must be at most {MAX_SPECULATIVE_TOKENS}"
            )
        if not self.prompts:
            raise InvalidParameterError("prompts", "name at least one file of prompts")
        if not self.turn > 0:
            raise InvalidParameterError("turn", f"must be above 0 seconds, got {self.turn!r}")
        for name in ("batch_sizes", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise InvalidParameterError(name, "must be positive numbers, at least one")
        SamplingParams(temperature=self.temperature, top_p=self.top_p)
        if self.temperature == 0:
            raise InvalidParameterError(
                "temperature", "must be above 0: studies look at what is sampled"
            )

    def to_dict(self) -> dict[str, object]:
        """As plain values; of files only their names."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["prompts"] = [path.name for path in self.prompts]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
