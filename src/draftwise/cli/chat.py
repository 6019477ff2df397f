"""``draftwise chat``: chat with a model in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftwise.cli.common_options import (
    DRAFT_HELP,
    TARGET_HELP,
    ChatTemplate,
    Companion,
    Device,
    Dtype,
    LatencyProfile,
    MaxModelLen,
    NumSpeculativeTokens,
    PolicyName,
    Profile,
    SpeculativeConfig,
    Temperature,
    TopP,
    TrustRemoteCode,
    Verbose,
)
from draftwise.cli.defaults import speculation_of
from draftwise.cli.flags import name_flags, was_given
from draftwise.cli.option_values import (
    check_max_tokens,
    parse_speculative_config,
    read_chat_template,
    set_chat_template,
)
from draftwise.cli.quiet import show_logs
from draftwise.errors import DraftwiseError, InvalidParameterError

if TYPE_CHECKING:
    from draftwise.serving.conversation import ChatModel, Message

# Options that a server has of its own.
_OF_A_LOADED_MODEL = (
    "draft",
    "companion",
    "policy",
    "num_speculative_tokens",
    "profile",
    "latency_profile",
    "speculative_config",
    "chat_template",
    "dtype",
    "device",
    "max_model_len",
    "trust_remote_code",
    "verbose",
)
_HELP = "/reset starts a new chat, /quit or ctrl-D exits, ctrl-C stops the answer"


def chat(
    context: typer.Context,
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
    draft: Annotated[
        str | None,
        typer.Option(help=DRAFT_HELP, show_default="none"),
    ] = None,
    companion: Companion = None,
    policy: PolicyName = None,
    num_speculative_tokens: NumSpeculativeTokens = 5,
    profile: Profile = None,
    latency_profile: LatencyProfile = None,
    speculative_config: SpeculativeConfig = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    chat_template: ChatTemplate = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
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
    check_max_tokens(max_tokens)
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
            options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
            model = remote = ServerChatModel(server, api_key, options)
            later.callback(remote.close)
        else:
            from draftwise.llm import LLM
            from draftwise.params import SamplingParams

            speculation = speculation_of(
                context,
                draft,
                {
                    "companion": companion,
                    "policy": policy,
                    "profile": profile,
                    "latency_profile": latency_profile,
                    "num_speculative_tokens": num_speculative_tokens,
                },
                parse_speculative_config(speculative_config),
            )
            with console.status(f"loading {target} …"):
                llm = LLM(
                    str(target),
                    speculation,
                    dtype,
                    device,
                    1,
                    max_model_len,
                    trust_remote_code=trust_remote_code,
                )
            later.callback(llm.close)
            set_chat_template(llm, template)
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
            model = LocalChatModel(llm, params)
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
