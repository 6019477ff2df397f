"""Passes are timed as they run with an exit: the target continues from what the draft left."""

import pytest

from draftwise import LLM
from draftwise.engine.assembly import Models
from draftwise.profiling.latency import measure_latency
from draftwise.profiling.passes import PassShape, PassTimer, Stage

from ..engine.exits import DEEPER, DRAFT, TARGET, recorded_passes
from ..stand_ins import unguarded


@pytest.fixture(scope="module")
def exits(models):
    speculation = unguarded(DRAFT, companion=DEEPER, policy="staged")
    llm = LLM(models.folder(TARGET), speculation, dtype="float32")
    return Models(llm.target, llm.draft, llm.companion)


@pytest.mark.parametrize(
    ("stage", "shape", "passes"),
    [
        # Three requests verify three tokens each. The last of each was not read.
        (Stage.TARGET, PassShape(3, 12, 10), [((0, 2), 3), ((2, 4), 12)]),
        # Nothing was drafted: one whole pass, which is no pass over a part.
        (Stage.TARGET, PassShape(3, 3, 10), []),
        # The newest token of each request and all drafted tokens but the last.
        (Stage.COMPANION, PassShape(3, 9, 10), [((2, 3), 9)]),
    ],
)
def test_passes_continue_from_the_draft(exits, stage, shape, passes, monkeypatch):
    timer = PassTimer(exits, 4, 20, 4)
    assert timer.stages == tuple(Stage)
    with recorded_passes(monkeypatch) as seen:
        assert timer(stage, shape) > 0
    assert seen == passes


def test_all_stages_have_a_cost(exits):
    latency = measure_latency(exits, 4, 3)
    assert latency.target_seconds(4) > 0
    assert latency.draft_seconds(2) > 0
    assert latency.companion_seconds(2) > 0
