"""Functions that vLLM's drafting calls in every step, for both model runners."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from draftwise.core.sampling import LogitControls, soft_probabilities
from draftwise.core.types import CompanionScores, Draft
from draftwise.engine.companion import companion_scores
from draftwise.integrations.vllm.agreement import Decision
from draftwise.integrations.vllm.metrics import Metrics
from draftwise.integrations.vllm.steering import ReadTexts, Steering
from draftwise.integrations.vllm.steps import RequestView, Verified
from draftwise.kernels.native.library import library_for
from draftwise.kernels.native.sampling import distributions

# The companion's logits of a draft: ``[drafted tokens, vocab]``, request by request.
Score = Callable[[Draft], Tensor]


class StopDrafting(Exception):  # noqa: N818
    """Raised within vLLM's drafting loop to leave it when all drafts have ended."""


class DraftHooks:
    """Calls the policy before, during and after drafting, and measures the step.

    Without a draft model nothing is drawn, and :meth:`begin` and :meth:`finish` follow each other.

    Attributes:
        steering: drives the policy.
    """

    def __init__(self, steering: Steering) -> None:
        """Set up before the first step."""
        self.steering = steering
        self._metrics = Metrics() if get_tp_group().is_first_rank else None
        self._step_start = 0.0
        self._controls = LogitControls(torch.zeros(0), all_greedy=True)

    def begin(
        self,
        views: Sequence[RequestView],
        verified: Mapping[str, Verified],
        num_target_tokens: int,
        read_texts: ReadTexts,
        controls: LogitControls | None = None,
    ) -> int:
        """End the previous step, report its results, and begin the next one.

        Args:
            views: the requests of the next step.
            verified: verification results of the previous step, of the requests that generate.
            num_target_tokens: tokens in the target's pass, prompt tokens included.
            read_texts: reads the texts of the requests.
            controls: how the draft model samples; needed with a draft model.

        Returns:
            Maximum number of tokens to draft for any request with the draft model.
        """
        now = time.perf_counter()
        seconds, self._step_start = now - self._step_start, now
        num_prompt_tokens = num_target_tokens - sum(v.num_verified + 1 for v in verified.values())
        result = self.steering.end_step(dict(verified), seconds, max(num_prompt_tokens, 0))
        if result is not None and self._metrics is not None:
            self._metrics.observe(result)
        if controls is not None:
            self._controls = controls
        return self.steering.begin(views, read_texts)

    def soft_probabilities(self, logits: Tensor) -> Tensor | None:
        """The draft's distribution, at temperature 1 for greedy requests.

        Args:
            logits: ``[batch, vocab]``.

        Returns:
            ``[batch, vocab]`` probabilities; ``None`` if the policy does not use them.
        """
        if not self.steering.wants_draft_probs:
            return None
        library, logits = library_for(logits.device), logits.float()
        if library is None:
            return soft_probabilities(logits, self._controls)
        owner = torch.arange(len(logits))
        return distributions(library, logits, self._controls, owner, softens_greedy=True)

    def drawn(self, tokens: Tensor, soft_probs: Tensor | None) -> None:
        """Record one more drafted token of every request and get the policy's decision.

        Args:
            tokens: ``[batch]`` token ids.
            soft_probs: the result of :meth:`soft_probabilities` for these tokens.

        Raises:
            StopDrafting: no request continues drafting.
        """
        if not self.steering.drawn(tokens, soft_probs):
            raise StopDrafting

    def finish(self, score: Score | None = None) -> list[int]:
        """Select how many leading drafted tokens of each request to verify.

        Args:
            score: computes the companion's logits; ``None`` without a companion.
        """
        draft_seconds = time.perf_counter() - self._step_start
        if score is None:
            return self.steering.finish(None, draft_seconds)

        def run(draft: Draft) -> Callable[[], CompanionScores]:
            logits = score(draft)
            return lambda: self._companion_scores(draft, logits)

        return self.steering.finish(run, draft_seconds)

    def _companion_scores(self, draft: Draft, logits: Tensor) -> CompanionScores:
        lengths = list(draft.lengths)
        return companion_scores(logits.float(), self._controls, lengths, None, draft)


class TensorParallel:
    """The agreement of the ranks of vLLM's tensor parallelism, of which the first one leads."""

    def __init__(self) -> None:
        """Set up after vLLM has created the ranks' groups."""
        self._group = get_tp_group()

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return bool(self._group.is_first_rank)

    def __call__(self, decide: Callable[[], Decision]) -> Decision:
        """The first rank's decision, broadcast to all ranks."""
        decision = decide() if self.leads else None
        if self._group.world_size == 1:
            return decision  # type: ignore[return-value]
        agreed: Decision = self._group.broadcast_object(decision, src=0)
        return agreed
