"""Continuations of texts beside a draft model in another engine's steps, with a fake engine."""

import numpy as np
import pytest
import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import DraftSignals
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView, Verified
from draftwise.integrations.vllm.text_drafts import Texts, create_text_proposer
from draftwise.policies import PolicyContext, create_policy

from .ranks import Follower, Leader, Unasked
from .test_text_drafts import USABLE

VOCAB, LONGEST = 50, 6


def steer(policy="adaptive", agree=None, **options):
    target = StageCost((1.0, 64.0), (0.01, 0.011))
    latency = LatencyModel(target, StageCost((1.0, 64.0), (0.0002, 0.0003)))
    made = create_policy(policy, PolicyContext(LONGEST, latency), options)
    proposer = create_text_proposer("suffix")
    return Steering(made, latency, agree, proposer, VOCAB, clock=lambda: 0.0)


class Engine:
    """Requests whose texts have a period, in turn with requests whose texts repeat nothing.

    The draft model draws the token after each text that repeats nothing, and wrong ones elsewhere.
    """

    def __init__(self, count=4):
        random = np.random.default_rng(0)
        periodic = [[7 + index + place % 3 for place in range(400)] for index in range(count)]
        self.texts = [
            periodic[index] if index % 2 == 0 else random.permutation(400).tolist()
            for index in range(count)
        ]
        self.lengths = [30] * count
        self.num_copied = [0] * count
        self.num_drafted = [0] * count

    def views(self, room=LONGEST):
        return [
            RequestView(f"r{index}", length, length - 20, room, True)
            for index, length in enumerate(self.lengths)
        ]

    def read(self):
        memory = np.array(self.texts, dtype=np.int32)
        return Texts(np.ascontiguousarray(memory), np.arange(len(self.texts)))

    def step(self, steering, verified, room=LONGEST):
        """One step. Returns the verification results."""
        steering.end_step(verified, 0.02, 0)
        limit = steering.begin(self.views(room), self.read)
        drawn = []
        for index in range(limit):
            tokens = torch.tensor(
                [
                    text[length + index] % VOCAB if row % 2 else 0
                    for row, (text, length) in enumerate(zip(self.texts, self.lengths, strict=True))
                ]
            )
            drawn.append(tokens.tolist())
            q = torch.full((len(self.texts), VOCAB), 0.1 / VOCAB)
            q[range(len(self.texts)), tokens] += 0.9
            if not steering.drawn(tokens, q if steering.wants_draft_probs else None):
                break
        sent = steering.finish(None, 0.001)
        copies = steering.copies
        results = {}
        for row, count in enumerate(sent):
            tokens = copies.get(row, [each[row] for each in drawn])[:count]
            assert count <= room
            assert len(tokens) == count
            said = self.texts[row][self.lengths[row] :]
            right = [a == b % VOCAB for a, b in zip(tokens, said, strict=False)]
            num_accepted = right.index(False) if False in right else count
            counts = self.num_copied if row in copies else self.num_drafted
            counts[row] += count
            results[f"r{row}"] = Verified(count, num_accepted)
            self.lengths[row] += num_accepted + 1
        return results


@pytest.mark.parametrize("policy", USABLE)
def test_every_policy_selects_within_the_limits(policy):
    steering, engine, verified = steer(policy), Engine(), {}
    for number in range(20):
        verified = engine.step(steering, verified, room=number % (LONGEST + 1))


def test_each_request_is_drafted_for_by_the_source_that_gains():
    steering, engine, verified = steer(), Engine(), {}
    for _ in range(30):
        verified = engine.step(steering, verified)
    assert min(engine.num_copied[::2]) > 60
    assert max(engine.num_copied[1::2]) == 0
    assert min(engine.num_drafted[1::2]) > 60
    # The model drafts for the others at first, before its acceptance is known.
    assert max(engine.num_drafted[::2]) < 60


@pytest.mark.parametrize("policy", ["fixed", "tetris", "svip", "adaptive"])
def test_copies_are_verified_beside_drafts_of_the_model(policy):
    steering, engine, verified = steer(policy), Engine(), {}
    for _ in range(12):
        verified = engine.step(steering, verified)
    assert min(engine.num_copied[::2]) > 20
    assert min(engine.num_drafted[1::2]) > 0


def test_a_history_is_about_tokens_of_the_model():
    steering, engine = steer("fixed"), Engine()
    verified = engine.step(steering, {})
    copied = set(steering.copies)
    assert copied == {0, 2}
    steering.end_step(dict.fromkeys(verified, Verified(LONGEST, 0)), 0.02, 0)
    histories = [steering._histories[f"r{row}"].mean for row in range(4)]
    assert histories[0] == histories[2] == 0.6
    assert max(histories[1], histories[3]) < 0.6


def test_signals_of_both_sources_are_joined():
    steering, engine = steer("svip"), Engine()
    drafts, draft = [], steering._draft
    steering._draft = lambda: drafts.append(draft()) or drafts[-1]
    engine.step(steering, {})
    assert isinstance(drafts[0].signals, DraftSignals)
    assert drafts[0].is_one_hot == (True, False, True, False)
    probs = drafts[0].signals.token_probs
    assert probs[1, 0] == pytest.approx(0.902)
    assert 0 < float(probs[0, 0]) < 1
    assert drafts[0].signals.draft_probs.shape == (4, drafts[0].tokens.shape[1], VOCAB)


@pytest.mark.parametrize("policy", ["adaptive", "svip", "fixed"])
def test_other_ranks_follow_the_first_one(policy):
    leader = Leader()

    def run(steering):
        engine, verified, done = Engine(), {}, []
        for _ in range(12):
            verified = engine.step(steering, verified)
            done.append((verified, dict(steering.copies), steering.pending.num_drafted))
        return done

    first = run(steer(policy, agree=leader))
    unasked, proposer = Unasked(PolicyContext(LONGEST)), create_text_proposer("suffix")
    follower = Steering(unasked, None, Follower(leader.decisions), proposer, VOCAB)
    assert run(follower) == first
    assert any(copies for _, copies, _ in first)
