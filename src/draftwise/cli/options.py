"""Options of commands: those of the dataclasses that they fill, and others that several share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwise.cli.fields import Group, Own
from draftwise.cli.option_values import (
    check_max_tokens,
    parse_lenience,
    parse_policy_options,
    read_schema,
)
from draftwise.params import SamplingParams
from draftwise.serving.settings import EngineSettings, ServerSettings
from draftwise.speculation import SpeculationConfig

SAMPLING, MODELS, RUNNING, SPECULATION = "Sampling", "Models", "Running", "Speculation"
# The last is that of options without a panel.
CLIENTS, OPTIONS = "Clients", "Options"
TARGET_HELP = (
    "Folder, hub id, GGUF file or zoo:NAME; the suffix :int8 or :int4 quantises the weights, which "
    "changes the target's distribution."
)
DRAFT_HELP = (
    "Draft model; suffix to draft from the text itself; mtp for a layer of the target; "
    "suffix,MODEL for both; none for no draft."
)
COMPANION_HELP = "Model that scores drafted tokens; draft:int8 is the quantised draft."

SPECULATION_OPTIONS = Group(
    SpeculationConfig,
    SPECULATION,
    {
        "companion": Own(COMPANION_HELP, panel=MODELS),
        "policy": Own(
            "Decides how many tokens to draft and to verify; see `draftwise policies`.",
        ),
        "policy_options": Own(
            "An option of the policy; may be repeated.",
            "--policy-option",
            list[str],
            parse_policy_options,
            metavar="KEY=VALUE",
        ),
        "num_speculative_tokens": Own(),
        "tree_width": Own(),
        "verification": Own(kind=str),
        "proposals": Own(kind=str),
        "guard": Own(),
        "lenience": Own(
            "Values below 1 accept more tokens; the output is then not lossless. "
            "0:1.0,16:0.8 is 0.8 while 16 or more requests wait.",
            kind=str,
            parse=parse_lenience,
        ),
        "profile": Own(metavar="FILE"),
        "latency_profile": Own(metavar="FILE"),
        "corpus": Own(kind=list[str], metavar="PATH"),
        "remember_outputs": Own(),
    },
    {"lenience": "1.0"},
)
SAMPLING_OPTIONS = Group(
    SamplingParams,
    SAMPLING,
    {
        "max_tokens": Own("Maximum number of generated tokens.", parse=check_max_tokens),
        "temperature": Own(),
        "top_p": Own(),
        "top_k": Own(),
        "min_p": Own(),
        "seed": Own("Seed of the first prompt; it increases by 1 for each further prompt."),
        "structured_outputs": Own(
            "File with a JSON schema that every text must match.",
            "--json-schema",
            Path,
            read_schema,
            metavar="FILE",
        ),
        "logprobs": Own(),
    },
)
ENGINE_OPTIONS = Group(
    EngineSettings,
    RUNNING,
    {
        "max_batch_size": Own(),
        "max_chunk_tokens": Own(),
        "cache_gib": Own(),
        "enable_prefix_caching": Own(),
        "dtype": Own(),
        "device": Own(),
        "max_model_len": Own(),
        "trust_remote_code": Own(),
        "overlap": Own(),
        "draft_replicas": Own(),
        "num_threads": Own(flag="--threads", min=1),
    },
)
# What a model is loaded with by every command.
LOADING_OPTIONS = ENGINE_OPTIONS.only("dtype", "device", "max_model_len", "trust_remote_code")
SERVER_OPTIONS = Group(
    ServerSettings,
    CLIENTS,
    {
        "api_keys": Own(flag="--api-key", kind=list[str], envvar="DRAFTWISE_API_KEY"),
        "served_model_name": Own(show_default="TARGET"),
        "max_queue": Own(),
        "max_prompt_tokens": Own(),
        "max_body_bytes": Own(),
        "request_timeout": Own(),
        "tool_call_parser": Own(),
        "per_request_spec_decode_metrics": Own(metavar="LEVEL"),
        "allowed_origins": Own(kind=list[str], metavar="ORIGIN"),
        "drain_timeout": Own(),
        "step_timeout": Own(panel=RUNNING),
    },
)

Target = Annotated[
    str | None,
    typer.Option(help=TARGET_HELP, show_default="zoo:target", rich_help_panel=MODELS),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help=DRAFT_HELP,
        show_default="zoo:draft with a target of the zoo, otherwise none",
        rich_help_panel=MODELS,
    ),
]
# The draft of commands without a default target.
OwnDraft = Annotated[
    str | None, typer.Option(help=DRAFT_HELP, show_default="none", rich_help_panel=MODELS)
]
Companion = Annotated[str | None, typer.Option(help=COMPANION_HELP, rich_help_panel=MODELS)]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        help="All settings of speculation as one JSON object, which may have the keys of vLLM's "
        "option of this name; in place of --draft and the other options.",
        metavar="JSON",
        rich_help_panel=SPECULATION,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Jinja chat template.", show_default="the tokenizer's template"
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Say on stderr what each model is, and at which tokens its texts end.",
        rich_help_panel=RUNNING,
    ),
]
