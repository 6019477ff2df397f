"""Speculation of the peer llama.cpp, with models that check what is computed in their caches."""

import pytest

from draftwise.benchmark.peer_engines import llamacpp_engine

SETTINGS = {"target": "target", "draft": "draft", "max_batch_size": 1}


class CountingModel:
    """Writes the successor of a token modulo ten; the draft is wrong or unsure at some tokens."""

    def __init__(self, path, settings, sequences):
        self.path, self.vocabulary, self.cache, self.rows = path, 10, [], []
        self.passes = []

    def compute(self, inputs):
        self.rows = []
        for _, position, token, _ in inputs:
            assert position == len(self.cache)
            self.cache.append(token)
            self.rows.append((token + 1) % 10)
        self.passes.append(len(inputs))

    def compute_text(self, prompt, tokens, start=0):
        assert tokens[:start] == self.cache
        assert start < len(tokens)
        self.compute([(0, at, tokens[at], False) for at in range(start, len(tokens))])

    def forget(self, prompt, position):
        del self.cache[position:]

    def sampler(self, wanted):
        return None

    def free(self, chain):
        pass

    def sample(self, chain, row):
        return self.rows[row]

    def most_likely(self):
        token = self.rows[-1]
        if token == 4:
            return 9, 0.9
        return token, 0.5 if token == 8 else 0.9


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 40])
@pytest.mark.parametrize(("first", "stops"), [(0, []), (0, [7]), (3, [3]), (6, [])])
def test_drafts_of_a_model_do_not_change_the_answer(monkeypatch, max_tokens, first, stops):
    monkeypatch.setattr(llamacpp_engine, "_Model", CountingModel)
    generate = llamacpp_engine._start_draft(SETTINGS)
    wanted = {"max_tokens": max_tokens, "stop_token_ids": stops}
    expected = [(first + 1 + at) % 10 for at in range(max_tokens)]
    if set(stops) & set(expected):
        expected = expected[: min(expected.index(stop) for stop in stops) + 1]
    for _ in range(2):  # the second prompt finds the caches of the first
        (answer,), counts = generate([[5, first]], wanted)
        assert answer == expected
        assert 0 <= counts["accepted"] <= counts["drafted"]
    assert max_tokens < 40 or stops or counts["accepted"] > 20
