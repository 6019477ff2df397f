"""Errors of the command line name options as they are typed."""

import pytest
import typer
from typer.main import get_command

from draftwise.cli.app import app
from draftwise.cli.flags import FlaggingCommand, flag_of, name_flags
from draftwise.errors import InvalidParameterError

COMMANDS = get_command(app).commands


def named(command, field, message=""):
    error = InvalidParameterError(field, message)
    name_flags(COMMANDS[command], error)
    assert str(error) == f"{error.field}: {error.message}"
    return error


def test_every_command_names_its_flags():
    for command in COMMANDS.values():
        each = getattr(command, "commands", {"": command})
        assert all(isinstance(one, FlaggingCommand) for one in each.values())


def test_fields_are_replaced_by_flags():
    for command, field, flag in (
        ("generate", "max_model_len", "--max-model-len"),
        ("generate", "sampling.top_k", "--top-k"),
        ("generate", "speculation.draft", "--draft"),
        ("generate", "max_batch_size", "--batch-size"),
        ("generate", "policy_options.threshold", "--policy-option threshold"),
        ("generate", "structured_outputs.json_schema", "--json-schema"),
        ("serve", "max_batch_size", "--max-batch-size"),
        ("benchmark", "max_batch_size", "--batch-sizes"),
        ("benchmark", "policy", "--policies"),
        ("benchmark", "prompts", "--workload"),
        ("profile", "output", "--output"),
        ("vllm-serve", "draftwise.companion", "--companion"),
        ("vllm-serve", "draftwise.latency_profile", "--latency-profile"),
        # An option of a policy, although the command has an option of this name.
        ("vllm-serve", "draftwise.policy_options.profile", "--policy-option profile"),
    ):
        assert named(command, field).field == flag


def test_a_field_without_an_option_is_unchanged():
    assert named("serve", "target").field == "target"
    assert named("profile", "logit_bias").field == "logit_bias"
    assert named("policies", "max_model_len").field == "max_model_len"
    assert named("vllm-serve", "draftwise.compnion").field == "draftwise.compnion"


def test_messages_name_flags_and_keep_quoted_text():
    error = named("generate", "target", "set max_model_len to 8 or less")
    assert error.message == "set --max-model-len to 8 or less"
    path = "cannot read '/a/max_tokens' or 'max_tokens' or ./max_tokens.json"
    assert named("generate", "prompts", path).message == path
    unknown = "use stop_token_ids instead"
    assert named("generate", "stop", unknown).message == unknown


def test_every_command_that_loads_models_has_max_model_len():
    for name in ("generate", "profile", "profile-latency", "benchmark", "study", "serve", "chat"):
        assert flag_of(COMMANDS[name], "max_model_len") == "--max-model-len", name


def test_an_error_of_a_command_names_the_flag():
    inner = typer.Typer()

    @inner.command(cls=FlaggingCommand)
    def command(top_k: int = 0) -> None:
        raise InvalidParameterError("sampling.top_k", f"must be positive, got {top_k}")

    with pytest.raises(InvalidParameterError, match=r"^--top-k: must be positive, got 0$"):
        get_command(inner)(["--top-k", "0"], standalone_mode=False)
