"""The bundled head and exits of the bundled target."""

import pytest

from draftwise import LLM, SamplingParams, zoo
from draftwise.errors import UnsupportedModelError
from draftwise.zoo import bundled

from ..stand_ins import unguarded

PROMPTS = [
    "def is_prime(n):",
    "class Stack:\n    def __init__(self):",
    "Question: Tom has 3 boxes with 12 pens each. He gives away 7. How many are left?\nAnswer:",
    "import os\n\ndef files(folder):",
]
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
# The least share of the drafted tokens that is accepted, at four tokens per draft.
ACCEPTANCE = {"eagle3": 0.5, "target-exit2": 0.1, "target-exit3": 0.2}
# Exits without an adapter, and with a companion that is one.
PLAIN_EXITS = (("target:exit=2", None), ("target:exit=3", None), ("target:exit=2", "target:exit=4"))


@pytest.fixture(scope="module")
def target():
    return LLM("zoo:target", dtype="float32", max_batch_size=4, max_model_len=256)


@pytest.fixture(scope="module")
def expected(target):
    return [output.token_ids for output in target.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def inflated(tmp_path_factory):
    """The target with 40 million parameters, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        # The kernels stay in the user's cache, as compiling them takes minutes.
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(bundled, "cache_folder", lambda: cache)
        yield LLM("zoo:target@40m", dtype="float32", max_batch_size=4, max_model_len=256)


@pytest.mark.parametrize("name", ACCEPTANCE)
def test_drafts_are_accepted_and_texts_stay_the_same(target, expected, name):
    assert name in zoo.names()
    config = unguarded(f"zoo:{name}", policy="fixed", num_speculative_tokens=4)
    outputs = target.with_speculation(config).generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    drafted = sum(output.speculation.num_drafted for output in outputs)
    accepted = sum(output.speculation.num_accepted for output in outputs)
    assert drafted > 4 * len(PROMPTS)
    assert accepted >= ACCEPTANCE[name] * drafted


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_plain_exits_give_the_texts_of_the_target(target, expected, max_batch_size):
    llm = target
    if max_batch_size == 1:
        llm = LLM("zoo:target", dtype="float32", max_batch_size=1, max_model_len=256)
    # One by one, half of the prompts takes longer than all of them together.
    prompts = PROMPTS[: 2 * max_batch_size]
    for draft, companion in PLAIN_EXITS:
        policy = "fixed" if companion is None else "staged"
        config = unguarded(draft, companion=companion, policy=policy, num_speculative_tokens=4)
        outputs = llm.with_speculation(config).generate(prompts, SHORT)
        assert [output.token_ids for output in outputs] == [
            tokens[:24] for tokens in expected[: len(prompts)]
        ]
        assert sum(output.speculation.num_accepted for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTANCE)
def test_drafts_of_the_inflated_target_are_the_same(target, inflated, name):
    counts = []
    for llm, size in ((target, ""), (inflated, "@40m")):
        config = unguarded(f"zoo:{name}{size}", policy="fixed", num_speculative_tokens=4)
        outputs = llm.with_speculation(config).generate(PROMPTS, SHORT)
        counts.append(
            [(o.token_ids, o.speculation.num_drafted, o.speculation.num_accepted) for o in outputs]
        )
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ACCEPTANCE)
def test_a_part_of_the_target_is_no_target(name):
    with pytest.raises(UnsupportedModelError, match=r"use it as (the|a) draft"):
        LLM(f"zoo:{name}")
