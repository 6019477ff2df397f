"""Options that several commands have, each with its one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DRAWING, MODELS, RUNNING, SPECULATION = "Sampling", "Models", "Running", "Speculation"
TARGET_HELP = "Folder, hub id or zoo:NAME; :int8 behind it for weights of 8 bits."

Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=DRAWING)]
TopP = Annotated[float, typer.Option(rich_help_panel=DRAWING, help="1 is off.")]
TopK = Annotated[int, typer.Option(rich_help_panel=DRAWING, help="0 is off.")]
MinP = Annotated[float, typer.Option(rich_help_panel=DRAWING, help="0 is off.")]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=RUNNING)
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=RUNNING)]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt and output together.", rich_help_panel=RUNNING)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that comes with a model.",
        rich_help_panel=RUNNING,
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Draft for one half of the batch while the target verifies the other.",
        show_default="where --latency-profile says that it pays",
        rich_help_panel=RUNNING,
    ),
]
DraftReplicas = Annotated[
    int,
    typer.Option(
        help="Processes that draft, each for its share of the batch.",
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
        help="The model that writes ahead; none for none.",
        show_default="zoo:draft with a target of the zoo, otherwise none",
        rich_help_panel=MODELS,
    ),
]
Companion = Annotated[
    str | None,
    typer.Option(
        help="A model that judges the draft; draft:int8 is the draft quantised.",
        rich_help_panel=MODELS,
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="When to draft, what to verify: see `draftwise policies`.",
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
    int, typer.Option(help="Most tokens drafted per step.", rich_help_panel=SPECULATION)
]
Verification = Annotated[
    str,
    typer.Option(
        help="block accepts more than token; both are lossless.", rich_help_panel=SPECULATION
    ),
]
Lenience = Annotated[
    str,
    typer.Option(
        help="Below 1 accepts more than the target would: faster, not lossless. "
        "0:1.0,16:0.8 is 0.8 while 16 or more requests wait.",
        rich_help_panel=SPECULATION,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A Jinja template for chats.",
        show_default="the tokenizer's own",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="What `draftwise profile` learnt of these models.",
        metavar="FILE",
        rich_help_panel=SPECULATION,
    ),
]
LatencyProfile = Annotated[
    str | None,
    typer.Option(
        help="What `draftwise profile-latency` measured; without it seconds are spent on "
        "measuring at load.",
        metavar="FILE",
        rich_help_panel=SPECULATION,
    ),
]
