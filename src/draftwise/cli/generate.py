"""``draftwise generate``: generate text, optionally compared with target-only decoding."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftwise.cli.defaults import Zoo, choose_models, speculation_of
from draftwise.cli.fields import Own, Values, takes
from draftwise.cli.flags import name_flags
from draftwise.cli.interruption import EXIT_STATUS, reader_may_be_gone
from draftwise.cli.option_values import (
    parse_speculative_config,
    read_chat_template,
    set_chat_template,
)
from draftwise.cli.options import (
    ENGINE_OPTIONS,
    SAMPLING_OPTIONS,
    SPECULATION_OPTIONS,
    ChatTemplate,
    Draft,
    SpeculativeConfig,
    Target,
    Verbose,
)
from draftwise.cli.quiet import show_logs
from draftwise.errors import InvalidParameterError
from draftwise.params import SamplingParams
from draftwise.prompts import Prompt, load_prompts

_PROMPTS, _OUTPUT = "Prompts", "Output"


@takes(
    speculation=SPECULATION_OPTIONS.without("remember_outputs"),
    sampling=SAMPLING_OPTIONS.but(
        temperature=0.0,
        logprobs=Own(
            "With --json: report the target's log-probabilities of every generated token and of "
            "this many most likely tokens at each position.",
        ),
    ),
    engine=ENGINE_OPTIONS.only(
        *("max_batch_size", "dtype", "device", "max_model_len", "trust_remote_code"),
        *("overlap", "draft_replicas"),
    )
    .but(max_batch_size=Own("Number of prompts that run at once.", "--batch-size"))
    .but(max_batch_size=8),
)
def generate(
    context: typer.Context,
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with prompt, question, turns or text.",
            metavar="FILE",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of prompts read from the file.", min=1, rich_help_panel=_PROMPTS
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Format prompts with the target's chat template.",
            rich_help_panel=_PROMPTS,
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    target: Target = None,
    draft: Draft = None,
    speculation: Values,
    sampling: SamplingParams,
    engine: Values,
    verbose: Verbose = False,
    speculative_config: SpeculativeConfig = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run target-only and speculative decoding side by side.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Generate text with speculative decoding.

    Examples:
      draftwise generate "def fibonacci(n):"
      draftwise generate "def fibonacci(n):" --policy fixed --num-speculative-tokens 4
      draftwise generate --prompts prompts.jsonl --companion zoo:companion --compare
      draftwise generate "A cat as JSON:" --json-schema cat.json
    """
    if verbose:
        show_logs()
    if (prompt is None) == (prompts is None):
        raise InvalidParameterError("prompt", "give either a prompt or --prompts FILE")
    texts = [prompt or ""] if prompts is None else load_prompts(prompts, num_prompts)
    if sampling.logprobs is not None and not as_json:
        raise InvalidParameterError("logprobs", "requires --json")
    if chat_template is not None and not chat:
        raise InvalidParameterError("chat_template", "requires --chat")
    template = read_chat_template(chat_template)
    companion, whole = speculation["companion"], parse_speculative_config(speculative_config)
    if whole is not None:
        draft = draft or ",".join(whole.draft_names)
        companion = companion or whole.companion
    models = choose_models(Zoo(), target, draft, companion)
    speculation["companion"] = models.companion
    config = speculation_of(context, models.draft, speculation, whole)
    if compare:
        models.require_draft("--compare compares speculative with target-only decoding")
    console = Console(stderr=as_json, highlight=False)
    with console.status("starting …") as status:
        from draftwise.cli.generate_run import compare_prompts, run_prompts
        from draftwise.llm import LLM

        llm = LLM(
            models.target,
            config,
            **engine,
            on_status=lambda operation: status.update(f"{operation} …"),
        )
    set_chat_template(llm, template)
    if models.draft_is_missing and speculation["policy"] is None:
        typer.echo(
            "no draft: decoding without speculation; name a draft with --draft DRAFT",
            err=True,
        )
    inputs: list[Prompt] = [[{"role": "user", "content": text}] if chat else text for text in texts]
    rename = partial(name_flags, context.command)
    try:
        if compare:
            size = engine["max_batch_size"]
            generated = compare_prompts(console, llm, inputs, sampling, size, rename)
        else:
            generated = run_prompts(console, llm, inputs, sampling, rename)
    finally:
        llm.close()
    if as_json:
        result = generated.result | {"warnings": context.obj}
        with reader_may_be_gone(generated.interrupted):
            typer.echo(json.dumps(result, ensure_ascii=False))
    if generated.interrupted:
        raise typer.Exit(EXIT_STATUS)
    if any(output["error"] for output in generated.result["outputs"]):
        raise typer.Exit(2)
