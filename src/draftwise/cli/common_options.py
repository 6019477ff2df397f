"""Options shared by several commands, each with one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SAMPLING, MODELS, RUNNING, SPECULATION = "Sampling", "Models", "Running", "Speculation"
TARGET_HELP = (
    "Folder, hub id, GGUF file or zoo:NAME; the suffix :int8 or :int4 quantises the weights, which "
    "changes the target's distribution."
)
DRAFT_HELP = (
    "Draft model; suffix to draft from the text itself; suffix,MODEL for both; none for no draft."
)
COMPANION_HELP = "Model that scores drafted tokens; draft:int8 is the quantised draft."

Temperature = Annotated[
    float, typer.Option(help="0 for greedy decoding.", rich_help_panel=SAMPLING)
]
TopP = Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="1 disables the filter.")]
TopK = Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="0 disables the filter.")]
MinP = Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 disables the filter.")]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=RUNNING)
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=RUNNING)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of tokens of a prompt and its output together.",
        rich_help_panel=RUNNING,
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
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow models to run code from their repositories.",
        rich_help_panel=RUNNING,
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Draft for one half of the batch while the target verifies the other half.",
        show_default="decided by --latency-profile",
        rich_help_panel=RUNNING,
    ),
]
DraftReplicas = Annotated[
    int,
    typer.Option(
        help="Number of processes that draft, each for its share of the batch.",
        rich_help_panel=RUNNING,
    ),
]
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
Companion = Annotated[
    str | None,
    typer.Option(
        help=COMPANION_HELP,
        rich_help_panel=MODELS,
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Decides how many tokens to draft and to verify; see `draftwise policies`.",
        show_default="sv with a companion, adaptive without",
        rich_help_panel=SPECULATION,
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="An option of the policy; may be repeated.",
        metavar="KEY=VALUE",
        rich_help_panel=SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    int,
    typer.Option(help="Maximum number of tokens drafted per step.", rich_help_panel=SPECULATION),
]
TreeWidth = Annotated[
    int,
    typer.Option(
        help="Maximum number of alternatives for each drafted token; with more than 1, drafts are "
        "token trees.",
        rich_help_panel=SPECULATION,
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        help="All settings of speculation as one JSON object, which may have the keys of vLLM's "
        "option of this name; in place of --draft and the other options.",
        metavar="JSON",
        rich_help_panel=SPECULATION,
    ),
]
Verification = Annotated[
    str,
    typer.Option(
        help="block or token; block accepts more, and both are lossless.",
        rich_help_panel=SPECULATION,
    ),
]
Guard = Annotated[
    bool,
    typer.Option(
        "--guard/--no-guard",
        help="Shorten drafts so that they cost at most one step, and one per cent of the time.",
        rich_help_panel=SPECULATION,
    ),
]
Lenience = Annotated[
    str,
    typer.Option(
        help="Values below 1 accept more tokens; the output is then not lossless. "
        "0:1.0,16:0.8 is 0.8 while 16 or more requests wait.",
        rich_help_panel=SPECULATION,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Jinja chat template.",
        show_default="the tokenizer's template",
    ),
]
Corpus = Annotated[
    list[str] | None,
    typer.Option(
        help="Texts that suffix drafts may continue, beside the request's own: a file of JSON "
        "lines or text, or a folder; may be repeated.",
        metavar="PATH",
        rich_help_panel=SPECULATION,
    ),
]
RememberOutputs = Annotated[
    bool,
    typer.Option(
        "--remember-outputs",
        help="Suffix drafts may continue earlier outputs of the same API key.",
        rich_help_panel=SPECULATION,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Acceptance profile of these models, written by `draftwise profile`.",
        metavar="FILE",
        rich_help_panel=SPECULATION,
    ),
]
LatencyProfile = Annotated[
    str | None,
    typer.Option(
        help="Latency profile of these models, written by `draftwise profile-latency`; without "
        "it, latencies are measured for a few seconds at load time.",
        metavar="FILE",
        rich_help_panel=SPECULATION,
    ),
]
