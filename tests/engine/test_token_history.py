"""The distinct tokens of requests, which penalties depend on."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwise.core.rejection import packed_rows
from draftwise.engine.batch import HistoryStore, token_history_along

texts = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def counts_of(history):
    return [
        dict(zip(tokens, counts, strict=True))
        for tokens, counts in zip(history.tokens.tolist(), history.counts.tolist(), strict=True)
    ]


def expected_counts(prompt, output):
    return {token: output.count(token) for token in prompt + output}


@given(st.lists(st.tuples(texts, st.lists(texts, max_size=3)), min_size=1, max_size=4))
def test_a_store_counts_the_outputs(requests):
    store = HistoryStore(len(requests) + 1, torch.device("cpu"))
    store.begin(0, [7, 8, 9])
    store.append(0, [7, 1, 1])
    for row, (prompt, outputs) in enumerate(requests):
        store.begin(row, prompt)
        for output in outputs:
            store.append(row, output)
    rows = list(range(len(requests)))[::-1]
    assert counts_of(store.rows(rows)) == [
        expected_counts(requests[row][0], list(itertools.chain(*requests[row][1]))) for row in rows
    ]


@given(
    st.lists(
        st.tuples(texts, texts, st.lists(st.integers(0, 9), min_size=3, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
def test_the_history_along_a_draft(requests, data):
    lengths = [data.draw(st.integers(0, 3)) for _ in requests]
    store = HistoryStore(len(requests), torch.device("cpu"))
    for row, (prompt, output, _) in enumerate(requests):
        store.begin(row, prompt)
        store.append(row, output)
    owner, position = packed_rows(torch.tensor(lengths), sum(lengths) + len(lengths))
    along = token_history_along(
        store.rows(range(len(requests))),
        torch.tensor([draft for _, _, draft in requests])[owner],
        owner,
        position,
    )
    assert counts_of(along) == [
        expected_counts(requests[row][0], requests[row][1] + requests[row][2][:at])
        for row, at in zip(owner.tolist(), position.tolist(), strict=True)
    ]
