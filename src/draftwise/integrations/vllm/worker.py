"""The class for ``--worker-cls``: vLLM's worker with Draftwise's drafter."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from draftwise.checkpoints.fingerprint import checkpoint_fingerprint
from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.integrations.vllm.compatibility import check_version, vllm_version
from draftwise.integrations.vllm.hooks import TensorParallel
from draftwise.integrations.vllm.pass_costs import measure_costs
from draftwise.integrations.vllm.settings import TEXT_METHOD, VllmSettings
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.text_drafts import create_text_proposer
from draftwise.policies import PolicyContext, create_policy
from draftwise.policies.router import PolicyRouter
from draftwise.profiling.latency_profile import LatencyProfile

check_version(vllm_version())

# Costs that are assumed until passes are measured. The increase per further token and the time of a
# pass of the small models are relative to the time of a target pass over one token.
_GUESSED_SECONDS, _GUESSED_PER_TOKEN = 0.02, 0.02
_GUESSED_DRAFT = 0.1
_MAX_TOKENS = 4096


def steered_drafter(runner: Any, device: torch.device) -> Any:
    """The replacement of vLLM's proposer (V1 model runner) or speculator (V2).

    Args:
        runner: the model runner, before its models are loaded.
        device: the worker's device.

    Raises:
        DraftwiseError: a setting is invalid or not supported.
    """
    # Imported here, as vLLM's CPU worker changes these modules of vLLM when it is imported.
    from draftwise.integrations.vllm import runner_v1, runner_v2
    from draftwise.integrations.vllm.companion import CompanionModel

    config: VllmConfig = runner.vllm_config
    settings = VllmSettings.of(config.additional_config)
    speculative, is_v2 = config.speculative_config, config.use_v2_model_runner
    text_draft = settings.text_draft(speculative.method)
    has_model = speculative.method != TEXT_METHOD
    # V1 samples drafts only for the standard method.
    samples_drafts = (
        has_model
        and speculative.draft_sample_method == "probabilistic"
        and (is_v2 or speculative.rejection_sample_method == "standard")
    )
    settings.check_sampling(samples_drafts)
    policy = settings.policy_for(samples_drafts)
    companion = None
    if settings.companion is not None:
        companion = CompanionModel(config, device, settings.companion)
    profile = None if settings.profile is None else AcceptanceProfile.load(settings.profile)
    if profile is not None:
        _check_profile(profile, config, settings.companion)
    latency = _latency(settings)
    if not has_model:
        latency.restart(latency.target)  # there are no other passes
    context = PolicyContext(
        speculative.num_speculative_tokens,
        latency,
        profile,
        has_companion=companion is not None,
        guarded=settings.guard,
    )
    steering = Steering(
        PolicyRouter(context, create_policy(policy.name, context, settings.policy_options)),
        latency,
        TensorParallel(),
        None if text_draft is None else create_text_proposer(text_draft),
        config.model_config.get_vocab_size(),
        has_model,
    )
    if is_v2:
        if not has_model:
            return runner_v2.TextSpeculator(config, device, runner, steering)
        return runner_v2.SteeredSpeculator(config, device, runner, steering, companion)
    if not has_model:
        return runner_v1.TextDrafter(config, runner, steering)
    return runner_v1.SteeredProposer(config, device, runner, steering, companion)


def _check_profile(profile: AcceptanceProfile, config: VllmConfig, companion: str | None) -> None:
    """Check that a profile was made with the models, which are not loaded yet.

    Raises:
        DraftwiseError: it was made with others, or a model has no files to compare.
    """

    def fingerprint(role: str, name: str, revision: str | None = None) -> str:
        return checkpoint_fingerprint(name, role, revision, config.load_config.download_dir)

    target, draft = config.model_config, config.speculative_config.draft_model_config
    profile.check(
        target=fingerprint("target", target.model, target.revision),
        draft=fingerprint("draft", draft.model, draft.revision),
        companion=None if companion is None else fingerprint("companion", companion),
    )


def check_config(config: VllmConfig) -> None:
    """Refuse settings of vLLM that Draftwise does not support.

    Raises:
        InvalidParameterError: a setting is not supported.
    """
    speculative = config.speculative_config
    if speculative is None:
        raise InvalidParameterError(
            "speculative_config", f"is missing; set a draft model, or the method {TEXT_METHOD}"
        )
    refusals = (
        (
            speculative.method not in ("draft_model", TEXT_METHOD),
            "speculative_config.method",
            f"must be draft_model, or {TEXT_METHOD} for drafts without a model",
        ),
        (
            config.scheduler_config.async_scheduling,
            "async_scheduling",
            "drafts of different lengths need --no-async-scheduling",
        ),
        (
            config.parallel_config.data_parallel_size > 1,
            "data_parallel_size",
            "ranks that share experts must have equal draft lengths; run one server per replica",
        ),
        (
            speculative.use_heterogeneous_vocab or speculative.use_local_argmax_reduction,
            "speculative_config",
            "use_heterogeneous_vocab and use_local_argmax_reduction hide the draft's distribution",
        ),
        (
            speculative.rejection_sample_method == "synthetic",
            "speculative_config.rejection_sample_method",
            "synthetic accepts tokens at random and changes the output; use standard or block",
        ),
        (
            speculative.disable_padded_drafter_batch,
            "speculative_config.disable_padded_drafter_batch",
            "Draftwise drafts in padded batches only",
        ),
        (
            speculative.parallel_drafting,
            "speculative_config.parallel_drafting",
            "Draftwise drafts token by token",
        ),
        (
            speculative.enable_adaptive_verification,
            "speculative_config.enable_adaptive_verification",
            "is vLLM's own selection of what to verify, which Draftwise replaces; turn it off",
        ),
    )
    for is_refused, field, reason in refusals:
        if is_refused:
            raise InvalidParameterError(field, reason)


def _latency(settings: VllmSettings) -> LatencyModel:
    """Costs of passes from a profile, or assumed ones until :meth:`_SteeredWorker.measure`."""
    if settings.latency_profile is not None:
        return LatencyProfile.load(settings.latency_profile).latency_model()
    most = _GUESSED_SECONDS * (1 + _GUESSED_PER_TOKEN * _MAX_TOKENS)
    target = StageCost((1.0, float(_MAX_TOKENS)), (_GUESSED_SECONDS, most))
    small = StageCost((1.0, 1024.0), (_GUESSED_DRAFT * _GUESSED_SECONDS,) * 2)
    return LatencyModel(target, small, small)


class _SteeredWorker:
    """Worker mixin that replaces vLLM's drafter once it exists, and measures passes."""

    def init_device(self) -> None:
        """See vLLM; then replace the drafter."""
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner  # type: ignore[attr-defined]
        config: VllmConfig = runner.vllm_config
        check_config(config)
        # Only the last stage of a pipeline has a drafter.
        attribute = "speculator" if config.use_v2_model_runner else "drafter"
        self.drafter: Any = None
        if getattr(runner, attribute, None) is not None:
            self.drafter = steered_drafter(runner, runner.device)
            self.drafter.install()

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM; then measure the costs of passes, unless a profile has them."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.measure()
        return result

    def measure(self) -> None:
        """Measure the costs of passes for the policy.

        All processes must call it, as their passes wait for each other.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        config = runner.vllm_config
        has_profile = VllmSettings.of(config.additional_config).latency_profile is not None
        # The stages of a pipeline would have to be timed together.
        if has_profile or config.parallel_config.pipeline_parallel_size > 1:
            return
        costs = measure_costs(runner, self.drafter, TensorParallel())
        self.drafter.hooks.steering.restart_costs(*costs)


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class DraftwiseWorker(_SteeredWorker, _Worker):  # type: ignore[misc]
    """vLLM's worker for this platform, with Draftwise's drafter."""
