"""Speed of one request as a function of the context length, for studies that compare policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftwise.benchmark.style import legend_below, look
from draftwise.errors import InvalidParameterError
from draftwise.studies.drawing import panels
from draftwise.studies.study import Data
from draftwise.studies.sustained import begin, compete, summary
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PROMPTS = 4


def measure_contexts(
    bench: Workbench, names: Sequence[str], longest_draft: int, warm_up_steps: int
) -> dict[str, Any]:
    """Measure one request at a time at each context length of the settings.

    Contexts that do not fit the target are replaced by the longest one that does.

    Args:
        bench: models and prompts.
        names: policies; see :meth:`Workbench.contenders`.
        longest_draft: maximum number of tokens that a step adds to a context.
        warm_up_steps: untimed steps of each policy at each length.

    Raises:
        InvalidParameterError: the target's context has no room for a prompt.
    """
    s = bench.settings
    contenders = bench.contenders(["none", *names], with_profile=False)
    limit = bench.large.target.max_model_len
    longest = longest_prompt(limit, s.max_tokens + longest_draft)
    figures = {}
    for length in sorted({min(length, longest) for length in s.contexts}):
        bench.status(f"context {length}")
        prompts = bench.prompts_of_length(length, _PROMPTS)
        params = replace(bench.sampling, max_tokens=s.max_tokens)
        begin(contenders, prompts, params, 1)
        compete(contenders, s.rounds, s.turn, warm_up_steps, warm_up_steps)
        figures[str(length)] = summary(contenders)
    return {"contexts": figures, "limit": limit, "wanted": list(s.contexts)}


def longest_prompt(limit: int, room: int) -> int:
    """Maximum number of prompt tokens that leaves room for an answer.

    Args:
        limit: maximum number of tokens of a prompt and its answer together.
        room: number of tokens that the answer may have, and of a last draft.

    Raises:
        InvalidParameterError: there is no room for a prompt.
    """
    if limit <= room:
        raise InvalidParameterError(
            "max_model_len", f"must be above {room}, which answers need; got {limit}"
        )
    return limit - room


def draw_contexts(data: Data, names: Sequence[str]) -> Figure:
    """Draw speed over context length, one line per policy."""
    figure, (axes,) = panels(1, width=5.6, height=3.6)
    lengths = [int(length) for length in data["contexts"]]
    for number, name in enumerate(names):
        own = [each[name] for each in data["contexts"].values()]
        axes.errorbar(
            lengths,
            [each["ratio"] for each in own],
            [each["standard_error"] for each in own],
            label=name,
            capsize=2,
            **look(number),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens per second, × target only")
    axes.set_ylim(bottom=0)
    legend_below(figure, axes, 3)
    return figure


def contexts_left_out(data: Data) -> str:
    """A sentence on the contexts that the target does not support; empty if there are none."""
    last = int(list(data["contexts"])[-1])
    beyond = [length for length in data["wanted"] if length > last]
    if not beyond:
        return ""
    return (
        f" Contexts of {', '.join(map(str, beyond))} tokens leave no room for an answer within the "
        f"target's {data['limit']}."
    )
