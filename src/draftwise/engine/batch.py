"""What a step works on: pieces of prompts, and the requests that gain tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from draftwise.core.random import StepUniforms
from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.engine.request import Request
from draftwise.policies.base import RequestState


class PromptChunk(NamedTuple):
    """A piece of a prompt that this step processes.

    Attributes:
        request: whose prompt.
        start: position of its first token.
        end: one past its last.
    """

    request: Request
    start: int
    end: int

    @property
    def completes_prompt(self) -> bool:
        """Whether the request gets its first token from this step."""
        return self.end == len(self.request.tokens)


@dataclass(frozen=True)
class Batch:
    """One step's work.

    Attributes:
        chunks: pieces of prompts, by row.
        generating: requests that gain tokens in this step, by row: those whose prompt is done,
            and those whose prompt is completed by a chunk of this step.
        can_draft: for each of ``generating``, whether its prompt was done before the step.
        controls: sampling parameters of ``generating``.
        history: tokens of ``generating`` so far, if a penalty needs them.
        uniforms: random numbers of ``generating``, ``None`` if all are greedy.
        lenience: of ``generating``, 1 for exactly the target's distribution.
    """

    chunks: list[PromptChunk]
    generating: list[Request]
    can_draft: list[bool]
    controls: LogitControls
    history: TokenHistory | None
    uniforms: StepUniforms | None
    lenience: list[float]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.chunks and not self.generating

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that the step processes."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def has_masks(self) -> bool:
        """Whether some tokens may not come next for some request."""
        return any(request.is_masked for request in self.generating)

    def any_is_masked(self, indices: Iterable[int]) -> bool:
        """Whether some tokens may not come next for one of some requests."""
        return any(self.generating[index].is_masked for index in indices)

    def states(self, draft_context: int) -> list[RequestState]:
        """What a policy may know of ``generating``.

        Args:
            draft_context: longest context of the draft model, 0 if there is none.
        """
        return [
            request.state(request.draft_limit(draft_context) if can_draft else 0)
            for request, can_draft in zip(self.generating, self.can_draft, strict=True)
        ]
