"""Drafts from the requests' texts in another engine's steps, with a fake engine."""

import numpy as np
import pytest
import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.engine.suffix.continuing import TextContinuations
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView, Verified
from draftwise.integrations.vllm.text_drafts import (
    SuffixTexts,
    TextCopies,
    Texts,
    create_text_proposer,
)
from draftwise.policies import POLICIES, PolicyContext, create_policy

from .ranks import Clock, Follower, Leader, Unasked

VOCAB, LONGEST, MAX_LENGTH, MAX_BATCH = 50, 6, 200, 8


def costs(per_token=0.0):
    return LatencyModel(StageCost((1.0, 64.0), (0.01, 0.01 + 63 * per_token)))


def steer(policy="adaptive", draft="suffix", per_token=0.0, agree=None, **options):
    latency = costs(per_token)
    proposer = create_text_proposer(draft)
    made = create_policy(policy, PolicyContext(LONGEST, latency), options)
    return Steering(made, latency, agree, proposer, VOCAB, False, Clock())


def propose(steering, views, texts):
    """The tokens of each request to verify."""
    assert steering.begin(views, lambda: texts) == 0
    lengths = steering.finish(None, 0.001)
    return [steering.copies.get(row, [])[:length] for row, length in enumerate(lengths)]


class Engine:
    """Requests with periodic texts, in rows that change from step to step.

    The text of request ``n`` has the period ``n % 5 + 2``, with a random token now and then.
    """

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.texts = {}
        self.running = {}  # name to row
        self.starts = {}
        self.num_seen = 0

    def add(self, name=None):
        number = self.num_seen
        self.num_seen += 1
        name = name or f"r{number}"
        period = number % 5 + 2
        text = [number % 7 + step % period for step in range(MAX_LENGTH)]
        for place in self.random.integers(0, MAX_LENGTH, size=8):
            text[place] = int(self.random.integers(0, VOCAB))
        free = set(range(MAX_BATCH)) - set(self.running.values())
        self.running[name] = int(self.random.choice(sorted(free)))
        self.texts[name], self.starts[name] = text, 20
        return name

    def views(self, lengths, room=LONGEST):
        return [
            RequestView(name, lengths[name], lengths[name] - 20, room, True)
            for name in self.running
        ]

    def memory(self, lengths):
        """Tokens after the end of each text are those of rejected drafts."""
        tokens = self.random.integers(0, VOCAB, size=(MAX_BATCH, MAX_LENGTH)).astype(np.int32)
        for name, row in self.running.items():
            tokens[row, : lengths[name]] = self.texts[name][: lengths[name]]
        return Texts(tokens, np.array(list(self.running.values()), dtype=np.int64))


def run(steering, engine, num_steps, change=None):
    """Run greedy steps. Returns the numbers of sent and accepted tokens."""
    lengths, verified = dict.fromkeys(engine.running, 21), {}
    num_sent = num_accepted = 0
    for number in range(num_steps):
        steering.end_step(verified, 0.02, 0)
        if change is not None:
            change(number, lengths)
        views = engine.views(lengths)
        drafts = propose(steering, views, engine.memory(lengths))
        assert sum(steering.pending.lengths) == sum(map(len, drafts))
        verified = {}
        for view, draft in zip(views, drafts, strict=True):
            assert len(draft) <= view.room
            following = engine.texts[view.name][view.num_tokens :]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == following[accepted]:
                accepted += 1
            num_sent, num_accepted = num_sent + len(draft), num_accepted + accepted
            verified[view.name] = Verified(len(draft), accepted)
            lengths[view.name] += accepted + 1
            if lengths[view.name] > MAX_LENGTH - LONGEST - 2:
                del engine.running[view.name], verified[view.name]
        while len(engine.running) < 3:
            lengths[engine.add()] = 21
    return num_sent, num_accepted


USABLE = [
    name
    for name, policy in POLICIES.items()
    if not (
        policy.uses_target_oracle
        or policy.replaces_tokens
        or policy.needs_profile
        or policy.needs_companion
    )
]


@pytest.mark.parametrize("draft", ["suffix", "ngram"])
@pytest.mark.parametrize("policy", USABLE)
def test_every_policy_drafts_from_texts(policy, draft):
    engine = Engine()
    for _ in range(3):
        engine.add()
    num_sent, num_accepted = run(steer(policy, draft), engine, 60)
    if policy != "none":
        assert num_accepted > 60
        assert num_accepted < num_sent


def test_expensive_tokens_are_not_sent():
    sent = []
    for per_token in (0.0, 0.1):
        engine = Engine()
        for _ in range(3):
            engine.add()
        sent.append(run(steer(per_token=per_token), engine, 40)[0])
    assert sent[1] < sent[0] / 3


def test_texts_are_searched_only_where_the_policy_looks_for_offers(monkeypatch):
    searched, find = [], TextContinuations.find
    monkeypatch.setattr(TextContinuations, "find", lambda *args: searched.append(1) or find(*args))
    steering, engine = steer(), Engine()
    engine.add()
    looks = iter([True, False, False, True, True])
    monkeypatch.setattr(steering.policy, "looks_for_offers", lambda states: next(looks))
    run(steering, engine, 5)
    assert len(searched) == 3


def test_requests_that_leave_come_back_or_reuse_a_name():
    """Rows, names and slots are reused. The estimates remain those of the right requests."""
    engine, steering = Engine(3), steer()
    for _ in range(4):
        engine.add()
    away = {}

    def change(number, lengths):
        names = list(engine.running)
        if number % 5 == 1:  # preempted
            away[names[0]] = engine.running.pop(names[0])
        if number % 5 == 3:  # back in another row
            for name in away:
                free = set(range(MAX_BATCH)) - set(engine.running.values())
                engine.running[name] = max(free)
            away.clear()
        if number % 7 == 6:  # aborted, and its name reused at once
            del engine.running[names[-1]]
            lengths[engine.add(names[-1])] = 21

    num_sent, num_accepted = run(steering, engine, 120, change)
    assert num_accepted > 0.5 * num_sent > 60


def test_acceptance_is_learnt_up_to_the_first_rejected_token(monkeypatch):
    proposer = SuffixTexts()
    learnt = []
    monkeypatch.setattr(TextContinuations, "learn", lambda *values: learnt.append(values[-2:]))
    text = np.array([[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [5] * 10], dtype=np.int32)
    views = [RequestView("a", 10, 5, 4, True), RequestView("b", 10, 5, 0, True)]
    made = proposer.propose(Texts(text, np.arange(2)), views)
    assert made.tokens[0, :4].tolist() == [3, 4, 1, 2]
    assert made.lengths.tolist() == [4, 0]
    proposer.learn([Verified(4, 2), None])
    assert learnt[0] == ([3, 0], [2, 0])
    proposer.learn([Verified(4, 2), None])  # nothing new was proposed
    proposer.propose(Texts(text, np.arange(2)), views)
    proposer.learn([None, None])  # the request ended
    assert learnt[1] == ([0, 0], [0, 0])
    assert len(learnt) == 2


def test_tokens_that_do_not_exist_end_a_draft():
    """Some engines store other values at the places of images."""
    text = np.array([[1, 2, 3, VOCAB + 5, 4, 1, 2]], dtype=np.int32)
    views = [RequestView("a", 7, 2, 4, True)]
    drafts = propose(steer("fixed"), views, Texts(text, np.arange(1)))
    assert drafts == [[3]]


@pytest.mark.parametrize("draft", ["suffix", "ngram"])
@pytest.mark.parametrize("policy", ["adaptive", "fixed", "none"])
def test_other_ranks_follow_the_first_one(policy, draft):
    leader = Leader()

    def run_rank(steering):
        engine = Engine()
        lengths, verified, sent = {engine.add(): 40, engine.add(): 60}, {}, []
        for _ in range(15):
            steering.end_step(verified, 0.02, 0)
            views = engine.views(lengths)
            tokens = propose(steering, views, engine.memory(lengths))
            sent.append(tokens)
            verified = {
                v.name: Verified(len(t), len(t)) for v, t in zip(views, tokens, strict=True)
            }
            lengths = {
                v.name: v.num_tokens + len(t) + 1 for v, t in zip(views, tokens, strict=True)
            }
            assert sum(steering.pending.num_drafted) >= sum(map(len, tokens))
        return sent

    first = run_rank(steer(policy, draft, agree=leader))
    proposer = create_text_proposer(draft)
    unasked = Unasked(PolicyContext(LONGEST))
    agree = Follower(leader.decisions)
    follower = Steering(unasked, None, agree, proposer, VOCAB, has_model=False)
    assert run_rank(follower) == first
    assert any(map(any, first)) == (policy != "none")


class TestCopies:
    """Host copies of texts on a device."""

    def setup_method(self):
        self.device = torch.zeros(4, 30, dtype=torch.int32)
        self.copies = TextCopies(4, 30)
        self.num_read = 0

    def read(self, rows, positions):
        self.num_read += len(rows)
        return self.device[torch.from_numpy(rows), torch.from_numpy(positions)].numpy()

    def step(self, *requests):
        """One step; each request is its name, row, prompt, tokens and room."""
        views, rows = [], []
        for name, row, num_prompt, num_tokens, room in requests:
            views.append(RequestView(name, num_tokens, num_tokens - num_prompt, room, True))
            rows.append(row)
        texts = self.copies.update(views, np.array(rows, dtype=np.int64), self.read)
        for view, row in zip(views, rows, strict=True):
            if view.room:
                end = view.num_tokens
                assert texts.tokens[row, :end].tolist() == self.device[row, :end].tolist()

    def write(self, row, *tokens):
        self.device[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    def test_only_new_tokens_are_copied(self):
        self.write(0, *range(20))
        self.write(3, *range(100, 120))
        self.step(("a", 0, 5, 6, 3), ("b", 3, 8, 4, 0))  # b's prompt is still processed
        assert self.num_read == 6
        self.step(("b", 3, 8, 9, 3), ("a", 0, 5, 9, 3))
        assert self.num_read == 6 + 3 + 9

    def test_a_request_that_comes_back_is_copied_again(self):
        self.write(0, *range(20))
        self.step(("a", 0, 5, 6, 3))
        self.step(("b", 1, 5, 6, 3))
        self.write(2, *range(20))
        self.step(("a", 2, 5, 9, 3))
        assert self.num_read == 6 + 6 + 9

    @pytest.mark.parametrize(("num_prompt", "num_tokens"), [(5, 6), (5, 5), (9, 10), (2, 3)])
    def test_another_request_of_the_same_name_is_copied_as_a_whole(self, num_prompt, num_tokens):
        self.write(0, *range(20))
        self.step(("a", 0, 5, 6, 3))
        self.write(0, *range(50, 70))
        self.step(("a", 0, num_prompt, num_tokens, 3))
