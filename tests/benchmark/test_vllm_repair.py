"""The repair of vLLM's sampling, with a stand-in for vLLM."""

import sys
import types

import pytest
import torch

from draftwise.benchmark.peer_engines import vllm_repair


@pytest.fixture
def sampler(monkeypatch):
    """vLLM's module, by the version that the package reports."""

    def make(version):
        monkeypatch.setattr(vllm_repair, "first_version", lambda *names: version)
        module = types.ModuleType("vllm.v1.sample.rejection_sampler")
        module.expand_batch_to_tokens = None
        package = types.ModuleType("vllm.v1.sample")
        package.rejection_sampler = module
        for name in ("vllm", "vllm.v1"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vllm_repair.repair()
        return module

    return make


@pytest.mark.parametrize(
    ("values", "ends", "replaced", "expected"),
    [
        ([0.5, 0.7], [2, 3], {}, [0.5, 0.5, 0.7]),
        ([0.5, 0.7, 0.9], [2, 2, 4], {}, [0.5, 0.5, 0.9, 0.9]),
        ([0.0, 0.7], [1, 3], {"replace_from": 0, "replace_to": 1}, [1.0, 0.7, 0.7]),
        ([0.5], [0], {}, []),
    ],
)
def test_each_drafted_token_has_the_parameter_of_its_request(
    sampler, values, ends, replaced, expected
):
    expand = sampler("0.32.0").expand_batch_to_tokens
    found = expand(
        torch.tensor(values), torch.tensor(ends, dtype=torch.int32), ends[-1], **replaced
    )
    assert torch.equal(found, torch.tensor(expected))


def test_integers_stay_integers(sampler):
    expand = sampler("0.32.0").expand_batch_to_tokens
    assert (
        expand(torch.tensor([3, 4], dtype=torch.int32), torch.tensor([1, 2]), 2).dtype
        == torch.int32
    )


@pytest.mark.parametrize("version", ["0.33.0", ""])
def test_other_versions_are_not_changed(sampler, version):
    assert sampler(version).expand_batch_to_tokens is None
