"""The files that the reference values of llama.cpp belong to are made again, byte for byte."""

import hashlib
import json

import pytest

from .gguf_files import CASES, VOCABULARIES, make, recorded

EVERY = {**CASES, **VOCABULARIES}
RECORDED = recorded()["cases"]
# Each way to change a file.
NAMES = [
    "llama",
    "llama, rope_freqs, linear",
    "llama, experts",
    "gemma3, window, pattern of booleans",
    "phi3, separate qkv",
    "ends: qwen, fim keys",
    "ends: sentencepiece",
]


@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_that_were_recorded(tmp_path, name):
    file = make(EVERY[name], tmp_path / "case.gguf")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == RECORDED[name]["sha256"]


def test_every_case_is_recorded_as_it_is():
    assert list(RECORDED) == list(EVERY)
    for name, case in EVERY.items():
        found = RECORDED[name]
        changed = [found["architecture"], found["keys"], found["tensors"]]
        assert changed == json.loads(json.dumps([case.architecture, case.keys, case.tensors]))
        assert len(found.keys() & {"sum", "refused", "ends"}) == 1, name
