"""``draftwise generate``: text for prompts, alone or side by side with target-only decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from draftwise.cli.options import (
    check_max_tokens,
    parse_lenience,
    parse_policy_options,
    read_chat_template,
    set_chat_template,
)
from draftwise.cli.shared import (
    DRAWING,
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
    MinP,
    NumSpeculativeTokens,
    Overlap,
    PolicyName,
    PolicyOption,
    Profile,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    Verification,
)
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.core.rejection import VerificationMethod
    from draftwise.llm import LLM
    from draftwise.params import SamplingParams
    from draftwise.prompts import Prompt
    from draftwise.structured_outputs import StructuredOutputs

_PROMPTS, _MODELS = "Prompts", "Models"
_SHOWING = "Output"


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
        typer.Option(help="Take only the first ones of the file.", min=1, rich_help_panel=_PROMPTS),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Send prompts through the target's chat template.",
            rich_help_panel=_PROMPTS,
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    target: Annotated[
        str,
        typer.Option(help=TARGET_HELP, rich_help_panel=_MODELS),
    ] = "zoo:target",
    draft: Annotated[
        str,
        typer.Option(help="The model that writes ahead.", rich_help_panel=_MODELS),
    ] = "zoo:draft",
    companion: Companion = None,
    policy: PolicyName = None,
    policy_option: PolicyOption = None,
    num_speculative_tokens: NumSpeculativeTokens = 5,
    verification: Verification = "block",
    lenience: Lenience = "1.0",
    profile: Profile = None,
    latency_profile: LatencyProfile = None,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens to generate.", rich_help_panel=DRAWING)
    ] = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the first prompt; each next one adds 1.", rich_help_panel=DRAWING),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="Every text is JSON that the schema in this file describes.",
            metavar="FILE",
            rich_help_panel=DRAWING,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Prompts that run at once.", rich_help_panel=RUNNING)
    ] = 8,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
    overlap: Overlap = None,
    draft_replicas: DraftReplicas = 1,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run target-only and speculative decoding side by side.",
            rich_help_panel=_SHOWING,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_SHOWING)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: the target's log-probability of every token, and of so many "
            "likeliest ones at its place.",
            rich_help_panel=_SHOWING,
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
    from draftwise.params import SamplingParams, SpeculationConfig

    texts = _read_prompts(prompt, prompts, num_prompts)
    if logprobs is not None and not as_json:
        raise InvalidParameterError("logprobs", "are shown with --json only")
    if chat_template is not None and not chat:
        raise InvalidParameterError("chat_template", "is for chats: add --chat")
    template = read_chat_template(chat_template)
    params = SamplingParams(
        max_tokens=check_max_tokens(max_tokens),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        logprobs=logprobs,
        structured_outputs=None if json_schema is None else _read_schema(json_schema),
    )
    speculation = SpeculationConfig(
        draft=draft,
        companion=companion,
        policy=policy,
        policy_options=parse_policy_options(policy_option or ()),
        profile=profile,
        latency_profile=latency_profile,
        num_speculative_tokens=num_speculative_tokens,
        lenience=parse_lenience(lenience),
        verification=cast("VerificationMethod", verification),
    )
    console = Console(stderr=as_json, highlight=False)
    with console.status("starting …") as status:
        from draftwise.llm import LLM

        llm = LLM(
            target,
            speculation,
            dtype,
            device,
            batch_size,
            max_model_len,
            trust_remote_code=trust_remote_code,
            overlap=overlap,
            draft_replicas=draft_replicas,
            on_status=lambda what: status.update(f"{what} …"),
        )
    set_chat_template(llm, template)
    inputs: list[Prompt] = [[{"role": "user", "content": text}] if chat else text for text in texts]
    try:
        result = _run(console, llm, inputs, params, batch_size, compare)
    finally:
        llm.close()
    if as_json:
        result["warnings"] = context.obj
        typer.echo(json.dumps(result, ensure_ascii=False))
    if any(output["error"] for output in result["outputs"]):
        raise typer.Exit(2)


def _read_prompts(prompt: str | None, file: Path | None, num_prompts: int | None) -> list[str]:
    from draftwise.prompts import load_prompts

    if (prompt is None) == (file is None):
        raise InvalidParameterError("prompt", "give either a prompt or --prompts FILE")
    if file is not None:
        return load_prompts(file, num_prompts)
    return [prompt or ""]


def _read_schema(file: Path) -> StructuredOutputs:
    from draftwise.structured_outputs import StructuredOutputs

    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidParameterError(
            "json_schema", f"cannot read {str(file)!r} as JSON: {error}"
        ) from error
    return StructuredOutputs(json_schema=schema)


def _run(
    console: Console,
    llm: LLM,
    prompts: list[Prompt],
    params: SamplingParams,
    batch_size: int,
    side_by_side: bool,
) -> dict[str, Any]:
    from draftwise.benchmark.measure import compare, timed_generate, with_seeds
    from draftwise.cli.render import (
        describe,
        live_text,
        progress,
        show_comparison,
        show_outputs,
        show_summary,
    )

    each = with_seeds(params, len(prompts))
    if side_by_side:
        with progress(console, "comparing", 2 * len(prompts)) as on_step:
            comparison = compare(llm, prompts, each, batch_size, on_step)
        show_outputs(console, comparison.speculative)
        show_comparison(console, llm, comparison, batch_size)
        return describe(llm, comparison.speculative, comparison)
    if len(prompts) == 1 and console.is_terminal:
        run = timed_generate(llm, prompts, each, live_text(console))
        console.print()
    else:
        with progress(console, "generating", len(prompts)) as on_step:
            run = timed_generate(llm, prompts, each, on_step)
        show_outputs(console, run)
    show_summary(console, llm, run)
    return describe(llm, run)
