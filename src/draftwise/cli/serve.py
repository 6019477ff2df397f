"""``draftwise serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftwise.cli.common_options import (
    DRAFT_HELP,
    RUNNING,
    TARGET_HELP,
    ChatTemplate,
    Companion,
    Corpus,
    Device,
    DraftReplicas,
    Dtype,
    Guard,
    LatencyProfile,
    Lenience,
    MaxModelLen,
    NumSpeculativeTokens,
    Overlap,
    PolicyName,
    PolicyOption,
    Profile,
    RememberOutputs,
    SpeculativeConfig,
    TreeWidth,
    TrustRemoteCode,
    Verification,
)
from draftwise.cli.defaults import speculation_of
from draftwise.cli.option_values import (
    parse_lenience,
    parse_policy_options,
    parse_speculative_config,
    read_chat_template,
)
from draftwise.errors import InvalidParameterError

_CLIENTS, _NETWORK, _LOGS = "Clients", "Network", "Logs"
_API_KEY = "DRAFTWISE_API_KEY"


def serve(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    draft: Annotated[
        str | None,
        typer.Option(help=DRAFT_HELP, show_default="none"),
    ] = None,
    companion: Companion = None,
    policy: PolicyName = None,
    policy_option: PolicyOption = None,
    num_speculative_tokens: NumSpeculativeTokens = 5,
    tree_width: TreeWidth = 1,
    verification: Verification = "block",
    guard: Guard = True,
    lenience: Lenience = "1.0",
    profile: Profile = None,
    latency_profile: LatencyProfile = None,
    corpus: Corpus = None,
    speculative_config: SpeculativeConfig = None,
    remember_outputs: RememberOutputs = False,
    host: Annotated[str, typer.Option(rich_help_panel=_NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(rich_help_panel=_NETWORK, min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=_API_KEY,
            help="Require this API key of clients; may be repeated.",
            rich_help_panel=_CLIENTS,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="Model name in the API.", show_default="TARGET", rich_help_panel=_CLIENTS
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            help="Maximum number of waiting requests; further requests are rejected with 429.",
            rich_help_panel=_CLIENTS,
        ),
    ] = 128,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of prompt tokens.",
            show_default="the context",
            rich_help_panel=_CLIENTS,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Maximum size of a request body.", rich_help_panel=_CLIENTS)
    ] = 8 << 20,
    request_timeout: Annotated[
        float,
        typer.Option(
            help="Maximum seconds from the arrival of a request to its last token.",
            rich_help_panel=_CLIENTS,
        ),
    ] = 600.0,
    chat_template: ChatTemplate = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="Format of the model's tool calls: hermes or llama3_json.",
            show_default="detected from the chat template",
            rich_help_panel=_CLIENTS,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Allow cross-origin requests from this origin, such as https://example.org, or * "
            "for all; may be repeated.",
            rich_help_panel=_CLIENTS,
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for running requests to finish when the server shuts down.",
            rich_help_panel=_CLIENTS,
        ),
    ] = 30.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which an unresponsive engine is restarted.",
            rich_help_panel=RUNNING,
        ),
    ] = 120.0,
    max_batch_size: Annotated[
        int,
        typer.Option(help="Maximum number of requests that run at once.", rich_help_panel=RUNNING),
    ] = 32,
    max_chunk_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum number of prompt tokens processed per step.", rich_help_panel=RUNNING
        ),
    ] = 512,
    cache_gib: Annotated[
        float | None,
        typer.Option(
            help="Size of the KV cache in GiB.",
            show_default="half of the free memory",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            help="Keep the keys and values of texts for requests that begin with the same tokens.",
            rich_help_panel=RUNNING,
        ),
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
    overlap: Overlap = None,
    draft_replicas: DraftReplicas = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Number of CPU threads.",
            show_default="all cores",
            min=1,
            rich_help_panel=RUNNING,
        ),
    ] = None,
    log_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for logs, one JSON object per line.",
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
            help="Send a span for each request to this OpenTelemetry collector.",
            rich_help_panel=_LOGS,
        ),
    ] = None,
) -> None:
    """Serve a model with an OpenAI-compatible API and a web page at /.

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

    if not api_key and _API_KEY in os.environ:
        # It was meant to be set. Without this the server would be open.
        raise InvalidParameterError("api_key", f"the environment variable {_API_KEY} is empty")
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
            "tree_width": tree_width,
            "lenience": parse_lenience(lenience),
            "verification": verification,
            "guard": guard,
            "corpus": tuple(corpus or ()),
            "remember_outputs": remember_outputs,
        },
        parse_speculative_config(speculative_config),
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
        enable_prefix_caching,
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

    service = Service(engine, settings, tracing)

    def ready() -> None:
        status.stop()
        for line in service.client.model.warnings:
            typer.echo(f"warning {line}", err=True)
        console.print(
            f"[bold]{target}[/] is served at "
            f"[bold]http://{name}:{listening.getsockname()[1]}[/] (page at /, API at /v1); "
            "ctrl-C stops",
            soft_wrap=True,
        )

    try:
        run(service, listening, ready)
    finally:
        status.stop()
