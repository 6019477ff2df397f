"""Published selection rules bias the output. Their lossless versions do not.

In the three models the next token depends on the last token only. The distribution of an output is
therefore a product of three rows of a table.
"""

import pytest
import torch

from draftwise import SamplingParams
from draftwise.core.stage_cost import StageCost
from draftwise.policies import POLICIES
from draftwise.policies.step_times import SCORED

from ..core.statistics_tools import Tree, chi_square_p_value, sequence_counts
from ..stand_ins import FixedLatency, vary_choices
from ..tiny_models import bigram_model, save
from .assembly import assemble

pytestmark = pytest.mark.slow

NUM_REQUESTS = 4000
NOT_UNLIKELY = 1e-4
IMPOSSIBLE = 1e-6
VOCAB, FIRST = 4, 0

# One row per last token. The draft is more certain than the target.
TARGET = torch.tensor(
    [
        [0.45, 0.30, 0.15, 0.10],
        [0.20, 0.40, 0.25, 0.15],
        [0.30, 0.20, 0.30, 0.20],
        [0.10, 0.25, 0.25, 0.40],
    ]
)
DRAFT = torch.tensor(
    [
        [0.60, 0.25, 0.05, 0.10],
        [0.10, 0.60, 0.25, 0.05],
        [0.50, 0.05, 0.35, 0.10],
        [0.05, 0.15, 0.20, 0.60],
    ]
)
COMPANION = torch.tensor(
    [
        [0.50, 0.25, 0.15, 0.10],
        [0.15, 0.50, 0.25, 0.10],
        [0.30, 0.20, 0.35, 0.15],
        [0.10, 0.20, 0.20, 0.50],
    ]
)

# The published rule, its lossless version, and the options of both.
RULES = [
    ("tetris-published", "tetris", {}),
    ("sv-published", "sv", {}),
    ("sv-published", "sv-predictable", {}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bigram")
    tables = {"target": TARGET, "draft": DRAFT, "companion": COMPANION}
    return [save(bigram_model(table.log()), root / name) for name, table in tables.items()]


@pytest.fixture(autouse=True)
def expensive_tokens(monkeypatch):
    """Each verified token costs the same, so it is too expensive to verify unlikely tokens."""
    steep = FixedLatency(StageCost((1, 4096), (0.003, 0.700)), StageCost((1,), (1e-4,)))
    monkeypatch.setitem(assemble.__globals__, "fixed_latency", lambda: steep)
    vary_choices(monkeypatch, [SCORED + 2], [0.72])


def expected():
    """``[64]`` the distribution of the three tokens after :data:`FIRST`."""
    p = TARGET.double()
    p = p / p.sum(dim=1, keepdim=True)
    return Tree((p[FIRST : FIRST + 1], p, p.repeat(VOCAB, 1))).joint()


def p_value(folders, policy, method, options):
    engine = assemble(
        *folders,
        max_batch_size=64,
        policy=policy,
        num_speculative_tokens=2,
        verification=method,
        policy_options=options,
    )
    requests = [
        engine.add(None, [FIRST], SamplingParams(max_tokens=4, seed=seed))
        for seed in range(NUM_REQUESTS)
    ]
    while engine.num_unfinished:
        engine.step()
    outputs = [request.output() for request in requests]
    lossless = POLICIES[policy].lossless
    assert {output.speculation.lossless for output in outputs} == {lossless}
    drafted = sum(output.speculation.num_drafted for output in outputs)
    verified = sum(output.speculation.num_verified for output in outputs)
    # Some tokens are dropped, but not all.
    assert 0.2 * drafted < verified < 0.95 * drafted
    said = torch.tensor([output.token_ids[:3] for output in outputs])
    return chi_square_p_value(sequence_counts(said, VOCAB), expected())


@pytest.mark.covering("lossless", "method")
@pytest.mark.parametrize("method", ["block", "token"])
@pytest.mark.parametrize(("published", "lossless", "options"), RULES)
def test_published_rules_are_biased_and_lossless_rules_are_not(
    folders, published, lossless, options, method
):
    assert p_value(folders, published, method, options) < IMPOSSIBLE
    assert p_value(folders, lossless, method, options) > NOT_UNLIKELY
