"""``draftwise generate``: generate text, optionally compared with target-only decoding."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftwise.cli.common_options import (
    RUNNING,
    SAMPLING,
    ChatTemplate,
    Companion,
    Corpus,
    Device,
    Draft,
    DraftReplicas,
    Dtype,
    Guard,
    LatencyProfile,
    Lenience,
    MaxModelLen,
    MinP,
    NumSpeculativeTokens,
    Overlap,
    PolicyName,
    PolicyOption,
    Profile,
    SpeculativeConfig,
    Target,
    Temperature,
    TopK,
    TopP,
    TreeWidth,
    TrustRemoteCode,
    Verbose,
    Verification,
)
from draftwise.cli.defaults import Zoo, choose_models, speculation_of
from draftwise.cli.flags import name_flags
from draftwise.cli.interruption import EXIT_STATUS, reader_may_be_gone
from draftwise.cli.option_values import (
    check_max_tokens,
    parse_lenience,
    parse_policy_options,
    parse_speculative_config,
    read_chat_template,
    set_chat_template,
)
from draftwise.cli.quiet import show_logs
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.prompts import Prompt

_PROMPTS = "Prompts"
_OUTPUT = "Output"


def generate(
    context: typer.Context,
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
    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of generated tokens.", rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the first prompt; it increases by 1 for each further prompt.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON schema that every text must match.",
            metavar="FILE",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Number of prompts that run at once.", rich_help_panel=RUNNING)
    ] = 8,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Verbose = False,
    overlap: Overlap = None,
    draft_replicas: DraftReplicas = 1,
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
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: report the target's log-probabilities of every generated token "
            "and of this many most likely tokens at each position.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Generate text with speculative decoding.

    Examples:
      draftwise generate "def fibonacci(n):"
      draftwise generate "def fibonacci(n):" --policy fixed --num-speculative-tokens 4
      draftwise generate --prompts prompts.jsonl --companion zoo:companion --compare
      draftwise generate "A cat as JSON:" --json-schema cat.json
    """
    from draftwise.cli.inputs import read_prompts, read_schema
    from draftwise.params import SamplingParams

    if verbose:
        show_logs()
    texts = read_prompts(prompt, prompts, num_prompts)
    if logprobs is not None and not as_json:
        raise InvalidParameterError("logprobs", "requires --json")
    if chat_template is not None and not chat:
        raise InvalidParameterError("chat_template", "requires --chat")
    template = read_chat_template(chat_template)
    params = SamplingParams(
        max_tokens=check_max_tokens(max_tokens),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        logprobs=logprobs,
        structured_outputs=read_schema(json_schema),
    )
    whole = parse_speculative_config(speculative_config)
    if whole is not None:
        draft = draft or ",".join(whole.draft_names)
        companion = companion or whole.companion
    models = choose_models(Zoo(), target, draft, companion)
    speculation = speculation_of(
        context,
        models.draft,
        {
            "companion": models.companion,
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
        },
        whole,
    )
    if compare:
        models.require_draft("--compare compares speculative with target-only decoding")
    console = Console(stderr=as_json, highlight=False)
    with console.status("starting …") as status:
        from draftwise.cli.generate_run import compare_prompts, run_prompts
        from draftwise.llm import LLM

        llm = LLM(
            models.target,
            speculation,
            dtype,
            device,
            batch_size,
            max_model_len,
            trust_remote_code=trust_remote_code,
            overlap=overlap,
            draft_replicas=draft_replicas,
            on_status=lambda operation: status.update(f"{operation} …"),
        )
    set_chat_template(llm, template)
    if models.draft_is_missing and policy is None:
        typer.echo(
            "no draft: decoding without speculation; name a draft with --draft DRAFT",
            err=True,
        )
    inputs: list[Prompt] = [[{"role": "user", "content": text}] if chat else text for text in texts]
    rename = partial(name_flags, context.command)
    try:
        if compare:
            generated = compare_prompts(console, llm, inputs, params, batch_size, rename)
        else:
            generated = run_prompts(console, llm, inputs, params, rename)
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
