"""Configurations of other engines."""

import pytest

from draftwise.benchmark.peer_modes import PEERS, modes_of
from draftwise.errors import InvalidParameterError
from draftwise.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def labels(engine, has_draft=False, lengths=()):
    return [mode.label for mode in modes_of(engine, has_draft, lengths)]


@pytest.mark.parametrize(
    ("engine", "model", "text"),
    [
        ("transformers", ["assisted"], ["prompt lookup 3", "prompt lookup 8"]),
        ("vllm", ["draft 5"], ["ngram 3", "ngram 8", "suffix"]),
        (
            "openvino",
            ["draft 3", "draft 5", "confidence"],
            ["prompt lookup 3", "prompt lookup 8"],
        ),
        ("llamacpp", ["draft"], ["prompt lookup 3", "prompt lookup 8"]),
    ],
)
def test_modes_depend_on_the_draft(engine, model, text):
    assert labels(engine) == [""]
    assert labels(engine, has_draft=True) == ["", *model]
    assert labels(engine, lengths=[3, 8]) == ["", *text]


def test_an_engine_that_runs_heads():
    plain, head = modes_of("vllm", False, [], has_head=True)
    assert (plain.drafts, head.drafts, head.label) == ("none", "head", "eagle3 5")
    assert head.settings == {"method": "eagle3", "num_speculative_tokens": 5}
    assert [mode.drafts for mode in modes_of("openvino", False, [], has_head=True)] == ["none"]


def test_a_mode_has_its_draft_length():
    lengths = [m.settings.get("num_speculative_tokens") for m in modes_of("vllm", False, [3, 8])]
    assert lengths == [None, 3, 8, None]


def test_an_engine_that_requires_a_draft():
    assert labels("vllm-draftwise", has_draft=True) == [""]
    assert labels("vllm-draftwise", lengths=[5]) == ["suffix 5", "ngram 5"]
    with pytest.raises(InvalidParameterError, match="requires a draft") as caught:
        labels("vllm-draftwise")
    assert caught.value.field == "peers"


def test_modes_for_one_prompt_refuse_larger_batches():
    _, assisted = modes_of("transformers", True, ())
    assert assisted.refusal(1, GREEDY) is None
    assert assisted.refusal(2, GREEDY) == "answers at most 1 prompt at once"


@pytest.mark.parametrize(
    ("temperature", "top_p", "is_refused"),
    [(0, 0.9, False), (0.7, 1, False), (1, 0.9, False), (0.7, 0.9, True)],
)
def test_modes_that_would_sample_another_distribution_are_refused(temperature, top_p, is_refused):
    params = SamplingParams(temperature=temperature, top_p=top_p)
    plain, lookup = modes_of("llamacpp", False, [4])
    assert plain.refusal(1, params) is None
    assert (lookup.refusal(1, params) is not None) == is_refused


def test_an_unknown_engine():
    known = "transformers, vllm, vllm-draftwise, openvino, llamacpp"
    with pytest.raises(InvalidParameterError, match=rf"{known}, got .llama."):
        labels("llama")


def test_names_of_modes_are_unique():
    for engine in PEERS:
        found = labels(engine, has_draft=True, lengths=[1, 2])
        assert len(set(found)) == len(found)
