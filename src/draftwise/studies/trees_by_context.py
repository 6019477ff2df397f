"""Speed of token trees as a function of the context length: EAGLE-2's rule, with and without SVIP.

Recomputes SVIP's result on EAGLE-2's trees (Zhang et al. 2024: contexts of 128 to 4K tokens). The
source found that its rule also makes EAGLE-2 faster. It gives no rule for trees, so ``svip-tree``
is this project's. The draft is that of the settings: a head, such as ``zoo:eagle3@200m``, or a
draft model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwise.studies.contexts import contexts_left_out, draw_contexts, measure_contexts
from draftwise.studies.drawing import styled
from draftwise.studies.study import SVIP, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NODES = 16
_TREE = f"{_NODES}x4"
_CHAIN = "adaptive:5"
_EAGLE2, _SVIP = f"eagle2:{_TREE}", f"svip-tree:{_TREE}"
_NAMES = (_CHAIN, _EAGLE2, _SVIP)
# The order of a tree's nodes is learnt.
_WARM_UP_STEPS = 30


class TreesByContext(Study):
    """Speed by context length for chains, EAGLE-2's trees, and SVIP on them."""

    name = "trees-by-context"
    title = "Speed of token trees by context length"
    source = SVIP
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure one request at a time at each context length."""
        return measure_contexts(bench, _NAMES, _NODES, _WARM_UP_STEPS)

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw speed over context length."""
        return draw_contexts(data, _NAMES)

    def describe(self, data: Data) -> Description:
        """Compare SVIP's trees with EAGLE-2's at each context."""
        rows = data["contexts"]
        said = "; ".join(
            f"{length} tokens: " + ", ".join(f"{name} {own[name]['ratio']:.2f}" for name in _NAMES)
            for length, own in rows.items()
        )
        text = f"Tokens per second relative to target-only decoding, one request. {said}."

        def compared(name: str, against: str) -> list[float]:
            return [own[name]["ratio"] / own[against]["ratio"] for own in rows.values()]

        def shown(values: list[float]) -> str:
            return ", ".join(
                f"{value:.2f} at {length}" for value, length in zip(values, rows, strict=True)
            )

        gains = compared(_SVIP, _EAGLE2)
        best = [
            max(own[name]["ratio"] for name in (_EAGLE2, _SVIP)) / own[_CHAIN]["ratio"]
            for own in rows.values()
        ]
        return Description(
            text + contexts_left_out(data),
            [
                Finding.of(
                    "SVIP makes EAGLE-2 faster.", shown(gains), [gain > 1.0 for gain in gains]
                ),
                Finding.of(
                    "Trees are faster than chains.",
                    f"the best tree, chosen in hindsight, relative to priced chains: {shown(best)}",
                    [gain > 1.0 for gain in best],
                ),
            ],
        )
