"""Speed as a function of the context length, for fixed lengths, the heuristic and SVIP.

Recomputes SVIP's speed in long generations (Zhang et al. 2024: MT-Bench, contexts of 128 to 8K
tokens). The abstract reports a speed-up of up to 17 % over fixed draft lengths at a context of 8K.
The source found that the advantage of SVIP grows with the context.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftwise.benchmark.style import legend_below, look
from draftwise.benchmark.sustained import begin, compete, summary
from draftwise.errors import InvalidParameterError
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SVIP, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIXED = tuple(f"fixed:{length}" for length in (2, 3, 4, 5))
_MAX_LENGTH = 10
_POLICIES = (*_FIXED, f"heuristic:{_MAX_LENGTH}", f"svip:{_MAX_LENGTH}")
_NUM_PROMPTS = 4
# Untimed steps of each policy at each length.
_WARM_UP_STEPS = 5


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


class SpeedupByContext(Study):
    """Speed by context length for fixed lengths 2 to 5, the heuristic and SVIP."""

    name = "speedup-by-context"
    title = "Speed by context length"
    source = SVIP
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure one request at a time at each context length.

        Contexts that do not fit the target are replaced by the longest one that does.

        Raises:
            InvalidParameterError: the target's context has no room for a prompt.
        """
        s = bench.settings
        contenders = bench.contenders(["none", *_POLICIES], with_profile=False)
        limit = bench.large.target.max_model_len
        longest = longest_prompt(limit, s.max_tokens + _MAX_LENGTH)
        figures = {}
        for length in sorted({min(length, longest) for length in s.contexts}):
            bench.status(f"context {length}")
            prompts = bench.prompts_of_length(length, _NUM_PROMPTS)
            params = replace(bench.sampling, max_tokens=s.max_tokens)
            begin(contenders, prompts, params, 1)
            compete(contenders, s.rounds, s.turn, _WARM_UP_STEPS, _WARM_UP_STEPS)
            figures[str(length)] = summary(contenders)
        return {"contexts": figures, "limit": limit, "wanted": list(s.contexts)}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw speed over context length, one line per policy."""
        figure, (axes,) = panels(1, width=5.6, height=3.6)
        lengths = [int(length) for length in data["contexts"]]
        for number, name in enumerate(_POLICIES):
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

    def describe(self, data: Data) -> Description:
        """Compare SVIP with the best fixed length at each context."""
        rows = data["contexts"]
        svip = f"svip:{_MAX_LENGTH}"
        leads = {}
        for length, own in rows.items():
            best = max(_FIXED, key=lambda name: own[name]["ratio"])
            leads[length] = own[svip]["ratio"] / own[best]["ratio"]
        first, last = next(iter(leads)), list(leads)[-1]
        said = ", ".join(f"{lead:.2f} at {length}" for length, lead in leads.items())
        text = (
            f"SVIP's speed relative to the best of the fixed lengths 2 to 5, chosen in hindsight: "
            f"{said}. At the longest context, the best fixed length has "
            f"{max(rows[last][name]['ratio'] for name in _FIXED):.2f} times the speed of "
            f"target-only decoding, and SVIP has {rows[last][svip]['ratio']:.2f} times."
        )
        beyond = [length for length in data["wanted"] if length > int(last)]
        if beyond:
            text += (
                f" Contexts of {', '.join(map(str, beyond))} tokens leave no room for an answer "
                f"within the target's {data['limit']}."
            )
        average = sum(leads.values()) / len(leads)
        return Description(
            text,
            [
                Finding.of(
                    "SVIP is faster than any fixed length.",
                    f"{average:.2f} times the best fixed length on average",
                    [lead > 1.0 for lead in leads.values()],
                ),
                Finding.of(
                    "SVIP's advantage grows with the context.",
                    f"{leads[first]:.2f} at {first} tokens, {leads[last]:.2f} at {last}",
                    leads[last] > leads[first],
                ),
            ],
        )
