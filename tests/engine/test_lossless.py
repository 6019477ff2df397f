"""With every proposer and policy, the engine's texts have exactly the target's distribution.

The joint distribution of the first tokens is computed without the engine. It is compared with the
outputs of thousands of requests that join and leave one engine.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from draftwise import SamplingParams
from draftwise.core.rejection import accept as right_accept
from draftwise.core.rejection import sample
from draftwise.engine import acceptance
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.native import NativeBackend
from draftwise.engine.parallel.pinned_threads import shares
from draftwise.engine.proposers.model import ModelProposer
from draftwise.kernels.native import compilation, library
from draftwise.kernels.native.library import kernel_in_use
from draftwise.outputs import TokenSource
from draftwise.policies import POLICIES, Signal

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..levels import exhaustive_unless
from ..stand_ins import SOURCES_WITH_A_MODEL
from ..tiny_models import Recipe
from .assembly import assemble_recipe
from .exact import exact_distribution

pytestmark = pytest.mark.slow

# A quarter has each setting. A relative deviation of 19% (root mean square over the likely texts)
# gives a p-value below NOT_UNLIKELY with a probability of 0.9.
NUM_REQUESTS = 16_000
# For each verification method, for policies other than the fixed length: a deviation of 26% is
# found. Enough to detect wrong rules, as tests below show.
NUM_REQUESTS_OF_EACH_POLICY = 6_000
NOT_UNLIKELY = 1e-4
IMPOSSIBLE = 1e-6

PLAIN = SamplingParams()
COLD = SamplingParams(temperature=0.7, top_k=5)
HOT = SamplingParams(temperature=1.5, top_p=0.85, min_p=0.05)
PENALISED = SamplingParams(
    top_k=7,
    top_p=0.97,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias={1: 1.0, 3: -0.7},
)
# Each setting has a prompt of its own length. All settings share every batch.
SETTINGS = (([1, 2, 3], PLAIN), ([3, 0, 2, 2, 1], COLD), ([1], HOT), ([0, 3], PENALISED))

# With the default options this policy would never stop a draft of these tiny models.
LIVELY_OPTIONS = {"disco": {"threshold": 0.75}}


@dataclass(frozen=True)
class Case:
    """Speculation settings, the vocabulary size, and the number of tokens to compare."""

    policy: str
    verification: str
    num_speculative_tokens: int
    vocab: int = 8
    num_tokens: int = 4
    num_requests: int = NUM_REQUESTS
    lenience: float = 1.0
    draft_noise: float = 0.1
    overlaps: bool = False
    settings: tuple = SETTINGS

    def __str__(self):
        name = f"{self.policy}-{self.verification}-{self.num_speculative_tokens}-{self.vocab}"
        return f"{name}-overlapped" if self.overlaps else name

    @property
    def recipe(self):
        return Recipe(vocab=self.vocab, seed=3, config={"num_hidden_layers": 1})

    def engine(self, models, max_batch_size=512):
        return assemble_recipe(
            models,
            self.recipe,
            max_batch_size,
            self.draft_noise,
            policy=self.policy,
            policy_options=LIVELY_OPTIONS.get(self.policy, {}),
            num_speculative_tokens=self.num_speculative_tokens,
            verification=self.verification,
            lenience=self.lenience,
            overlaps=self.overlaps,
        )

    def requests(self, engine, num_requests):
        """Requests with all settings in turn. Some are longer than the compared prefix."""
        longer = itertools.cycle([0, 0, 0, 0, 1, 1, 1, 2, 3])
        requests = []
        for seed, (prompt, params) in zip(
            range(num_requests), itertools.cycle(self.settings), strict=False
        ):
            params = replace(params, max_tokens=self.num_tokens + next(longer), seed=seed)
            requests.append(engine.add(None, prompt, params))
        return requests

    def sampled(self, models, num_requests=None, max_batch_size=512):
        """``[settings, requests, num_tokens]`` first tokens, and the requests."""
        return self.said_by(self.engine(models, max_batch_size), num_requests)

    def said_by(self, engine, num_requests=None):
        """``[settings, requests, num_tokens]`` first tokens of an engine, and the requests."""
        requests = self.requests(engine, num_requests or self.num_requests)
        while engine.num_unfinished:
            engine.step()
        first = [r.output().token_ids[: self.num_tokens] for r in requests]
        tokens = torch.tensor(first).view(-1, len(self.settings), self.num_tokens)
        return tokens.transpose(0, 1), requests

    def p_values(self, models, tokens):
        """One for each setting that is sampled."""
        return self.p_values_of(models.reference(self.recipe), tokens)

    def p_values_of(self, reference, tokens):
        """The same for a target as ``transformers`` computes it."""
        for (prompt, params), said in zip(self.settings, tokens, strict=True):
            if params.temperature:
                expected = exact_distribution(reference, prompt, params, self.num_tokens).joint()
                yield chi_square_p_value(sequence_counts(said, self.vocab), expected)


# Of each kind of decision one policy: a fixed length, a stop while drafting, a price of drafts, a
# choice among drafted tokens, one with a companion, one in stages, and one that grows trees.
OF_EACH_KIND = ("fixed", "svip", "adaptive", "tetris", "sv", "staged", "eagle2")
LOSSLESS = [name for name, policy in POLICIES.items() if policy.lossless]
# Every lossless policy; the fixed length with every draft length, and once with 13,000 requests of
# every setting.
CASES = [
    Case("fixed", "token", 2),
    Case("fixed", "block", 3, num_requests=52_000),
    Case("fixed", "block", 1),
    Case("fixed", "token", 3, vocab=32, num_tokens=2),
    Case("fixed", "block", 4, vocab=4, num_tokens=6),
    Case("fixed", "token", 4, vocab=4, num_tokens=6),
]
CASES += [
    Case(name, method, gamma, num_requests=NUM_REQUESTS_OF_EACH_POLICY)
    for name in LOSSLESS
    if name != "fixed" and POLICIES[name].needs_draft
    for method, gamma in (("block", 3), ("token", 2))
]
CASES += [Case(name, "block", 0) for name in LOSSLESS if not POLICIES[name].needs_draft]
CASES_IN_HALVES = exhaustive_unless(
    lambda case: case.policy in ("adaptive", "sv"),
    [
        Case(name, "block", 3, num_requests=NUM_REQUESTS_OF_EACH_POLICY, overlaps=True)
        for name in ("fixed", "svip", "adaptive", "sv")
    ],
)
CASES_BY_POSITION = exhaustive_unless(
    lambda case: case.policy in ("fixed", "adaptive"),
    [
        Case(name, "block", 3, num_requests=NUM_REQUESTS_OF_EACH_POLICY)
        for name in LOSSLESS
        if POLICIES[name].needs_draft
    ],
)


@pytest.mark.covering("case.policy", "case.verification")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_texts_follow_the_target(models, case):
    assert_texts_follow_the_target(models, case)


@pytest.mark.skipif(shares() is None, reason="the machine has a single core")
@pytest.mark.parametrize("case", CASES_IN_HALVES, ids=str)
def test_texts_with_overlap_follow_the_target(models, case):
    """One half of the batch drafts while the target verifies the other half."""
    assert_texts_follow_the_target(models, case)


def assert_texts_follow_the_target(models, case):
    tokens, requests = case.sampled(models)
    sources = {source for r in requests[:1000] for source in r.output().token_sources}
    if POLICIES[case.policy].needs_draft:
        # Accepted, rejected and bonus tokens must all occur for the test to be meaningful.
        assert sources == SOURCES_WITH_A_MODEL
    else:
        assert sources == {TokenSource.TARGET}
    assert all(request.stats.lossless for request in requests)
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY


@pytest.mark.skipif(kernel_in_use() != "native", reason="no native kernels on this machine")
@pytest.mark.parametrize("case", CASES_BY_POSITION, ids=str)
def test_texts_drafted_position_by_position_follow_the_target(models, case, monkeypatch):
    """As with a model without kernels of its own."""
    drafts = count_drafts(monkeypatch, EagerBackend)
    monkeypatch.setattr(NativeBackend, "serves", lambda *_: False)
    tokens, _ = case.sampled(models)
    assert len(drafts) > 20
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY


@pytest.mark.skipif(kernel_in_use() != "native", reason="no native kernels on this machine")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_kernels_apply_penalties_like_pytorch(models, temperature, monkeypatch):
    assert_kernels_draft_like_pytorch(
        models, Case("svip", "block", 4, vocab=40), temperature, monkeypatch
    )


def assert_kernels_draft_like_pytorch(models, case, temperature, monkeypatch):
    """Both draft the same tokens from the same distributions, with bias and penalties."""
    recorded = []
    for serves in (NativeBackend.serves, lambda *_: False):
        engine = case.engine(models)
        with monkeypatch.context() as patch:
            drafts = count_drafts(patch, NativeBackend)
            patch.setattr(NativeBackend, "serves", serves)
            record = record_drafts(patch)
            for seed, (prompt, _) in enumerate(SETTINGS):
                params = replace(PENALISED, max_tokens=30, seed=seed, temperature=temperature)
                engine.add(None, prompt, params)
            while engine.num_unfinished:
                engine.step()
        recorded.append(record)
        assert bool(drafts) == (len(recorded) == 1)
    assert len(recorded[0]) == len(recorded[1]) > 10
    for native, eager in zip(*recorded, strict=True):
        assert native.lengths == eager.lengths
        for row, length in enumerate(native.lengths):
            assert torch.equal(native.tokens[row, :length], eager.tokens[row, :length])
            if temperature and length:
                torch.testing.assert_close(native.probs[row, :length], eager.probs[row, :length])


def count_drafts(monkeypatch, backend):
    """A list that grows with every step that a backend drafts."""
    begin, drafts = backend.begin, []

    def counted(*arguments):
        drafts.append(backend)
        return begin(*arguments)

    monkeypatch.setattr(backend, "begin", counted)
    return drafts


def record_drafts(monkeypatch):
    """Copies of all drafts of a draft model."""
    draft, record = ModelProposer.draft, []

    def recorded(*arguments):
        drafted = draft(*arguments)
        probs = None if drafted.probs is None else drafted.probs.clone()
        record.append(replace(drafted, tokens=drafted.tokens.clone(), probs=probs))
        return drafted

    monkeypatch.setattr(ModelProposer, "draft", recorded)
    return record


@pytest.fixture
def no_kernels(monkeypatch):
    """Disable the native kernels, as on a machine without a compiler."""
    monkeypatch.setenv(compilation.NATIVE_VARIABLE, "0")
    library._load.cache_clear()
    assert kernel_in_use() != "native"
    yield
    library._load.cache_clear()


@pytest.mark.parametrize(
    "case",
    [
        Case("fixed", "block", 3, num_requests=NUM_REQUESTS_OF_EACH_POLICY),
        Case("sv", "token", 2, num_requests=NUM_REQUESTS_OF_EACH_POLICY),
    ],
    ids=str,
)
def test_texts_without_native_kernels_follow_the_target(models, no_kernels, case):
    tokens, _ = case.sampled(models)
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY


@pytest.mark.covering("method", "max_batch_size")
@pytest.mark.parametrize(("max_batch_size", "num_requests"), [(1, 200), (3, 800), (16, 4000)])
@pytest.mark.parametrize("method", ["block", "token"])
def test_smaller_batches_give_the_same_texts(models, method, max_batch_size, num_requests):
    """Each request gives the same output as in the large batches of the test above."""
    assert_smaller_batches_give_the_same_texts(
        models, Case("fixed", method, 3), max_batch_size, num_requests
    )


def assert_smaller_batches_give_the_same_texts(models, case, max_batch_size, num_requests):
    large, _ = case.sampled(models, num_requests)
    small, _ = case.sampled(models, num_requests, max_batch_size)
    # Matrix products round differently. This changes about one token in a hundred thousand.
    assert int((large != small).any(dim=2).sum()) <= num_requests // 1000


DRAFTING = [name for name in LOSSLESS if POLICIES[name].needs_draft]


@pytest.mark.covering("policy", "max_batch_size")
@pytest.mark.parametrize(("max_batch_size", "num_requests"), [(1, 60), (16, 800)])
@pytest.mark.parametrize("policy", [n for n in DRAFTING if Signal.LOAD not in POLICIES[n].signals])
def test_policies_without_load_give_the_same_texts_in_smaller_batches(
    models, policy, max_batch_size, num_requests
):
    case = Case(policy, "block", 3)
    assert_smaller_batches_give_the_same_texts(models, case, max_batch_size, num_requests)


# The drafts of these policies depend on the other requests of the batch, so distributions are
# compared. The cells are large enough for fewer requests.
SMALL_BATCHES = pytest.mark.parametrize(("max_batch_size", "num_requests"), [(1, 800), (16, 4000)])


def small_case(policy):
    return Case(policy, "token", 2, vocab=4, num_tokens=3, draft_noise=0.5)


@pytest.mark.covering("policy", "max_batch_size")
@SMALL_BATCHES
@pytest.mark.parametrize("policy", [n for n in DRAFTING if Signal.LOAD in POLICIES[n].signals])
def test_policies_with_load_follow_the_target_in_smaller_batches(
    models, policy, max_batch_size, num_requests
):
    case = small_case(policy)
    tokens, _ = case.sampled(models, num_requests, max_batch_size)
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY


def test_a_wrong_acceptance_rule_is_detected_in_smaller_batches(models, monkeypatch):
    apply_instead(monkeypatch, resample_from_p)
    case = small_case("tetris")
    tokens, _ = case.sampled(models, 800, max_batch_size=1)
    assert min(case.p_values(models, tokens)) < IMPOSSIBLE


def apply_instead(monkeypatch, rule):
    """Replace the acceptance law of the engine by another rule."""
    monkeypatch.setattr(acceptance, "library_for", lambda _: None)
    monkeypatch.setattr(acceptance, "accept", rule)


def resample_from_p(p, proposals, tokens, lengths, uniforms, final, lenience, method, *rest):
    """Accept correctly, but draw the corrected token from p instead of the residual."""
    accepted = right_accept(p, proposals, tokens, lengths, uniforms, final, None, "token", *rest)
    row = (lengths + 1).cumsum(0) - (lengths + 1) + accepted.num_accepted
    return accepted._replace(next_tokens=sample(p[row], final))


def one_position_late(p, *arguments):
    """Accept each drafted token by the distribution of the next position."""
    return right_accept(p.roll(-1, 0), *arguments)


def same_number_twice(p, proposals, tokens, lengths, uniforms, final, lenience, method, *rest):
    """Draw the corrected token with the random number of the first acceptance test."""
    number = uniforms[:, 0] if uniforms.shape[1] else final
    return right_accept(p, proposals, tokens, lengths, uniforms, number, None, "token", *rest)


@pytest.mark.parametrize("wrong", [resample_from_p, one_position_late, same_number_twice])
def test_a_wrong_acceptance_rule_is_detected(models, monkeypatch, wrong):
    apply_instead(monkeypatch, wrong)
    case = Case("fixed", "token", 2, num_requests=NUM_REQUESTS_OF_EACH_POLICY)
    tokens, _ = case.sampled(models)
    assert min(case.p_values(models, tokens)) < IMPOSSIBLE


def test_lenience_is_detected(models):
    case = Case("fixed", "token", 2, num_requests=NUM_REQUESTS_OF_EACH_POLICY, lenience=0.7)
    tokens, requests = case.sampled(models)
    assert not any(request.stats.lossless for request in requests)
    assert min(case.p_values(models, tokens)) < IMPOSSIBLE
