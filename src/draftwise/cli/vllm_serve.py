"""``draftwise vllm-serve``: the right ``vllm serve``, printed and run."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer


def vllm_serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="Folder, hub id or zoo:NAME.", show_default=False),
    ],
    draft: Annotated[str, typer.Option(help="The model that writes ahead.", show_default=False)],
    companion: Annotated[
        str | None, typer.Option(help="A model that judges the draft.", show_default=False)
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
        typer.Option(metavar="KEY=VALUE", help="Of the policy; may be repeated."),
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Most tokens drafted per step.")] = 5,
    sample_drafts: Annotated[
        bool,
        typer.Option(
            "--sample-drafts",
            help="Draw drafts instead of taking their most likely tokens: more is accepted at "
            "temperatures above 0, and policies may only cut.",
        ),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What `draftwise profile` learnt.", show_default=False),
    ] = None,
    latency_profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What `draftwise profile-latency` measured.",
            show_default=False,
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Devices that share each model, the draft too.")
    ] = 1,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the command and do not run it.")
    ] = False,
) -> None:
    """Serve with vLLM, steered by a policy of Draftwise.

    Whatever stands behind [bold]--[/] is for [bold]vllm serve[/] itself.

    Examples:
      draftwise vllm-serve TARGET --draft DRAFT --companion COMPANION
      draftwise vllm-serve zoo:target --draft zoo:draft --policy svip -- --port 8001
    """
    from draftwise.cli.options import parse_policy_options
    from draftwise.integrations.vllm.command import ServeCommand
    from draftwise.integrations.vllm.settings import VllmSettings

    command = ServeCommand(
        target,
        draft,
        VllmSettings(
            policy, parse_policy_options(policy_option or []), companion, profile, latency_profile
        ),
        num_speculative_tokens,
        sample_drafts,
        tensor_parallel_size,
        tuple(context.args),
    )
    variables = [f"{key}={value}" for key, value in command.environment.items()]
    typer.echo(" ".join([*variables, shlex.join(command.arguments)]))
    if not print_only:
        command.run()
