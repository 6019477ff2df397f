"""Worker classes for ``--worker-cls``: vLLM's, with a drafter of ours."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from draftwise.core.latency import LatencyModel, StageCost
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.integrations.vllm.compatibility import check_version, vllm_version
from draftwise.integrations.vllm.drafting import of_first_rank
from draftwise.integrations.vllm.passes import measure_costs
from draftwise.integrations.vllm.settings import VllmSettings
from draftwise.integrations.vllm.steering import Steering
from draftwise.models.fingerprint import checkpoint_fingerprint
from draftwise.policies import PolicyContext, create_policy
from draftwise.profiling.latency_profile import LatencyProfile

check_version(vllm_version())

# Until passes were measured: shares of a pass over one token that each token more costs, and what
# passes of the small models cost of the target's.
_GUESSED_SECONDS, _GUESSED_PER_TOKEN = 0.02, 0.02
_GUESSED_DRAFT = 0.1
_MOST_TOKENS = 4096


def steered_drafter(runner: Any, device: torch.device) -> Any:
    """What takes the place of vLLM's proposer (V1 model runner) or speculator (V2).

    Args:
        runner: the model runner; its models are not loaded yet.
        device: of the worker.

    Raises:
        DraftwiseError: what is asked for cannot be had; names the setting.
    """
    config: VllmConfig = runner.vllm_config
    settings = VllmSettings.of(config.additional_config)
    speculative = config.speculative_config
    policy = settings.policy_for(
        speculative.draft_sample_method == "probabilistic"
        and speculative.rejection_sample_method == "standard"
    )
    drafter, companion_model = _classes(config)
    companion = None
    if settings.companion is not None and policy.uses_companion():
        companion = companion_model(config, device, settings.companion)
    profile = None if settings.profile is None else AcceptanceProfile.load(settings.profile)
    if profile is not None:
        profile.check(
            target=checkpoint_fingerprint(config.model_config.model),
            draft=checkpoint_fingerprint(speculative.draft_model_config.model),
            companion=None
            if settings.companion is None
            else checkpoint_fingerprint(settings.companion),
        )
    latency = _latency(settings)
    context = PolicyContext(
        speculative.num_speculative_tokens,
        latency,
        profile,
        has_companion=companion is not None,
    )
    steering = Steering(
        create_policy(policy.name, context, settings.policy_options), latency, of_first_rank
    )
    return drafter(config, device, runner, steering, companion)


def _classes(config: VllmConfig) -> tuple[type[Any], type[Any]]:
    """Drafter and companion; not every machine can load the modules of either model runner."""
    if config.use_v2_model_runner:
        from draftwise.integrations.vllm.v2.companion import CompanionModel
        from draftwise.integrations.vllm.v2.speculator import SteeredSpeculator

        return SteeredSpeculator, CompanionModel
    from draftwise.integrations.vllm.v1 import companion, proposer

    return proposer.SteeredProposer, companion.CompanionModel


def check_config(config: VllmConfig) -> None:
    """Refuse what vLLM can do and a steered draft model cannot.

    Raises:
        InvalidParameterError: names the setting.
    """
    speculative = config.speculative_config
    if speculative is None:
        raise InvalidParameterError("speculative_config", "missing: name a draft model")
    if speculative.method != "draft_model":
        raise InvalidParameterError("speculative_config.method", "must be draft_model")
    if config.scheduler_config.async_scheduling:
        raise InvalidParameterError(
            "async_scheduling", "drafts of different lengths need --no-async-scheduling"
        )
    if config.parallel_config.data_parallel_size > 1:
        raise InvalidParameterError(
            "data_parallel_size",
            "ranks that share experts must draft alike; run one server per replica",
        )
    if speculative.use_heterogeneous_vocab or speculative.use_local_argmax_reduction:
        raise InvalidParameterError(
            "speculative_config",
            "use_heterogeneous_vocab and use_local_argmax_reduction hide the draft's distribution",
        )
    if speculative.enable_adaptive_verification:
        raise InvalidParameterError(
            "speculative_config.enable_adaptive_verification",
            "is vLLM's own choice of what to verify; Draftwise makes that choice",
        )


def _latency(settings: VllmSettings) -> LatencyModel:
    """What passes cost: as measured, or a guess until they are (see :meth:`_Steered.measure`)."""
    if settings.latency_profile is not None:
        return LatencyProfile.load(settings.latency_profile).latency_model()
    most = _GUESSED_SECONDS * (1 + _GUESSED_PER_TOKEN * _MOST_TOKENS)
    target = StageCost((1.0, float(_MOST_TOKENS)), (_GUESSED_SECONDS, most))
    small = StageCost((1.0, 1024.0), (_GUESSED_DRAFT * _GUESSED_SECONDS,) * 2)
    return LatencyModel(target, small, small)


class _Steered:
    """Puts our drafter in the place of vLLM's, as soon as there is one, and measures passes."""

    def init_device(self) -> None:
        """As vLLM does, then exchange what drafts."""
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner  # type: ignore[attr-defined]
        config: VllmConfig = runner.vllm_config
        check_config(config)
        # Only the last stage of a pipeline drafts.
        place = "speculator" if config.use_v2_model_runner else "drafter"
        self.drafter: Any = None
        if getattr(runner, place, None) is not None:
            self.drafter = steered_drafter(runner, runner.device)
            self.drafter.take_place()

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM does; then measure what passes cost, if nobody said it."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.measure()
        return result

    def measure(self) -> None:
        """Tell the policy what passes cost; on all processes alike: they wait for each other."""
        runner = self.model_runner  # type: ignore[attr-defined]
        config = runner.vllm_config
        says = VllmSettings.of(config.additional_config).latency_profile is not None
        # Of a pipeline the stages would have to be timed together.
        if says or config.parallel_config.pipeline_parallel_size > 1:
            return
        costs = measure_costs(runner, self.drafter, self.drafter.companion is not None)
        self.drafter.drafting.steering.restart_costs(*costs)


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class DraftwiseWorker(_Steered, _Worker):  # type: ignore[misc]
    """For ``--worker-cls draftwise.integrations.vllm.worker.DraftwiseWorker``."""
