"""The target's answers, and the cache that keeps them across runs."""

import pytest

from draftwise import LLM, SamplingParams
from draftwise.distillation.answers import AnswerCache, Job, answer
from draftwise.errors import InvalidParameterError

from ..tiny_models import Recipe

TARGET = Recipe(vocab=24, context=64)
MAX_TOKENS = 12
JOBS = [Job((1 + index, 2, 3), float(index % 2), index // 4) for index in range(8)]


@pytest.fixture
def llm(models):
    with LLM(models.folder(TARGET), dtype="float32", max_batch_size=4) as llm:
        yield llm


def test_answers_are_the_targets_own(llm, tmp_path):
    found = answer(llm, JOBS, AnswerCache("target", MAX_TOKENS, tmp_path), MAX_TOKENS)
    assert [job for job, _ in found.answers] == JOBS
    assert found.seconds > 0
    for job, tokens in found.answers:
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=job.temperature, seed=int(job.key[:12], 16)
        )
        assert list(tokens) == llm.generate(list(job.prompt), sampling)[0].token_ids


def test_later_runs_generate_what_is_missing(llm, tmp_path):
    first = answer(llm, JOBS[:5], AnswerCache("target", MAX_TOKENS, tmp_path), MAX_TOKENS)
    (greedy, sampled) = sorted(tmp_path.iterdir())
    before = {file: file.read_text().splitlines() for file in (greedy, sampled)}
    # The last line was cut off when the run was interrupted.
    sampled.write_text("\n".join(before[sampled])[:-4])
    second = answer(llm, JOBS, AnswerCache("target", MAX_TOKENS, tmp_path), MAX_TOKENS)
    assert second.answers[:5] == first.answers
    assert len(second.answers) == len(JOBS)
    lines = [line for file in (greedy, sampled) for line in file.read_text().splitlines()]
    assert len(lines) == len(set(lines)) == len(JOBS)
    assert set(before[greedy]) <= set(lines)
    third = answer(llm, JOBS, AnswerCache("target", MAX_TOKENS, tmp_path), MAX_TOKENS)
    assert (third.answers, third.seconds) == (second.answers, 0.0)


def test_files_that_cannot_be_written_are_named(tmp_path):
    cache = AnswerCache("target", MAX_TOKENS, tmp_path)
    assert cache.get(JOBS[0]) is None
    (tmp_path / f"target-{MAX_TOKENS}-0.jsonl").mkdir()
    with pytest.raises(InvalidParameterError, match="cannot write") as caught:
        cache.add(JOBS[0], range(MAX_TOKENS))
    assert caught.value.field == "answers"
    with pytest.raises(InvalidParameterError, match="cannot read"):
        AnswerCache("target", MAX_TOKENS, tmp_path).get(JOBS[0])


def test_answers_that_cannot_be_stored_end_the_run(llm, tmp_path, monkeypatch):
    """Also after others were generated."""
    cache = AnswerCache("target", MAX_TOKENS, tmp_path)
    add, stored = cache.add, []

    def full_disk(job, tokens):
        stored.append(job)
        if len(stored) > 2:
            raise InvalidParameterError("answers", "cannot write: no space left on device")
        add(job, tokens)

    monkeypatch.setattr(cache, "add", full_disk)
    with pytest.raises(InvalidParameterError, match="no space left"):
        answer(llm, JOBS, cache, MAX_TOKENS)


def test_limits(llm, tmp_path):
    few = answer(llm, JOBS, AnswerCache("few", MAX_TOKENS, tmp_path), MAX_TOKENS, num_tokens=20)
    sizes = [len(tokens) for _, tokens in few.answers]
    assert sum(sizes) >= 20 > sum(sizes[:-1])
    cache = AnswerCache("none", MAX_TOKENS, tmp_path)
    assert answer(llm, JOBS, cache, MAX_TOKENS, seconds=1e-9).answers == []
    # Answers of another target or another length are other answers.
    assert cache.get(JOBS[0]) is None
    assert AnswerCache("few", MAX_TOKENS + 1, tmp_path).get(JOBS[0]) is None


def test_large_files_lose_their_oldest_answers(tmp_path, monkeypatch):
    cache = AnswerCache("target", MAX_TOKENS, tmp_path)
    jobs = [Job((index,), 0.0) for index in range(10)]
    for job in jobs:
        cache.add(job, range(MAX_TOKENS))
    monkeypatch.setattr("draftwise.distillation.answers.MAX_CACHE_BYTES", 100)
    left = AnswerCache("target", MAX_TOKENS, tmp_path)
    assert [left.get(job) is not None for job in jobs] == [False] * 5 + [True] * 5
