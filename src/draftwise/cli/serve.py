"""``draftwise serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftwise.cli.defaults import speculation_of
from draftwise.cli.fields import Values, takes
from draftwise.cli.option_values import parse_speculative_config, read_chat_template
from draftwise.cli.options import (
    ENGINE_OPTIONS,
    SERVER_OPTIONS,
    SPECULATION_OPTIONS,
    TARGET_HELP,
    ChatTemplate,
    OwnDraft,
    SpeculativeConfig,
)
from draftwise.errors import InvalidParameterError
from draftwise.serving.settings import EngineSettings, ServerSettings

_NETWORK, _LOGS = "Network", "Logs"
_API_KEY = "DRAFTWISE_API_KEY"


@takes(speculation=SPECULATION_OPTIONS, server=SERVER_OPTIONS, engine=ENGINE_OPTIONS)
def serve(
    context: typer.Context,
    *,
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    draft: OwnDraft = None,
    speculation: Values,
    speculative_config: SpeculativeConfig = None,
    host: Annotated[str, typer.Option(rich_help_panel=_NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(rich_help_panel=_NETWORK, min=0, max=65535)] = 8000,
    server: Values,
    chat_template: ChatTemplate = None,
    engine: Values,
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
    if not server["api_keys"] and _API_KEY in os.environ:
        # It was meant to be set. Without this the server would be open.
        raise InvalidParameterError("api_keys", f"the environment variable {_API_KEY} is empty")
    config = speculation_of(
        context, draft, speculation, parse_speculative_config(speculative_config)
    )
    settings = ServerSettings(**server, chat_template=read_chat_template(chat_template))
    set_up_logs(log_file, log_level)
    tracing = set_up_tracing(otlp_endpoint)
    listening = open_socket(host, port)
    console = Console(stderr=True, highlight=False)
    name = f"[{host}]" if ":" in host else host
    status = console.status(f"loading {target} …")
    status.start()

    service = Service(EngineSettings(target, config, **engine), settings, tracing)

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
