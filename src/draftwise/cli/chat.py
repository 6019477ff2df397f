"""``draftwise chat``: talk to a model in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftwise.cli.defaults import speculation_of
from draftwise.cli.flags import name_flags
from draftwise.cli.options import check_max_tokens, read_chat_template, set_chat_template
from draftwise.cli.shared import (
    ChatTemplate,
    Companion,
    Device,
    Dtype,
    LatencyProfile,
    MaxModelLen,
    NumSpeculativeTokens,
    PolicyName,
    Profile,
    Temperature,
    TopP,
    TrustRemoteCode,
)
from draftwise.errors import DraftwiseError, InvalidParameterError

if TYPE_CHECKING:
    from draftwise.serving.talk import Message, Talker

_HELP = "/reset begins anew, /quit ends (so does ctrl-D), ctrl-C stops an answer"


def chat(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="Folder, hub id or zoo:NAME, loaded here; or give --server.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server that speaks as OpenAI's does."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DRAFTWISE_API_KEY", help="Of the server.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="The model that writes ahead.", show_default="target alone"),
    ] = None,
    companion: Companion = None,
    policy: PolicyName = None,
    num_speculative_tokens: NumSpeculativeTokens = 5,
    profile: Profile = None,
    latency_profile: LatencyProfile = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    chat_template: ChatTemplate = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk to a model, loaded here or behind a server; accepted drafts are told apart.

    Examples:
      draftwise chat zoo:target --draft zoo:draft
      draftwise chat --server http://127.0.0.1:8000
    """
    if (target is None) == (server is None):
        raise InvalidParameterError("target", "give either a model to load or --server URL")
    if server is not None and chat_template is not None:
        raise InvalidParameterError("chat_template", "is the server's: draftwise serve has it")
    check_max_tokens(max_tokens)
    template = read_chat_template(chat_template)
    try:
        from draftwise.serving.talk import LocalTalker, ServerTalker
    except ModuleNotFoundError as error:
        raise InvalidParameterError(
            "chat", f"{error.name} is missing: pip install 'draftwise[serve]'"
        ) from error

    console = Console(highlight=False)
    with ExitStack() as later:
        talker: Talker
        if server is not None:
            options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
            talker = remote = ServerTalker(server, api_key, options)
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
            talker = LocalTalker(llm, params)
        talk(console, talker, system, partial(name_flags, context.command))


def talk(
    console: Console,
    talker: Talker,
    system: str | None,
    rename: Callable[[DraftwiseError], None] = lambda _: None,
) -> None:
    """Ask and answer until the user has had enough.

    Args:
        console: where to ask and answer.
        talker: who answers.
        system: what the model is told first.
        rename: called with every error, to put it in the words of the command line.
    """
    console.print(f"[bold]{talker.name}[/]  [dim]{_HELP}[/]")
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    while True:
        try:
            said = console.input("[bold cyan]>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if said == "/quit":
            return
        if said == "/reset":
            messages = list(beginning)
            console.print("[dim]begun anew[/]")
        elif said.startswith("/"):
            console.print(f"[dim]{_HELP}[/]")
        elif said:
            messages.append({"role": "user", "content": said})
            answer = _answer(console, talker, messages, rename)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(
    console: Console,
    talker: Talker,
    messages: list[Any],
    rename: Callable[[DraftwiseError], None],
) -> str | None:
    """Print an answer as it comes; ``None`` if there is none."""
    from rich.text import Text

    from draftwise.cli.render import STYLES
    from draftwise.serving.talk import Reply

    reply = Reply()
    try:
        for text, source in talker.answer(messages, reply):
            console.print(Text(text, style=STYLES[source]), end="", soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim]stopped[/]", end="")
    except DraftwiseError as error:
        rename(error)
        console.print(f"[bold red]error[/] [bold]{error.field}[/]: ", end="")
        console.print(error.message, markup=False)
        return None
    console.print()
    told = f"{reply.num_tokens} tokens"
    if reply.mean_accepted_length > 1:
        told += f", {reply.mean_accepted_length:.2f} per step"
    if not reply.lossless:
        told += ", not lossless"
    if reply.num_tokens:
        console.print(f"[dim]{told}[/]")
    return reply.text
