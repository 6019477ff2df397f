"""``draftwise vllm-serve``: build, print and run a ``vllm serve`` command."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from draftwise.cli.quiet import environment_of_the_user


def vllm_serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="Folder, hub id or zoo:NAME.", show_default=False),
    ],
    draft: Annotated[
        str,
        typer.Option(
            help="Draft model; suffix or ngram to draft from the text itself; suffix,MODEL for "
            "both."
        ),
    ] = "suffix",
    companion: Annotated[
        str | None, typer.Option(help="Model that scores drafted tokens.", show_default=False)
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="See `draftwise policies`.",
            show_default="sv with a companion, adaptive without; sv-predictable if drafts are "
            "sampled",
        ),
    ] = None,
    policy_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the policy; may be repeated."),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens drafted per step.")
    ] = 5,
    sample_drafts: Annotated[
        bool,
        typer.Option(
            "--sample-drafts",
            help="Sample drafts instead of drafting greedily. This accepts more tokens at "
            "temperatures above 0, but policies can only truncate drafts.",
        ),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Acceptance profile written by `draftwise profile`.",
            show_default=False,
        ),
    ] = None,
    latency_profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Latency profile written by `draftwise profile-latency`.",
            show_default=False,
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Number of devices over which each model is sharded.")
    ] = 1,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the command without running it.")
    ] = False,
) -> None:
    """Serve with vLLM, with drafts controlled by a policy of Draftwise.

    Arguments after [bold]--[/] are passed to [bold]vllm serve[/].

    Examples:
      draftwise vllm-serve TARGET --draft suffix
      draftwise vllm-serve TARGET --draft suffix,DRAFT
      draftwise vllm-serve TARGET --draft DRAFT --companion COMPANION
      draftwise vllm-serve zoo:target --draft zoo:draft --policy svip -- --port 8001
    """
    from draftwise.cli.option_values import parse_policy_options
    from draftwise.integrations.vllm.command import ServeCommand
    from draftwise.integrations.vllm.settings import VllmSettings

    command = ServeCommand(
        target,
        draft,
        VllmSettings(
            policy=policy,
            policy_options=parse_policy_options(policy_option or []),
            companion=companion,
            profile=profile,
            latency_profile=latency_profile,
        ),
        num_speculative_tokens,
        sample_drafts,
        tensor_parallel_size,
        tuple(context.args),
    )
    variables = [f"{key}={value}" for key, value in command.environment.items()]
    typer.echo(" ".join([*variables, shlex.join(command.arguments)]))
    if not print_only:
        command.run(environment_of_the_user())
