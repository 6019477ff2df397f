"""Expected remaining tokens, and when they count."""

import pytest
import torch

from draftwise import SamplingParams
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.endings import Endings
from draftwise.engine.engine import Engine
from draftwise.engine.request import Request
from draftwise.models.loading import load_model
from draftwise.outputs import FinishReason, TokenSource
from draftwise.speculation import RequestSpeculation

from ..tiny_models import Recipe


def request_with(num_output, max_tokens, reason=None):
    request = Request(
        0,
        None,
        [1, 2],
        SamplingParams(max_tokens=max_tokens),
        None,
        frozenset(),
        1000,
        RequestSpeculation(),
    )
    for _ in range(num_output):
        request.append(3, TokenSource.TARGET)
    if reason is not None:
        request.finish(reason)
    return request


def test_texts_are_expected_to_reach_their_maximum_at_first():
    assert Endings().expected_remaining(request_with(3, 20)) == 17


def test_the_rate_of_endings_is_learnt():
    endings = Endings()
    for _ in range(400):
        endings.observe(request_with(10, 50, FinishReason.STOP))
    # One token in ten ends the text: about ten tokens remain, however long the text may be.
    assert endings.expected_remaining(request_with(1, 900)) == pytest.approx(10.0, rel=0.01)
    assert endings.expected_remaining(request_with(1, 3)) == pytest.approx(1.9, rel=0.01)
    for _ in range(400):
        endings.observe(request_with(10, 10, FinishReason.LENGTH))
    assert endings.expected_remaining(request_with(1, 900)) > 100


def test_cancelled_requests_teach_nothing():
    endings = Endings()
    endings.observe(request_with(1, 50, FinishReason.CANCELLED))
    assert endings.expected_remaining(request_with(0, 20)) == 20


class TestClosedBatches:
    def engine(self, models, max_batch_size):
        folder = models.folder(Recipe(vocab=8, seed=3))
        target = load_model(folder, "target", torch.float32, torch.device("cpu"), None)
        return Engine(Models(target), None, EngineOptions(max_batch_size))

    def remaining(self, engine):
        engine.step()
        return engine._scheduler.next_batch().expected_remaining

    def test_the_end_counts_if_nobody_waits(self, models):
        engine = self.engine(models, 2)
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        for _ in range(3):
            engine.add(None, [1, 2], params)
        assert self.remaining(engine) == [0.0, 0.0]
        while engine.num_unfinished > 1:
            engine.step()
        assert self.remaining(engine)[0] > 0

    def test_the_end_does_not_count_if_others_follow(self, models):
        engine = self.engine(models, 2)
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        engine.add(None, [1, 2], params)
        engine.add(None, [1, 2], params, others_follow=True)
        assert self.remaining(engine) == [0.0, 0.0]
