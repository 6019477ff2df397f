"""``draftwise serve``: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftwise.cli.defaults import speculation_of
from draftwise.cli.options import parse_lenience, parse_policy_options, read_chat_template
from draftwise.cli.shared import (
    RUNNING,
    TARGET_HELP,
    ChatTemplate,
    Companion,
    Device,
    DraftReplicas,
    Dtype,
    LatencyProfile,
    Lenience,
    MaxModelLen,
    NumSpeculativeTokens,
    Overlap,
    PolicyName,
    PolicyOption,
    Profile,
    TrustRemoteCode,
    Verification,
)
from draftwise.errors import InvalidParameterError

_CLIENTS, _NETWORK, _LOGS = "Clients", "Network", "Logs"


def serve(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    draft: Annotated[
        str | None,
        typer.Option(help="The model that writes ahead.", show_default="target alone"),
    ] = None,
    companion: Companion = None,
    policy: PolicyName = None,
    policy_option: PolicyOption = None,
    num_speculative_tokens: NumSpeculativeTokens = 5,
    verification: Verification = "block",
    lenience: Lenience = "1.0",
    profile: Profile = None,
    latency_profile: LatencyProfile = None,
    host: Annotated[str, typer.Option(rich_help_panel=_NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(rich_help_panel=_NETWORK, min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="DRAFTWISE_API_KEY",
            help="Let only those in who have it; may be repeated.",
            rich_help_panel=_CLIENTS,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model.", show_default="TARGET", rich_help_panel=_CLIENTS
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            help="Requests that may wait beside those that run; more are told to come back.",
            rich_help_panel=_CLIENTS,
        ),
    ] = 128,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Longest prompt.", show_default="the context", rich_help_panel=_CLIENTS),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Longest body of a request.", rich_help_panel=_CLIENTS)
    ] = 8 << 20,
    request_timeout: Annotated[
        float,
        typer.Option(help="Seconds from arrival to the last token.", rich_help_panel=_CLIENTS),
    ] = 600.0,
    chat_template: ChatTemplate = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools: hermes or llama3_json.",
            show_default="by the chat template",
            rich_help_panel=_CLIENTS,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this origin ask, such as https://example.org, or * for all; "
            "may be repeated.",
            rich_help_panel=_CLIENTS,
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that running requests have to end when the server is told to stop.",
            rich_help_panel=_CLIENTS,
        ),
    ] = 30.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which an engine that does not respond is replaced.",
            rich_help_panel=RUNNING,
        ),
    ] = 120.0,
    max_batch_size: Annotated[
        int, typer.Option(help="Requests that run at once.", rich_help_panel=RUNNING)
    ] = 32,
    max_chunk_tokens: Annotated[
        int, typer.Option(help="Prompt tokens processed per step.", rich_help_panel=RUNNING)
    ] = 512,
    cache_gib: Annotated[
        float | None,
        typer.Option(
            help="Memory for keys and values.",
            show_default="half of what is free",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
    overlap: Overlap = None,
    draft_replicas: DraftReplicas = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            help="To compute with on a CPU.",
            show_default="all cores",
            min=1,
            rich_help_panel=RUNNING,
        ),
    ] = None,
    log_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One JSON object per line.",
            show_default="standard error",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_LOGS)
    ] = "info",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send a span of every request to an OpenTelemetry collector.",
            rich_help_panel=_LOGS,
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI's clients, with a page to try it at /.

    Examples:
      draftwise serve zoo:target --draft zoo:draft
      draftwise serve TARGET --draft DRAFT --companion COMPANION --api-key SECRET
    """
    try:
        from draftwise.serving.logs import set_up_logs
        from draftwise.serving.run import open_socket, run
        from draftwise.serving.service import Service
        from draftwise.serving.tracing import set_up_tracing
    except ModuleNotFoundError as error:
        raise InvalidParameterError(
            "serve", f"{error.name} is missing: pip install 'draftwise[serve]'"
        ) from error
    from draftwise.serving.settings import EngineSettings, ServerSettings

    speculation = speculation_of(
        context,
        draft,
        {
            "companion": companion,
            "policy": policy,
            "policy_options": parse_policy_options(policy_option or ()),
            "profile": profile,
            "latency_profile": latency_profile,
            "num_speculative_tokens": num_speculative_tokens,
            "lenience": parse_lenience(lenience),
            "verification": verification,
        },
    )
    engine = EngineSettings(
        target,
        speculation,
        dtype,
        device,
        max_batch_size,
        max_model_len,
        max_chunk_tokens,
        cache_gib,
        trust_remote_code,
        overlap,
        draft_replicas,
        threads,
    )
    settings = ServerSettings(
        served_model_name,
        tuple(api_key or ()),
        max_queue,
        max_body_bytes,
        max_prompt_tokens,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        chat_template=read_chat_template(chat_template),
        tool_call_parser=tool_call_parser,
        allowed_origins=tuple(allowed_origins or ()),
        step_timeout=step_timeout,
    )
    set_up_logs(log_file, log_level)
    tracing = set_up_tracing(otlp_endpoint)
    listening = open_socket(host, port)
    console = Console(stderr=True, highlight=False)
    name = f"[{host}]" if ":" in host else host
    status = console.status(f"loading {target} …")
    status.start()

    def ready() -> None:
        status.stop()
        console.print(
            f"[bold]{target}[/] is served at "
            f"[bold]http://{name}:{listening.getsockname()[1]}[/] (page at /, API at /v1); "
            "ctrl-C stops",
            soft_wrap=True,
        )

    try:
        run(Service(engine, settings, tracing), listening, ready)
    finally:
        status.stop()
