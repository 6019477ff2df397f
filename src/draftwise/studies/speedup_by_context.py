"""Speed as a function of the context length, for fixed lengths, the heuristic and SVIP.

Recomputes SVIP's speed in long generations (Zhang et al. 2024: MT-Bench, contexts of 128 to 8K
tokens). The abstract reports a speed-up of up to 17 % over fixed draft lengths at a context of 8K.
The source found that the advantage of SVIP grows with the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwise.studies.contexts import contexts_left_out, draw_contexts, measure_contexts
from draftwise.studies.drawing import styled
from draftwise.studies.study import SVIP, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIXED = tuple(f"fixed:{length}" for length in (2, 3, 4, 5))
_MAX_LENGTH = 10
_OTHERS = (f"heuristic:{_MAX_LENGTH}", f"svip:{_MAX_LENGTH}")
_WARM_UP_STEPS = 5


class SpeedupByContext(Study):
    """Speed by context length for fixed lengths 2 to 5, the heuristic and SVIP."""

    name = "speedup-by-context"
    title = "Speed by context length"
    source = SVIP
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure one request at a time at each context length."""
        return measure_contexts(bench, [*_FIXED, *_OTHERS], _MAX_LENGTH, _WARM_UP_STEPS)

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw speed over context length."""
        return draw_contexts(data, [*_FIXED, *_OTHERS])

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
        average = sum(leads.values()) / len(leads)
        return Description(
            text + contexts_left_out(data),
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
