"""Settings of a study: models, prompts and sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from draftwise.errors import InvalidParameterError
from draftwise.params import SamplingParams
from draftwise.speculation import MAX_SPECULATIVE_TOKENS
from draftwise.studies.sampling import Sampling

_MINIMUM = {
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
        prompts: JSON Lines files of prompts.
        target: name of the target.
        draft: name of the draft.
        companion: name of the companion; ``None`` for studies without one.
        models: names of further small models, which ``signals`` uses as companions.
        head: EAGLE head of the target that ``goodput`` compares with the draft; ``None`` for none.
        num_prompts: number of prompts per task, sampled with ``seed``.
        longest_prompt: maximum number of prompt tokens; longer prompts are skipped.
        max_tokens: tokens generated per prompt.
        long_text: tokens of a long generation.
        num_speculative_tokens: maximum draft length.
        temperature: sampling temperature of all models, above 0.
        top_p: top-p of all models.
        batch_sizes: batch sizes of timed studies.
        contexts: context lengths of ``speedup-by-context``, in tokens.
        cost_ratios: parameters of the target relative to those of the draft, of the study
            ``cost-ratio``.
        turn: timed seconds of one turn of a contender.
        rounds: number of turns of each contender.
        warm_up_steps: untimed steps before the first turn of policies that learn.
        chat: apply the chat template of the target, if it has one.
        samplings: sampling settings that ``signals`` compares.
        recordings: folder that keeps the drafts that ``signals`` records; ``None`` for none.
        pass_times: file of the pass times of ``signals``, written if it does not exist; ``None`` to
            measure them.
        record_dtype: dtype of the models of studies of distributions.
        seed: seed of all random choices.
        dtype: dtype of the timed models.
        device: device of all models.
        max_model_len: maximum context of the target; ``None`` for that of the model.
        trust_remote_code: run code that comes with a model.

    Raises:
        InvalidParameterError: a value is out of range.
    """

    prompts: tuple[Path, ...]
    target: str = "zoo:target@200m"
    draft: str = "zoo:draft"
    companion: str | None = "zoo:companion"
    models: tuple[str, ...] = ("zoo:draft", "zoo:companion")
    head: str | None = None
    num_prompts: int = 8
    longest_prompt: int = 300
    max_tokens: int = 64
    long_text: int = 384
    num_speculative_tokens: int = 5
    temperature: float = 1.0
    top_p: float = 1.0
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    cost_ratios: tuple[float, ...] = (100, 40, 20, 10)
    turn: float = 0.2
    rounds: int = 4
    warm_up_steps: int = 60
    samplings: tuple[Sampling, ...] = (Sampling(0.0), Sampling(0.7, 0.8, 20), Sampling(1.0))
    recordings: Path | None = None
    pass_times: Path | None = None
    record_dtype: str = "float32"
    chat: bool = True
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            if getattr(self, name) < minimum:
                raise InvalidParameterError(
                    name, f"must be at least {minimum}, got {getattr(self, name)!r}"
                )
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise InvalidParameterError(
                "num_speculative_tokens", f"must be at most {MAX_SPECULATIVE_TOKENS}"
            )
        if not self.prompts:
            raise InvalidParameterError("prompts", "must name at least one file of prompts")
        if not self.turn > 0:
            raise InvalidParameterError("turn", f"must be above 0 seconds, got {self.turn!r}")
        for name in ("batch_sizes", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise InvalidParameterError(name, "must contain at least one positive number")
        if not self.cost_ratios or not min(self.cost_ratios) > 0:
            raise InvalidParameterError("cost_ratios", "must contain at least one positive number")
        if not self.samplings:
            raise InvalidParameterError("samplings", "must contain at least one setting")
        SamplingParams(temperature=self.temperature, top_p=self.top_p)
        if self.temperature == 0:
            raise InvalidParameterError(
                "temperature", "must be above 0: studies analyse sampling distributions"
            )

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON-compatible values, with the names of files only."""
        values: dict[str, object] = {i.name: getattr(self, i.name) for i in fields(self)}
        values["prompts"] = [path.name for path in self.prompts]
        values["samplings"] = [sampling.name for sampling in self.samplings]
        for name in ("recordings", "pass_times"):
            path = values[name]
            values[name] = path.name if isinstance(path, Path) else None
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
