"""The search for earlier occurrences, against a plain search, with and without a corpus."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from draftwise.engine.suffix.corpus import SuffixCorpus, namespace_of
from draftwise.engine.suffix.matcher import SuffixMatcher
from draftwise.engine.suffix.search import CORPUS_CHUNK, MAX_MATCH
from draftwise.errors import InvalidParameterError
from draftwise.estimators.matches import HIGHEST, MatchAcceptance
from draftwise.kernels.native.library import native_library

from ..refusals import error_of

needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs the native kernels")
BACKENDS = [pytest.param("native", marks=needs_kernels), "numpy"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "numpy":
        use_numpy(monkeypatch)
    return request.param


def use_numpy(monkeypatch):
    for module in ("continuing", "corpus"):
        monkeypatch.setattr(f"draftwise.engine.suffix.{module}.native_library", lambda: None)


def match_length(tokens, place):
    """How many tokens up to a place equal the text's last tokens."""
    length = 0
    while length < min(place + 1, MAX_MATCH) and tokens[place - length] == tokens[-1 - length]:
        length += 1
    return length


def following(tokens, place, count):
    """The tokens after a place, which repeat at the end of the text."""
    known = tokens[place + 1 :]
    return [known[i % len(known)] for i in range(count)]


def continuation(matcher, slot=0, count=4):
    """The proposed tokens of one text, and the number of matching tokens."""
    found = matcher.continuations([slot], [count])
    return found.tokens[0, : found.lengths[0]].tolist(), int(found.match_lengths[0])


def text_of(tokens, corpus=None, namespace=0):
    """A matcher with one text."""
    matcher = SuffixMatcher(1, 4096, corpus)
    matcher.begin(0, tokens, namespace)
    return matcher


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(deadline=None, max_examples=150)
@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 6))
def test_the_longest_match_is_continued(batch, count):
    matcher = SuffixMatcher(6, 64)
    for slot, tokens in enumerate(batch):
        matcher.begin(slot + 1, tokens[:3])
        matcher.extend(slot + 1, tokens[3:])
    found = matcher.continuations(range(1, len(batch) + 1), [count] * len(batch))
    for row, tokens in enumerate(batch):
        lengths = [match_length(tokens, place) for place in range(len(tokens) - 1)]
        assert found.match_lengths[row] <= max(lengths, default=0)
        if not any(lengths):
            assert found.match_lengths[row] == 0
            assert found.lengths[row] == 0
            continue
        assert found.match_lengths[row] >= max(lengths) - 3
        places = [p for p, length in enumerate(lengths) if length == found.match_lengths[row]]
        candidates = [following(tokens, place, count) for place in places]
        assert found.tokens[row].tolist() in candidates
        assert found.lengths[row] == count
        assert (found.shares[row] > 0).all()
        assert (found.shares[row] <= 1 + 1e-12).all()
        assert (found.votes[row] >= 1).all()
        assert (np.diff(found.votes[row]) <= 0).all()


documents = st.lists(
    st.tuples(texts, st.integers(1, 30), st.integers(0, 2), st.integers(0, 3)), max_size=4
)


observations = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=4, max_size=4)


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(
    st.lists(texts, min_size=1, max_size=4),
    documents,
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.lists(observations, max_size=6),
)
def test_kernels_compute_the_same_as_numpy(batch, documents, limits, learnt):
    """The search, the estimates of acceptance, and what they learn."""
    both = []
    for uses_kernels in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if not uses_kernels:
                use_numpy(monkeypatch)
            corpus = SuffixCorpus(2 * CORPUS_CHUNK)
            for tokens, repeats, namespace, num_context in documents:
                corpus.add(tokens * repeats, namespace, num_context)
            matcher = SuffixMatcher(4, 64, corpus)
            for slot, tokens in enumerate(batch):
                matcher.begin(slot, tokens, slot % 3, greedy=slot % 2 == 0)
            slots, rows = range(len(batch)), slice(len(batch))
            results = list(vars(corpus.arrays).values())
            for observed in [*learnt, None]:
                found = matcher.continuations(slots, limits[rows])
                results += found[:-2]
                if observed is not None:
                    lengths = found.lengths.tolist()
                    pairs = zip(observed, lengths, strict=False)
                    accepted = [min(count, length) for (count, _), length in pairs]
                    triples = zip(observed, accepted, lengths, strict=False)
                    known = [min(n + more % 2, length) for (_, more), n, length in triples]
                    matcher.learn(found, known, accepted)
            both.append([*results, *matcher.continuing.acceptance.sums])
    for ours, theirs in zip(*both, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-12, atol=0)


def test_only_texts_with_a_limit_are_continued(backend):
    matcher = SuffixMatcher(3, 64)
    for slot in range(3):
        matcher.begin(slot, [1, 2, 3, 1, 2, 3, 1])
    found = matcher.continuations([2, 0, 1], [0, 4, 2])
    assert found.lengths.tolist() == [0, 4, 2]
    assert found.tokens.tolist() == [[0] * 4, [2, 3, 1, 2], [2, 3, 0, 0]]
    assert (found.acceptance > 0).sum(axis=1).tolist() == [0, 4, 2]


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 6))
def test_a_text_has_the_same_continuation_in_any_company(batch, count):
    matcher = SuffixMatcher(5, 64)
    for slot, tokens in enumerate(batch):
        matcher.begin(slot, tokens)
    together = matcher.continuations(range(len(batch)), [count] * len(batch))
    for slot in range(len(batch)):
        alone = matcher.continuations([slot], [count])
        for ours, other in zip(together[:-2], alone[:-2], strict=True):
            assert np.array_equal(ours[slot], other[0])


def test_longer_matches_outweigh_more_frequent_ones(backend):
    matcher = text_of([1, 2, 3, 4, 9, 3, 4, 5, 3, 4, 5, 1, 2, 3, 4])
    found = matcher.continuations([0], [2])
    assert found.tokens[0].tolist() == [9, 3]
    assert found.match_lengths[0] == 4
    # The others match two tokens, and have a quarter of the weight each.
    assert found.shares[0, 0] == 1 / 1.5
    assert found.votes[0].tolist() == [1, 1]


def test_texts_are_periodic_beyond_their_end(backend):
    matcher = text_of([5, 6, 7, 5, 6, 7, 5])
    assert continuation(matcher, count=8)[0] == [6, 7, 5, 6, 7, 5, 6, 7]


def test_a_slot_forgets_its_earlier_text(backend):
    matcher = SuffixMatcher(2, 64)
    matcher.begin(1, [1, 2, 3, 1, 2, 3])
    matcher.begin(1, [1, 2])
    assert continuation(matcher, 1) == ([], 0)
    matcher.extend(1, [1, 4])
    matcher.truncate(1, 3)
    assert matcher.length(1) == 3
    assert continuation(matcher, 1, 1) == ([2], 1)


def test_a_corpus_is_continued(backend):
    corpus = SuffixCorpus(1024)
    corpus.add(range(100, 160))
    matcher = text_of([1, 2, 110, 111, 112], corpus)
    assert continuation(matcher) == ([113, 114, 115, 116], 3)
    found = matcher.continuations([0], [4])
    assert found.chunks.tolist() == [0]
    # Two matching tokens are too few, and the corpus ends.
    assert continuation(text_of([1, 2, 110, 111], corpus)) == ([], 0)
    assert continuation(text_of([156, 157, 158], corpus)) == ([159], 3)
    assert continuation(text_of([157, 158, 159], corpus)) == ([], 0)


def test_long_documents_are_continued_across_chunks(backend):
    corpus = SuffixCorpus(8192)
    document = np.random.default_rng(0).integers(0, 1000, 3000).tolist()
    corpus.add(document)
    for end in (3, 500, 511, 512, 513, 543, 992, 993, 2990):
        tokens, length = continuation(text_of(document[max(0, end - 20) : end], corpus), count=8)
        assert length >= min(end, 3)
        assert tokens == document[end : end + len(tokens)]
        assert len(tokens) >= 1
    indexed = corpus.arrays.short_index
    assert len(np.unique(indexed[indexed >= 0])) == len(document) - 3


def test_the_own_text_comes_first(backend):
    corpus = SuffixCorpus(1024)
    corpus.add([7, 8, 9, 1, 1, 1])
    own = text_of([7, 8, 9, 2, 2, 7, 8, 9], corpus)
    found = own.continuations([0], [1])
    assert found.tokens.tolist() == [[2]]
    assert found.chunks.tolist() == [-1]
    assert found.shares[0, 0] == 0.5


def test_namespaces_are_separate(backend):
    corpus = SuffixCorpus(1024)
    alice, bob = namespace_of("alice"), namespace_of("bob")
    corpus.add([1, 2, 3, 4, 5], alice)
    corpus.add([6, 7, 8, 9])
    assert continuation(text_of([1, 2, 3], corpus, alice)) == ([4, 5], 3)
    assert continuation(text_of([1, 2, 3], corpus, bob)) == ([], 0)
    assert continuation(text_of([1, 2, 3], corpus, namespace_of(""))) == ([], 0)
    assert continuation(text_of([6, 7, 8], corpus, bob)) == ([9], 3)
    assert len({alice, bob, namespace_of(""), 0}) == 4


def test_what_was_used_least_recently_is_overwritten(backend):
    corpus = SuffixCorpus(2 * CORPUS_CHUNK)
    corpus.add([1, 2, 3, 4])
    corpus.add([11, 12, 13, 14])
    assert continuation(text_of([1, 2, 3], corpus)) == ([4], 3)
    corpus.add([21, 22, 23, 24])
    assert continuation(text_of([1, 2, 3], corpus)) == ([4], 3)
    assert continuation(text_of([11, 12, 13], corpus)) == ([], 0)
    assert continuation(text_of([21, 22, 23], corpus)) == ([24], 3)
    assert corpus.num_tokens == 8
    for _ in range(50):
        corpus.add(range(600))
    assert corpus.num_tokens <= corpus.max_tokens


def test_the_context_of_an_output_is_not_continued(backend):
    corpus = SuffixCorpus(2048)
    corpus.add([*range(50), 90, 91], num_context=50)
    assert continuation(text_of([20, 21, 22, 23], corpus)) == ([], 0)
    assert continuation(text_of([47, 48, 49], corpus)) == ([90, 91], 3)


def test_a_corpus_is_saved_and_loaded(backend, tmp_path):
    corpus = SuffixCorpus(4 * CORPUS_CHUNK)
    document = np.random.default_rng(1).integers(0, 1000, 1200).tolist()
    corpus.add(document)
    corpus.add([1, 2, 3, 4], namespace_of("alice"), num_context=1)
    corpus.save(tmp_path / "corpus.safetensors", "tokenizer")
    for max_tokens in (corpus.max_tokens, 8 * CORPUS_CHUNK):
        loaded = SuffixCorpus(max_tokens)
        loaded.load(tmp_path / "corpus.safetensors", "tokenizer")
        assert loaded.num_tokens == corpus.num_tokens
        for text, namespace in ((document[590:600], 5), ([1, 2, 3], namespace_of("alice"))):
            expected = continuation(text_of(text, corpus, namespace))
            assert expected[1] >= 3
            assert continuation(text_of(text, loaded, namespace)) == expected
    small = SuffixCorpus(CORPUS_CHUNK)
    small.load(tmp_path / "corpus.safetensors", "tokenizer")
    assert continuation(text_of([1, 2, 3], small, namespace_of("alice"))) == ([4], 3)


def test_files_that_are_no_corpus_are_refused(tmp_path):
    corpus = SuffixCorpus(100)
    corpus.save(tmp_path / "corpus", "one")
    (tmp_path / "text").write_text("hello")
    for name, tokenizer, words in (
        ("corpus", "other", "tokenizer of another model"),
        ("text", "one", "cannot be read"),
        ("missing", "one", "cannot be read"),
    ):
        caught = error_of(
            corpus.load, tmp_path / name, tokenizer, error=InvalidParameterError, match=words
        )
        assert caught.field == "corpus"
    with pytest.raises(InvalidParameterError, match="corpus_tokens"):
        SuffixCorpus(0)


def test_damaged_files_add_nothing(tmp_path):
    for name, damaged in [
        ("tokens", torch.zeros(3, dtype=torch.int32)),
        ("tokens", torch.zeros(1, CORPUS_CHUNK, dtype=torch.bfloat16)),
        ("tokens", torch.full((1, CORPUS_CHUNK), -1, dtype=torch.int32)),
        ("lengths", torch.ones(1)),
        ("lengths", torch.tensor([CORPUS_CHUNK + 1])),
        ("namespaces", torch.zeros(2, dtype=torch.int64)),
        ("num_context", torch.tensor([-1])),
        ("num_context", None),
    ]:
        corpus = SuffixCorpus(100)
        corpus.add([1, 2, 3, 4])
        corpus.save(tmp_path / "corpus", "one")
        with safe_open(tmp_path / "corpus", "pt") as file:
            metadata = file.metadata()
            tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
        tensors[name] = damaged
        left = {each: values for each, values in tensors.items() if values is not None}
        save_file(left, tmp_path / "damaged", metadata)
        loaded = SuffixCorpus(100)
        error_of(
            loaded.load,
            tmp_path / "damaged",
            "one",
            error=InvalidParameterError,
            match="cannot be read",
        )
        assert loaded.num_tokens == 0, name


def test_threads_share_a_corpus():
    corpus = SuffixCorpus(4 * CORPUS_CHUNK)
    errors = []

    def work(number):
        try:
            matcher = text_of([number, 1, 2, 3], corpus)
            for _ in range(300):
                corpus.add([number, 1, 2, 3, number])
                tokens, length = continuation(matcher)
                assert length in (3, 4)
                assert tokens
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number + 10]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Observed:
    """The estimator, and one token that it predicts and learns from."""

    def __init__(self):
        self.model = MatchAcceptance()

    def evidence(self, length, greedy=True, share=1.0, votes=1, corpus=False):
        return (
            np.array([greedy]),
            np.full((1, 2), share),
            np.full((1, 2), votes),
            np.array([length]),
            np.array([corpus]),
        )

    def predict(self, *arguments, **options):
        return self.model.predict(*self.evidence(*arguments, **options))[0]

    def learn(self, num_known, num_accepted, *arguments, **options):
        evidence = self.evidence(*arguments, **options)
        self.model.learn(*evidence, np.array([num_known]), np.array([num_accepted]))


def test_acceptance_is_learnt_by_match_length_and_temperature():
    seen = Observed()
    before = seen.predict(2)
    assert before[0] < before[1] < 1
    sampled = seen.predict(2, greedy=False)
    for _ in range(200):
        seen.learn(2, 0, 2)
        seen.learn(1, 1, 20)
    assert seen.predict(2)[0] < 0.1
    assert seen.predict(20)[0] == HIGHEST
    assert np.array_equal(seen.predict(2, greedy=False), sampled)
    assert abs(seen.predict(20, share=0.5)[0] - 0.5) < 0.02


def test_acceptance_is_learnt_by_votes_and_source():
    seen = Observed()
    for _ in range(200):
        for votes, corpus, accepted in ((1, False, 0), (4, False, 1), (1, True, 1)):
            seen.learn(1, accepted, 4, votes=votes, corpus=corpus)
    assert seen.predict(4, votes=1)[0] < 0.1
    assert seen.predict(4, votes=4)[0] > 0.9
    assert seen.predict(4, votes=1, corpus=True)[0] > 0.9
