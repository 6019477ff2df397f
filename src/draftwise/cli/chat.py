"""``draftwise chat``: chat with a model in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftwise.cli.defaults import speculation_of
from draftwise.cli.fields import Values, takes
from draftwise.cli.flags import name_flags, was_given
from draftwise.cli.option_values import (
    parse_speculative_config,
    read_chat_template,
    set_chat_template,
)
from draftwise.cli.options import (
    LOADING_OPTIONS,
    SAMPLING_OPTIONS,
    SPECULATION_OPTIONS,
    TARGET_HELP,
    ChatTemplate,
    OwnDraft,
    SpeculativeConfig,
    Verbose,
)
from draftwise.cli.quiet import show_logs
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.params import SamplingParams

if TYPE_CHECKING:
    from draftwise.serving.conversation import ChatModel, Message

_SPECULATION = SPECULATION_OPTIONS.without("remember_outputs")
# Options that a server has of its own.
_OF_A_LOADED_MODEL = (
    *("draft", *_SPECULATION.own, "speculative_config", "chat_template", "verbose"),
    *LOADING_OPTIONS.own,
)
_HELP = "/reset starts a new chat, /quit or ctrl-D exits, ctrl-C stops the answer"


@takes(
    speculation=_SPECULATION,
    sampling=SAMPLING_OPTIONS.only("max_tokens", "temperature", "top_p").but(
        max_tokens=512, temperature=0.7
    ),
    engine=LOADING_OPTIONS,
)
def chat(
    context: typer.Context,
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help=f"{TARGET_HELP} Not with --server.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible server."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DRAFTWISE_API_KEY", help="API key of the server.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    draft: OwnDraft = None,
    speculation: Values,
    speculative_config: SpeculativeConfig = None,
    sampling: Values,
    chat_template: ChatTemplate = None,
    engine: Values,
    verbose: Verbose = False,
) -> None:
    """Chat with a loaded model or a server; colours mark how each token was generated.

    Examples:
      draftwise chat zoo:target --draft zoo:draft
      draftwise chat --server http://127.0.0.1:8000
    """
    if (target is None) == (server is None):
        raise InvalidParameterError("target", "give either a model to load or --server URL")
    if server is not None:
        for name in _OF_A_LOADED_MODEL:
            if was_given(context, name):
                raise InvalidParameterError(
                    name, "cannot be used with --server; set it with draftwise serve"
                )
    if verbose:
        show_logs()
    template = read_chat_template(chat_template)
    try:
        from draftwise.serving.conversation import LocalChatModel, ServerChatModel
    except ModuleNotFoundError as error:
        raise InvalidParameterError(
            "chat", f"{error.name} is missing: pip install 'draftwise[serve]'"
        ) from error

    console = Console(highlight=False)
    with ExitStack() as later:
        model: ChatModel
        if server is not None:
            model = remote = ServerChatModel(server, api_key, sampling)
            later.callback(remote.close)
        else:
            from draftwise.llm import LLM

            config = speculation_of(
                context, draft, speculation, parse_speculative_config(speculative_config)
            )
            with console.status(f"loading {target} …"):
                llm = LLM(str(target), config, max_batch_size=1, **engine)
            later.callback(llm.close)
            set_chat_template(llm, template)
            model = LocalChatModel(llm, SamplingParams(**sampling))
        converse(console, model, system, partial(name_flags, context.command))


def converse(
    console: Console,
    model: ChatModel,
    system: str | None,
    rename: Callable[[DraftwiseError], None] = lambda _: None,
) -> None:
    """Run a chat until the user exits.

    Args:
        console: console for input and output.
        model: the model that answers.
        system: the system message, if any.
        rename: called with each error, to name flags instead of parameters.
    """
    console.print(f"[bold]{model.name}[/]  [dim]{_HELP}[/]")
    first_messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(first_messages)
    while True:
        try:
            user_input = console.input("[bold cyan]>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if user_input == "/quit":
            return
        if user_input == "/reset":
            messages = list(first_messages)
            console.print("[dim]new chat[/]")
        elif user_input.startswith("/"):
            console.print(f"[dim]{_HELP}[/]")
        elif user_input:
            messages.append({"role": "user", "content": user_input})
            answer = _answer(console, model, messages, rename)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(
    console: Console,
    model: ChatModel,
    messages: list[Any],
    rename: Callable[[DraftwiseError], None],
) -> str | None:
    """Print an answer while it is generated and return it; ``None`` after an error."""
    from rich.text import Text

    from draftwise.cli.render import STYLES
    from draftwise.serving.conversation import Reply

    reply = Reply()
    try:
        for text, source in model.answer(messages, reply):
            console.print(Text(text, style=STYLES[source]), end="", soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim]stopped[/]", end="")
    except DraftwiseError as error:
        rename(error)
        console.print(f"[bold red]error[/] [bold]{error.field}[/]: ", end="")
        console.print(error.message, markup=False)
        return None
    console.print()
    summary = f"{reply.num_tokens} tokens"
    if reply.mean_accepted_length > 1:
        summary += f", {reply.mean_accepted_length:.2f} per step"
    if not reply.lossless:
        summary += ", not lossless"
    if reply.num_tokens:
        console.print(f"[dim]{summary}[/]")
    return reply.text
