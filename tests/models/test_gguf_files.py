"""The files that the reference values of llama.cpp belong to are made again, byte for byte."""

import hashlib
import json
from dataclasses import asdict, fields

import pytest

from .gguf_files import CASES, VOCABULARIES, Case, make, recorded

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
        parts = {field.name for field in fields(Case)}
        whole = asdict(Case(case.architecture)) | {key: found[key] for key in parts & found.keys()}
        assert json.dumps(whole) == json.dumps(asdict(case)), name
        assert len(found.keys() & {"sum", "refused", "ends"}) == 1, name
