"""Records of the steps of a run."""

from dataclasses import replace

import pytest

from draftwise.benchmark.contenders import PolicyContender, policy_contenders
from draftwise.benchmark.recorder import Recorder, StepRecords
from draftwise.core.types import StepTimes
from draftwise.errors import EngineError, InvalidParameterError
from draftwise.llm import LLM
from draftwise.outputs import SpeculationStats
from draftwise.params import SamplingParams

from ..stand_ins import unguarded
from ..tiny_models import Recipe

TARGET = Recipe(vocab=40, context=64)
DRAFT = TARGET.draft(0.2)
TIMES = StepTimes(0.1, 0.0, 0.05, 0.7, 0.1, 0.05)


class Requests:
    """Hashable fake requests with increasing counts."""

    def __init__(self, count):
        self.all = [type("Request", (), {"stats": SpeculationStats()})() for _ in range(count)]

    def step(self, index, drafted, verified, accepted):
        stats = self.all[index].stats
        stats.num_steps += 1
        stats.num_drafted += drafted
        stats.num_verified += verified
        stats.num_accepted += accepted
        stats.num_tokens += accepted + 1


def test_lengths_and_acceptance_by_position():
    recorder, requests = Recorder(), Requests(2)
    requests.step(0, 3, 2, 2)
    requests.step(1, 3, 3, 1)
    recorder.take(requests.all, TIMES)
    requests.step(0, 3, 0, 0)
    recorder.take(requests.all, TIMES)  # the other one waited
    records = recorder.finish()
    assert (records.num_steps, records.num_request_steps, records.num_tokens) == (2, 3, 6)
    assert (records.num_drafted, records.num_verified, records.num_accepted) == (9, 5, 3)
    assert records.verified_lengths == {0: 1, 2: 1, 3: 1}
    # Two requests reached the first and second position, nobody the third.
    assert records.acceptance_by_position == [1.0, 0.5]
    assert [recorder.gains[each] for each in requests.all] == [[3, 1], [2]]


def test_token_trees_have_no_acceptance_by_position():
    recorder, requests = Recorder(draws_chains=False), Requests(1)
    requests.step(0, 8, 8, 2)
    recorder.take(requests.all, TIMES)
    records = recorder.finish()
    assert (records.num_verified, records.num_accepted) == (8, 2)
    assert records.acceptance_by_position == []


def test_steps_with_prompts_are_not_decoding():
    recorder, requests = Recorder(), Requests(1)
    requests.step(0, 0, 0, 0)
    recorder.take(requests.all, StepTimes(0, 0, 0, 1.0, 0, 0, num_prompt_tokens=12))
    requests.step(0, 0, 0, 0)
    recorder.take(requests.all, TIMES)
    records = recorder.finish()
    assert (records.num_prompt_tokens, records.num_tokens, records.decode_tokens) == (12, 2, 1)
    assert records.decode_seconds == pytest.approx(TIMES.total)
    assert records.seconds["verify"] == pytest.approx(1.7)


def test_runs_are_added():
    total = StepRecords()
    recorder, requests = Recorder(), Requests(1)
    requests.step(0, 2, 2, 1)
    recorder.take(requests.all, TIMES)
    for _ in range(2):
        total.add(recorder.records)
    assert (total.num_steps, total.num_tokens, total.tested[0], total.accepted[0]) == (2, 4, 2, 2)
    assert total.decode_seconds == pytest.approx(2 * TIMES.total)


@pytest.fixture(scope="module")
def contenders(models):
    llm = LLM(models.folder(TARGET), None, "float32", max_batch_size=4)
    speculation = unguarded(models.folder(DRAFT), policy="none", num_speculative_tokens=3)
    return policy_contenders(llm, ["fixed", "fixed:2", "none", "heuristic"], speculation)


def test_policy_contenders_start_with_target_only_decoding(contenders):
    assert [each.name for each in contenders] == ["none", "fixed", "fixed:2", "heuristic"]
    described = [each.describe() for each in contenders]
    assert [each["num_speculative_tokens"] for each in described[1:]] == [3, 2, 3]
    drafts = {id(each.llm.draft) for each in contenders[1:]}
    assert len(drafts) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_turn_records_its_steps(contenders, temperature):
    prompts = [[1, 2, 3], [4], [5, 6]]
    params = [
        SamplingParams(max_tokens=9, temperature=temperature, seed=s, ignore_eos=True)
        for s in range(3)
    ]
    for contender in contenders:
        turn = contender.generate(prompts, params)
        assert [len(answer) for answer in turn.answers] == [9] * 3
        assert [sum(gains) for gains in turn.gains] == [9] * 3
        assert all(0 < each <= turn.seconds for each in turn.finished)
        records = turn.records
        assert records.num_tokens == turn.num_tokens == 27
        assert records.num_prompt_tokens == 6
        assert records.num_accepted <= records.num_verified <= records.num_drafted
        assert (records.num_drafted > 0) == (contender.name != "none")
        assert sum(records.verified_lengths.values()) == records.num_request_steps
        # The rest of the first step has the time that the turn before took after its last step.
        in_turn = sum(taken for part, taken in records.seconds.items() if part != "rest")
        assert 0 < in_turn <= turn.seconds
        assert records.seconds["rest"] > 0


def test_contenders_may_use_one_of_the_drafts(models):
    llm = LLM(models.folder(TARGET), None, "float32", max_batch_size=4)
    model = models.folder(DRAFT)
    speculation = unguarded(["suffix", model], policy="none", num_speculative_tokens=3)
    names = [f"fixed:2@{model}", "fixed@suffix", "fixed"]
    made = policy_contenders(llm, names, speculation)
    assert [each.name for each in made] == ["none", *names]
    drafts = [each.llm.speculation.draft_names for each in made[1:]]
    assert drafts == [(model,), ("suffix",), ("suffix", model)]
    assert [each.llm.draft is None for each in made[1:]] == [False, True, False]
    with pytest.raises(InvalidParameterError, match="the drafts are suffix"):
        policy_contenders(llm, ["fixed@ngram"], speculation)


@pytest.mark.parametrize("name", ["fixed:x", "fixed:-1", "fixed:1.5"])
def test_bad_lengths(contenders, name):
    assert isinstance(contenders[0], PolicyContender)
    speculation = contenders[1].llm.speculation
    with pytest.raises(InvalidParameterError, match="policies"):
        policy_contenders(contenders[0].llm, [name], speculation)


def test_a_turn_with_a_failed_request_is_an_error(contenders, monkeypatch):
    """It would look like a slower policy."""
    contender = contenders[1]
    original = LLM.generate

    def generate(self, *arguments):
        outputs = original(self, *arguments)
        error = EngineError("engine", "the logits are not numbers")
        return [outputs[0], replace(outputs[1], error=error)]

    monkeypatch.setattr(LLM, "generate", generate)
    with pytest.raises(EngineError, match="not numbers"):
        contender.generate([[1], [2]], [SamplingParams(max_tokens=2)] * 2)
