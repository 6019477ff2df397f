"""At temperature 0 the tokens equal those of the target alone, with any policy, on both runners.

The kernels of the V2 model runner are interpreted, which is slow, so its cases are smaller.
"""

import pytest
from transformers import AutoTokenizer

from .conftest import answer, steered

pytestmark = pytest.mark.slow

# By version of the model runner.
NUM_PROMPTS, MAX_TOKENS = {1: 100, 2: 12}, {1: 40, 2: 16}
RUNNERS = [1, pytest.param(2, marks=pytest.mark.exhaustive)]
TASKS = (
    "What is {a} plus {b}? Think step by step.",
    "A train goes {a} miles in {b} minutes. How far does it go in an hour?",
    "Write a Python function that adds {a} to its argument and returns it times {b}.",
    "Anna has {a} apples and gives {b} away. How many are left?",
)
# Prompts are processed in parts, and some texts come from the prefix cache.
IN_CHUNKS = {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "max_num_seqs": 5}


@pytest.fixture(scope="module")
def prompts(zoo):
    tokenizer = AutoTokenizer.from_pretrained(zoo["target"])
    result = []
    for number in range(NUM_PROMPTS[1]):
        text = TASKS[number % len(TASKS)].format(a=7 + 3 * number, b=2 + number)
        # Some share a prefix longer than a block of the cache; some are longer than a chunk.
        text = "Answer in one short sentence, and be careful. " * (number % 3) + text
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        result.append(list(ids))
    return result


@pytest.fixture(scope="module")
def engine(zoo):
    return {
        "model": zoo["target"],
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 29,
    }


@pytest.fixture(scope="module")
def expected(engine, prompts):
    """Tokens of the target alone, by the V1 model runner."""
    return answer(engine, prompts, {"temperature": 0.0, "max_tokens": MAX_TOKENS[1]}).tokens


@pytest.fixture(scope="module")
def check(engine, prompts, expected, zoo):
    """Runs an engine with Draftwise and compares its tokens with the target's."""

    def run(
        settings,
        draft="draft",
        num_drafted=5,
        changes=None,
        num_prompts=None,
        num_again=0,
        runner=1,
        **extra_arguments,
    ):
        """The engine's output. The first ``num_again`` prompts occur twice."""
        count, length = num_prompts or NUM_PROMPTS[runner], MAX_TOKENS[runner]
        answers = answer(
            steered({**engine, **(changes or {})}, draft and zoo[draft], settings, num_drafted),
            prompts[:count] + prompts[:num_again],
            {"temperature": 0.0, "max_tokens": length},
            runner,
            **extra_arguments,
        )
        wanted = expected[:count] + expected[:num_again]
        assert answers.tokens == [tokens[:length] for tokens in wanted]
        assert not answers.wrong_texts
        return answers

    return run


@pytest.mark.parametrize("runner", RUNNERS)
def test_with_a_companion_in_chunks_and_dropped_tokens(check, zoo, runner):
    """At these costs many drafted tokens are not verified."""
    settings = {"policy": "sv", "companion": zoo["companion"]}
    answers = check(settings, changes=IN_CHUNKS, num_again=8, runner=runner, costs=0.2)
    assert answers.asked > 5
    assert answers.smallest_overlap < 0.9
    assert 0 < answers.sent < answers.drafted


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", [1, 2])
def test_with_the_draft_as_companion(check, zoo, runner):
    settings = {"policy": "sv", "companion": zoo["draft"]}
    answers = check(settings, runner=runner, costs=0.05)
    assert answers.asked > 5
    assert answers.smallest_overlap > 1 - 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", [1, 2])
def test_with_svip(check, runner):
    answers = check({"policy": "svip", "policy_options": {"threshold": 0.8}}, runner=runner)
    assert answers.steps < NUM_PROMPTS[runner] * MAX_TOKENS[runner] / 4  # it speculates
    assert 0 < answers.sent == answers.drafted


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", ["draft", None])
def test_of_compiled_models(check, zoo, draft):
    """This is the default configuration, with the default policy."""
    settings = {"companion": zoo["companion"]} if draft else {}
    check(settings, draft, changes={"enforce_eager": False})


class TestBesideAModel:
    """Continuations of the texts and a draft model in one engine."""

    def test_in_chunks(self, check):
        answers = check(
            {"draft": "suffix"},
            num_drafted=8,
            changes=IN_CHUNKS,
            num_prompts=24,
            num_again=12,
            costs=0.0,
        )
        assert 0 < answers.copied < answers.sent
        assert 0 < answers.accepted < answers.sent
        assert answers.texts > answers.steps

    @pytest.mark.parametrize("runner", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
    def test_where_drafts_stop(self, check, runner):
        """Each request has another draft length. Every other one copies."""
        answers = check({"draft": "suffix"}, num_prompts=8, runner=runner, rule="both-sources")
        assert 0 < answers.copied < answers.sent == answers.drafted
        assert 0 < answers.accepted < answers.sent

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("policy", ["adaptive", "fixed", "svip", "tetris"])
    def test_with_policies(self, check, policy):
        answers = check({"draft": "suffix", "policy": policy}, costs=0.02)
        assert answers.accepted > 0
        assert answers.copied > 0


class TestTexts:
    """Drafts without a draft model."""

    @pytest.mark.parametrize("runner", RUNNERS)
    def test_in_chunks(self, check, runner):
        answers = check(
            {"draft": "suffix"},
            None,
            8,
            changes=IN_CHUNKS,
            num_prompts=min(24, NUM_PROMPTS[runner]),
            num_again=12,
            runner=runner,
            costs=0.0,
        )
        assert 0 < answers.accepted < answers.sent == answers.drafted
        assert answers.texts > answers.steps

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"draft": "ngram"},
            {"policy": "fixed"},
            {"policy": "svip", "policy_options": {"threshold": 0.8}},
            {"policy": "tetris"},
        ],
        ids=lambda settings: "-".join(map(str, settings.values())),
    )
    def test_with_policies(self, check, settings):
        answers = check(settings, None)
        assert 0 < answers.accepted <= answers.sent <= answers.drafted

    @pytest.mark.exhaustive
    def test_of_requests_that_are_preempted(self, check):
        """The cache has room for about half of the requests' texts."""
        small = {"num_gpu_blocks_override": 24, "block_size": 32, "max_model_len": 256}
        changes = {**small, "kv_cache_memory_bytes": None}
        answers = check({}, None, 8, changes=changes, costs=0.0)
        assert answers.preempted > 10
        assert answers.accepted > 0

    @pytest.mark.exhaustive
    def test_near_the_maximum_length(self, engine, prompts):
        """A request at its maximum length does not change the drafts of the others."""
        longest = max(map(len, prompts[:16])) + 24
        short = {**engine, "max_model_len": longest}
        greedy = {"temperature": 0.0, "max_tokens": longest}
        expected = answer(short, prompts[:16], greedy).tokens
        answers = answer(steered(short, None, {}, 8), prompts[:16], greedy, costs=0.0)
        assert answers.tokens == expected
        assert answers.accepted > 0
        assert not answers.wrong_texts
