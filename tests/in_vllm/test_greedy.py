"""At temperature 0 the tokens equal those of the target alone, with any policy."""

import pytest
from transformers import AutoTokenizer

from .conftest import answer, steered, steered_texts

pytestmark = pytest.mark.slow

NUM_PROMPTS, MAX_TOKENS = 100, 40
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
TASKS = (
    "What is {a} plus {b}? Think step by step.",
    "A train goes {a} miles in {b} minutes. How far does it go in an hour?",
    "Write a Python function that adds {a} to its argument and returns it times {b}.",
    "Anna has {a} apples and gives {b} away. How many are left?",
)


def long_and_short_prompts(zoo, count):
    tokenizer = AutoTokenizer.from_pretrained(zoo["target"])
    result = []
    for number in range(count):
        text = TASKS[number % len(TASKS)].format(a=7 + 3 * number, b=2 + number)
        # Some share a prefix longer than a block of the cache; some are longer than a chunk.
        text = "Answer in one short sentence, and be careful. " * (number % 3) + text
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        result.append(list(ids))
    return result


@pytest.fixture(scope="module")
def prompts(zoo):
    return long_and_short_prompts(zoo, NUM_PROMPTS)


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
    """Tokens of the target alone."""
    return answer(engine, prompts, GREEDY).tokens


@pytest.mark.exhaustive
def test_texts_with_svip_equal_the_targets(engine, zoo, prompts, expected):
    settings = {"policy": "svip", "policy_options": {"threshold": 0.8}}
    answers = answer(steered(engine, zoo["draft"], settings), prompts, GREEDY)
    assert answers.tokens == expected
    assert answers.steps < NUM_PROMPTS * MAX_TOKENS / 16  # it speculates
    assert 0 < answers.sent == answers.drafted


@pytest.mark.exhaustive
def test_texts_with_the_draft_as_companion_equal_the_targets(engine, zoo, prompts, expected):
    settings = {"policy": "sv", "companion": zoo["draft"]}
    answers = answer(steered(engine, zoo["draft"], settings), prompts, GREEDY, costs=0.1)
    assert answers.tokens == expected
    assert answers.asked > 5
    assert answers.smallest_overlap > 1 - 1e-3


def test_texts_with_a_companion_equal_the_targets(engine, zoo, prompts, expected):
    settings = {"policy": "sv", "companion": zoo["companion"]}
    answers = answer(steered(engine, zoo["draft"], settings), prompts, GREEDY, costs=0.1)
    assert answers.tokens == expected
    assert answers.asked > 5
    assert answers.smallest_overlap < 0.9
    assert answers.sent > 0


@pytest.mark.exhaustive
def test_texts_of_prompts_in_chunks_equal_the_targets(engine, zoo, prompts, expected):
    small = {**engine, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    settings = {"policy": "sv", "companion": zoo["companion"]}
    answers = answer(steered(small, zoo["draft"], settings, 3), prompts, GREEDY)
    assert answers.tokens == expected


@pytest.mark.exhaustive
def test_texts_with_prefix_caching_equal_the_targets(engine, zoo, prompts, expected):
    cached = {**engine, "enable_prefix_caching": True}
    settings = {"policy": "sv", "companion": zoo["companion"]}
    answers = answer(steered(cached, zoo["draft"], settings), prompts + prompts, GREEDY)
    assert answers.tokens == expected + expected


@pytest.mark.exhaustive
def test_texts_with_dropped_tokens_equal_the_targets(engine, zoo, prompts, expected):
    """At these costs many drafted tokens are not verified."""
    settings = {"policy": "sv", "companion": zoo["companion"]}
    answers = answer(steered(engine, zoo["draft"], settings), prompts, GREEDY, costs=0.2)
    assert answers.tokens == expected
    assert answers.sent < answers.drafted


@pytest.mark.exhaustive
def test_texts_of_compiled_models_equal_the_targets(engine, zoo, prompts, expected):
    """This is the default configuration, with the default policy."""
    compiled = {**engine, "enforce_eager": False}
    settings = {"companion": zoo["companion"]}
    answers = answer(steered(compiled, zoo["draft"], settings), prompts, GREEDY)
    assert answers.tokens == expected


class TestBesideAModel:
    """Continuations of the texts and a draft model in one engine."""

    def test_in_chunks_with_prefix_caching(self, engine, zoo, prompts, expected):
        """Each prompt occurs twice, so that some texts come from the prefix cache."""
        changed = {
            **engine,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 48,
            "max_num_seqs": 8,
        }
        some = prompts[:24] + prompts[:12]
        arguments = steered(changed, zoo["draft"], {"draft": "suffix"}, 8)
        answers = answer(arguments, some, GREEDY, costs=0.0)
        assert answers.tokens == expected[:24] + expected[:12]
        assert 0 < answers.copied < answers.sent
        assert 0 < answers.accepted < answers.sent
        assert answers.texts > answers.steps
        assert not answers.wrong_texts

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("policy", ["adaptive", "fixed", "svip", "tetris"])
    def test_with_policies(self, engine, zoo, prompts, expected, policy):
        settings = {"draft": "suffix", "policy": policy}
        answers = answer(steered(engine, zoo["draft"], settings), prompts, GREEDY, costs=0.02)
        assert answers.tokens == expected
        assert answers.accepted > 0
        assert answers.copied > 0
        assert not answers.wrong_texts


class TestTexts:
    """Drafts without a draft model."""

    def test_in_chunks_with_prefix_caching(self, engine, prompts, expected):
        """Each prompt occurs twice, so that some texts come from the prefix cache."""
        changed = {
            **engine,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 48,
            "max_num_seqs": 8,
        }
        some = prompts[:24] + prompts[:12]
        answers = answer(steered_texts(changed, {"draft": "suffix"}, 8), some, GREEDY, costs=0.0)
        assert answers.tokens == expected[:24] + expected[:12]
        assert 0 < answers.accepted < answers.sent == answers.drafted
        assert answers.texts > answers.steps
        assert not answers.wrong_texts

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
    def test_with_policies(self, engine, prompts, expected, settings):
        answers = answer(steered_texts(engine, settings), prompts, GREEDY)
        assert answers.tokens == expected
        assert 0 < answers.accepted <= answers.sent <= answers.drafted

    @pytest.mark.exhaustive
    def test_of_requests_that_are_preempted(self, engine, prompts, expected):
        """The cache has room for about half of the requests' texts."""
        small = {**engine, "num_gpu_blocks_override": 24, "block_size": 32, "max_model_len": 256}
        del small["kv_cache_memory_bytes"]
        answers = answer(steered_texts(small, {}, 8), prompts, GREEDY, costs=0.0)
        assert answers.tokens == expected
        assert answers.preempted > 10
        assert answers.accepted > 0
        assert not answers.wrong_texts

    @pytest.mark.exhaustive
    def test_of_compiled_models(self, engine, prompts, expected):
        compiled = {**engine, "enforce_eager": False}
        answers = answer(steered_texts(compiled, {}), prompts, GREEDY)
        assert answers.tokens == expected

    @pytest.mark.exhaustive
    def test_near_the_maximum_length(self, engine, zoo, prompts):
        """A request at its maximum length does not change the drafts of the others."""
        longest = max(map(len, prompts[:16])) + 24
        short = {**engine, "max_model_len": longest}
        greedy = {"temperature": 0.0, "max_tokens": longest}
        expected = answer(short, prompts[:16], greedy).tokens
        answers = answer(steered_texts(short, {}, 8), prompts[:16], greedy, costs=0.0)
        assert answers.tokens == expected
        assert answers.accepted > 0
        assert not answers.wrong_texts
