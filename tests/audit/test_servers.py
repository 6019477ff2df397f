"""Audits of Draftwise's own server, with several drafts, and with a wrong rule of acceptance."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from draftwise.audit import sampling
from draftwise.audit.run import audit
from draftwise.audit.settings import AuditSettings
from draftwise.serving import link
from draftwise.serving.settings import EngineSettings

from .. import forked
from ..serving.running import running
from ..stand_ins import unguarded
from . import wrong_engine
from .auditing import failures, statuses

pytestmark = pytest.mark.slow
ENGINE = EngineSettings(
    "zoo:target",
    unguarded("zoo:draft", policy="fixed", num_speculative_tokens=4),
    dtype="float32",
    max_batch_size=32,
    max_model_len=256,
    num_threads=1,
)


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch):
    """Fork engines from a process that has imported PyTorch, in place of a new interpreter."""
    context = SimpleNamespace(get_context=lambda _: forked.context())
    monkeypatch.setattr(link, "multiprocessing", context)


def drafting(draft, **settings):
    return replace(ENGINE, speculation=unguarded(draft, policy="fixed", **settings))


def audited(url, **settings):
    chosen = {"requests": 2800, "num_prompts": 8, "max_tokens": 24, **settings}
    return audit(AuditSettings(url=url, **chosen))


DRAFTS = {
    "model": ENGINE,
    "suffix": drafting("suffix", num_speculative_tokens=6),
    "both": drafting(("suffix", "zoo:draft"), num_speculative_tokens=4),
    "head": drafting("zoo:eagle3", num_speculative_tokens=3),
}


@pytest.mark.parametrize(
    "draft",
    [
        "model",
        "suffix",
        pytest.param("both", marks=pytest.mark.exhaustive),
        pytest.param("head", marks=pytest.mark.exhaustive),
    ],
)
def test_draftwise_passes(draft):
    with running(DRAFTS[draft]) as server:
        result = audited(server.url)
    assert not failures(result)
    assert result.status == "passed"
    assert result.engine == "draftwise"
    assert result.drafts[0] > 100
    assert not result.abilities.missing()
    # A request with a seed and a draft model may get another text than without drafts.
    assert set(statuses(result).values()) <= {"passed", "noted"}


@pytest.mark.exhaustive
def test_forty_audits_of_draftwise(monkeypatch):
    """Of forty correct servers, at most one fails at the level of audits outside these tests."""
    monkeypatch.setattr(sampling, "LEVEL", 0.01)
    num_failed = 0
    for draft in DRAFTS.values():
        with running(draft) as server:
            for _ in range(10):
                result = audited(server.url, checks=("sampling",), num_prompts=1)
                assert result.sampled.tests
                num_failed += bool(failures(result))
    assert num_failed <= 1


@pytest.mark.exhaustive
def test_the_baseline_may_be_loaded_here():
    with running(ENGINE) as server:
        settings = AuditSettings(
            server.url,
            baseline_model="zoo:target",
            checks=("greedy", "invariants"),
            num_prompts=4,
            max_tokens=16,
        )
        result = audit(settings, baseline_options={"dtype": "float32", "max_model_len": 256})
    assert not failures(result)
    assert "loaded by Draftwise" in result.baseline


@pytest.mark.exhaustive
def test_a_wrong_residual_of_the_engine_fails(monkeypatch):
    monkeypatch.setattr(link, "worker", SimpleNamespace(run=wrong_engine.run))
    with running(ENGINE) as server:
        result = audited(server.url, checks=("sampling",), requests=6000)
    found = failures(result)
    assert found
    assert all(check.startswith("sampling") for check in found)


@pytest.mark.exhaustive
def test_lenience_that_is_not_declared_fails():
    lenient = drafting("zoo:draft", num_speculative_tokens=4, lenience=0.7)
    with running(lenient) as server:
        result = audited(server.url, checks=("sampling",), requests=12_000)
    assert failures(result)


def test_the_command_writes_a_report(draftwise, tmp_path):
    with running(ENGINE) as server:
        given = ("--requests=1500", "--num-prompts=4", "--max-tokens=16", "-o", tmp_path)
        status, out, _ = draftwise("audit", server.url, *given, "--checks=greedy,invariants")
    assert status == 0, out
    assert "greedy answers at once" in out
    assert f"passed: zoo:target at {server.url} (draftwise)" in " ".join(out.split())
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["status"] == "passed"
    assert report["sampling"] is None
    assert (tmp_path / "audit.html").exists()
