"""The flags of a command, and errors that name flags instead of parameters of the Python API."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

from draftwise.errors import DraftwiseError

# Parameters that benchmark and vllm-serve set by an option of another name.
_OTHER_NAMES = {
    "max_batch_size": "batch_sizes",
    "policy": "policies",
    "policy_options": "policy_option",
    "prompts": "workload",
}
_KEY_VALUE_PARAMETER = "policy_options"
# The key of Draftwise's settings in vLLM, which begins the fields of their errors.
_VLLM_KEY = "draftwise."
# Text in quotes comes from the user, such as the name of a file.
_NAME_OR_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![-/.\w])[a-z]+(?:_[a-z]+)+(?![-/.\w])")


class FlaggingCommand(TyperCommand):
    """A command whose errors name options as they are typed, such as ``--max-model-len``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options.

        Raises:
            DraftwiseError: the error of an option's callback, with flags in place of parameters.
        """
        try:
            return super().parse_args(ctx, args)
        except DraftwiseError as error:
            name_flags(self, error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            DraftwiseError: the error of the command, with flags in place of parameters.
        """
        try:
            return super().invoke(ctx)
        except DraftwiseError as error:
            name_flags(self, error)
            raise


def name_flags(command: Any, error: DraftwiseError) -> None:
    """Replace parameters of the Python API in an error by the options of a command.

    Nested fields such as ``sampling.top_k`` or ``speculation.draft`` are found by their last
    component. Fields for which the command has no option stay unchanged.
    """
    error.field = _flag_of_field(command, error.field)

    def flag(found: re.Match[str]) -> str:
        text = found.group()
        return text if text[0] in "'\"" else flag_of(command, text) or text

    error.message = _NAME_OR_QUOTED.sub(flag, error.message)
    error.args = (f"{error.field}: {error.message}",)


def flag_of(command: Any, name: str) -> str | None:
    """The flag that sets a parameter; ``None`` if the command has no such option."""
    for option in command.params:
        if option.name == name and option.param_type_name == "option":
            return str(max(option.opts, key=len))
    return None


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the user set an option; False if the command has no such option."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _flag_of_field(command: Any, field: str) -> str:
    whole = field.removeprefix(_VLLM_KEY)
    first, *rest = whole.split(".")
    for name in (whole, first, *rest[-1:]):
        flag = flag_of(command, name) or flag_of(command, _OTHER_NAMES.get(name, ""))
        if flag is not None:
            # For options with KEY=VALUE, add the key.
            return " ".join([flag, *rest]) if name == _KEY_VALUE_PARAMETER else flag
    return field
