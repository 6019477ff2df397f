"""What puts the parts of an engine together, from models and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftwise.core.latency import LatencyModel
from draftwise.engine.batch import HistoryStore
from draftwise.engine.cache_memory import CacheMemory
from draftwise.engine.cached_assistant import CachedAssistant
from draftwise.engine.cached_exit import CachedExit
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.companion import Companion, CompanionModel, SeveralCompanions
from draftwise.engine.kept_states import KeptStates
from draftwise.engine.mapped_model import new_cached_model
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.prefix_cache import PrefixCache
from draftwise.engine.proposers import (
    Proposer,
    ProposerContext,
    TokenProposer,
    create_proposer,
)
from draftwise.engine.proposers.by_name import PROPOSERS, model_free_proposers
from draftwise.engine.proposers.hybrid import HybridProposer
from draftwise.engine.proposers.model import ModelProposer
from draftwise.engine.scheduler import Scheduler
from draftwise.engine.step import SpeculationPipeline
from draftwise.engine.suffix.corpus import SuffixCorpus
from draftwise.engine.suffix.loading import load_corpus
from draftwise.engine.verification import TargetVerifier
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.models.exits.model import ExitModel
from draftwise.models.heads.assistant import AssistantModel
from draftwise.models.heads.block_model import BlockHeadModel
from draftwise.models.heads.model import HeadModel
from draftwise.models.heads.parallel_model import ParallelHeadModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.loading import LoadedModel
from draftwise.models.packed_model import PackedModel
from draftwise.policies import Policy, PolicyContext, create_policy
from draftwise.policies.router import PolicyRouter
from draftwise.speculation import SpeculationConfig
from draftwise.values import boolean, integer, set_fields

# Minimum of ``max_new_tokens``, so that ``num_speculative_tokens`` can be raised later.
_MIN_NEW_TOKENS = 64


@dataclass(frozen=True)
class EngineOptions:
    """Size limits of an engine.

    Attributes:
        max_batch_size: requests that run at once.
        max_chunk_tokens: prompt tokens processed per step, over all requests.
        cache_bytes: memory for the key-value caches of all models; ``None`` for no limit.
        caches_prefixes: whether requests that begin with the same tokens compute them once.

    Raises:
        InvalidParameterError: a value is out of range; names the argument of an ``LLM``.
    """

    max_batch_size: int = 32
    max_chunk_tokens: int = 512
    cache_bytes: int | None = None
    caches_prefixes: bool = True

    def __post_init__(self) -> None:
        boolean("enable_prefix_caching", self.caches_prefixes)
        set_fields(
            self,
            max_batch_size=integer("max_batch_size", self.max_batch_size, 1),
            max_chunk_tokens=integer("max_chunk_tokens", self.max_chunk_tokens, 1),
        )


@dataclass(frozen=True)
class Models:
    """The models of an engine.

    Attributes:
        target: the model whose output distribution is preserved.
        draft: the model that drafts tokens.
        companion: the model that scores the draft.
        judges: further models that score the draft, for studies. No policy sees their scores.
    """

    target: LoadedModel
    draft: LoadedModel | None = None
    companion: LoadedModel | None = None
    judges: tuple[LoadedModel, ...] = ()

    @property
    def have_exit(self) -> bool:
        """Whether one of the other models is an exit of the target."""
        others = self.draft, self.companion, *self.judges
        small = [each for each in others if each is not None]
        return any(isinstance(each.model, ExitModel) for each in small)


class Assembly:
    """Creates the parts of an engine.

    Attributes:
        max_new_tokens: maximum number of new tokens of one request in one pass. The caches of
            layers that attend to a window are allocated for it.
        corpus: texts that drafts may continue; ``None`` without a corpus.
        draft_model: the draft model with its cache; ``None`` without one.
        companion_model: the companion model with its cache; ``None`` without one.
        prefixes: the prefix cache; ``None`` if it is switched off or has no memory.
    """

    def __init__(
        self,
        models: Models,
        speculation: SpeculationConfig,
        options: EngineOptions,
        latency: LatencyModel | None = None,
        profile: AcceptanceProfile | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Allocate caches; see :class:`draftwise.engine.engine.Engine` for the arguments.

        Raises:
            InvalidParameterError: the given options cannot be combined.
            CacheExhaustedError: there is not enough memory for the caches.
        """
        self._models, self._speculation, self._options = models, speculation, options
        target = models.target
        self._vocab_size, self._device = target.model.vocab_size, target.model.device
        self.max_new_tokens = max(
            options.max_chunk_tokens, speculation.num_speculative_tokens + 1, _MIN_NEW_TOKENS
        )
        self._target_cache = self._new_cache(target)
        self._caches = [self._target_cache]
        self._cached_models: list[CachedModel] = []
        self._kept_states = KeptStates(target.model) if models.have_exit else None
        proposers = proposer_names(speculation, models)
        if speculation.proposals == "one-hot" and "block" not in proposers:
            raise InvalidParameterError(
                "proposals", "'one-hot' is for heads that draft blocks; leave it out"
            )
        self.corpus = self._load_corpus(proposers)
        self._context = PolicyContext(
            speculation.num_speculative_tokens,
            _with_costs_of(proposers, latency),
            profile,
            has_companion=models.companion is not None,
            has_draft=bool(proposers),
            drafts_trees=self._drafts_trees(proposers),
            guarded=speculation.guard,
        )
        if self._context.drafts_trees:
            target.model.compile_for_trees()
        policy = policy or self._new_policy()
        if not policy.needs_draft:
            proposers = []
        self._oracle = draft = companion = None
        self._judges: list[CachedModel] = []
        if policy.uses_target_oracle:
            self._oracle = TargetOracle(self._cached_model(target))
        if models.draft is not None and policy.needs_draft:
            draft = self._cached_model(models.draft)
        if models.companion is not None and policy.uses_companion():
            offers_only = draft is None and any(
                PROPOSERS[name].estimates_acceptance for name in proposers
            )
            if offers_only and not policy.scores_offers:
                raise InvalidParameterError(
                    "companion",
                    f"{policy.name!r} lets it score drafts of a draft model only, and there is no "
                    "draft model",
                )
            companion = self._cached_model(models.companion)
            self._judges = list(map(self._cached_model, models.judges))
        self._first_policy, self._proposers = policy, proposers
        self.draft_model, self.companion_model = draft, companion
        # Later policies can only use the models that were set up for the first one.
        self._context = replace(
            self._context, has_draft=bool(proposers), has_companion=companion is not None
        )
        memory = CacheMemory(self._caches, options.cache_bytes, options.caches_prefixes)
        self._max_cached_tokens = memory.max_cached_tokens
        self.prefixes = None
        if memory.num_blocks:
            self.prefixes = PrefixCache(
                self._target_cache, self._cached_models, memory.num_blocks, memory.num_states
            )

    def pipelines(self, count: int = 1) -> list[SpeculationPipeline]:
        """Create pipelines, which share the models' caches. Each one has its own policies."""
        made = []
        for index in range(count):
            policies = self.policies(self._new_policy() if index else None)
            # All pipelines follow all requests, so one of them stores their outputs.
            remembers = self._speculation.remember_outputs and not index
            proposer = self._proposer(self.proposer_context(remembers))
            made.append(SpeculationPipeline(policies, proposer, self._companion(), self._oracle))
        return made

    def _companion(self) -> Companion | None:
        """Create what scores drafts."""
        if self.companion_model is None:
            return None
        every = [
            CompanionModel(each, self._vocab_size) for each in (self.companion_model, *self._judges)
        ]
        return SeveralCompanions(every) if self._judges else every[0]

    def policies(self, default: Policy | None = None) -> PolicyRouter:
        """Create the policies of a pipeline.

        Args:
            default: policy of requests that name none; ``None`` for the one that the caches were
                allocated for.
        """
        return PolicyRouter(self._context, default or self._first_policy)

    def scheduler(self, pipelines: Sequence[SpeculationPipeline]) -> Scheduler:
        """Create the scheduler, which the parts of all pipelines follow."""
        return Scheduler(
            self._target_cache,
            [follower for pipeline in pipelines for follower in pipeline.followers],
            HistoryStore(self._options.max_batch_size, self._device),
            self._vocab_size,
            self._options.max_chunk_tokens,
            self._speculation.num_speculative_tokens,
            self._max_cached_tokens,
            self.prefixes,
        )

    def verifier(self, state_layers: tuple[int, ...]) -> TargetVerifier:
        """Create the verifier.

        Args:
            state_layers: the target's hidden states that the proposer reads; empty for none.
        """
        return TargetVerifier(
            self._models.target.model, self._target_cache, state_layers, self._kept_states
        )

    def proposer_context(self, remembers_outputs: bool = False) -> ProposerContext:
        """The context in which a proposer is created.

        Args:
            remembers_outputs: whether the proposer adds the outputs of ended requests to the
                corpus.
        """
        return ProposerContext(
            self._vocab_size,
            self._device,
            self._options.max_batch_size,
            self._models.target.max_model_len,
            self.draft_model,
            self._oracle,
            self.corpus,
            remembers_outputs,
            self._speculation.tree_width,
            self._speculation.proposals,
        )

    def _new_policy(self) -> Policy:
        """Create the policy that the configuration names."""
        return create_policy(
            self._speculation.policy_name,
            replace(self._context, for_studies=True),
            self._speculation.policy_options,
        )

    def _proposer(self, context: ProposerContext) -> Proposer:
        made = [create_proposer(name, context) for name in self._proposers or ["none"]]
        if len(made) == 1:
            return made[0]
        offers, drafter = made
        assert isinstance(offers, TokenProposer)
        assert isinstance(drafter, ModelProposer)
        return HybridProposer(context, offers, drafter)

    def _drafts_trees(self, proposers: list[str]) -> bool:
        """Whether the drafts are token trees.

        Raises:
            InvalidParameterError: the proposers draft chains, the companion scores chains only, or
                the target attends to chunks.
        """
        if self._speculation.tree_width == 1 or not proposers:
            return False
        draft, companion = self._models.draft, self._models.companion
        if companion is not None:
            raise InvalidParameterError(
                "tree_width", "a companion scores chains only; leave it out, or set it to 1"
            )
        if len(proposers) > 1:
            raise InvalidParameterError(
                "tree_width", "several drafts are chains; name one draft, or set it to 1"
            )
        translates = draft is not None and draft.translator is not None
        if not all(PROPOSERS[name].drafts_trees for name in proposers) or translates:
            raise InvalidParameterError(
                "tree_width",
                "token trees come from 'suffix', a head, or a draft model with the target's "
                "tokens; set it to 1",
            )
        if self._models.target.model.recurrent:
            raise InvalidParameterError(
                "tree_width", "the target has recurrent layers, which read chains only; set it to 1"
            )
        if any(layer.chunk is not None for layer in self._models.target.model.layers):
            # A token of a tree may lie behind the end of the chunk that its text belongs to.
            raise InvalidParameterError(
                "tree_width", "the target attends to chunks of the text; set it to 1"
            )
        return True

    def _load_corpus(self, proposers: list[str]) -> SuffixCorpus | None:
        """The configured corpus.

        Raises:
            InvalidParameterError: no proposer uses a corpus, or it cannot be loaded.
        """
        speculation = self._speculation
        for name in ("corpus", "remember_outputs"):
            if getattr(speculation, name) and "suffix" not in proposers:
                raise InvalidParameterError(name, "needs the draft 'suffix'")
        return load_corpus(speculation, self._models.target.tokenizer)

    def _cached_model(self, model: LoadedModel) -> CachedModel:
        if isinstance(model.model, ExitModel):
            assert self._kept_states is not None
            return CachedExit(model.model, self._target_cache, self._vocab_size, self._kept_states)
        if isinstance(model.model, AssistantModel):
            return CachedAssistant(model.model, self._target_cache, self._vocab_size)
        cache = self._new_cache(model)
        self._caches.append(cache)
        self._cached_models.append(new_cached_model(model, cache, self._vocab_size))
        return self._cached_models[-1]

    def _new_cache(self, model: LoadedModel) -> KVCache:
        return model.model.new_cache(
            self._options.max_batch_size, model.max_model_len, self.max_new_tokens
        )


def _with_costs_of(proposers: list[str], latency: LatencyModel | None) -> LatencyModel | None:
    """The costs of steps with these proposers, from those of the models' passes."""
    for name in proposers:
        if latency is not None:
            latency = PROPOSERS[name].cost_model(latency)
    return latency


def proposer_names(speculation: SpeculationConfig, models: Models) -> list[str]:
    """The names of the configured proposers; empty without any.

    A draft model is drafted with by ``"model"``, a head by ``"eagle"`` or ``"block"``, an assistant
    of Gemma 4 by ``"assistant"``, and an exit of the target by ``"exit"``.
    """
    names = [name for name in model_free_proposers(speculation) if name != "none"]
    if models.draft is None:
        return names
    kinds: dict[type[PackedModel], str] = {
        HeadModel: "eagle",
        AssistantModel: "assistant",
        BlockHeadModel: "block",
        ParallelHeadModel: "block",
        ExitModel: "exit",
    }
    return [*names, kinds.get(type(models.draft.model), "model")]
