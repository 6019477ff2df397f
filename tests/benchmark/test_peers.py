"""Other engines in separate processes: the protocol and its failures."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftwise.benchmark import peers as module
from draftwise.benchmark.peer_modes import PeerMode
from draftwise.benchmark.peers import Peer, PeerModels, peers
from draftwise.errors import InvalidParameterError, PeerError
from draftwise.params import SamplingParams

MODELS = PeerModels("target-folder", "draft-folder", "bfloat16", 2, 128, 8, stop_token_ids=(3, 4))
ECHO = """
import json, os, sys
settings = json.loads(sys.stdin.readline())
print("chatter")
print(json.dumps({"version": "1", "draft": settings["draft"], "engine": sys.argv[1],
                  "threads": os.environ["OMP_NUM_THREADS"]}), flush=True)
for line in sys.stdin:
    wanted = json.loads(line)
    answers = [prompt[::-1] for prompt in wanted["prompts"]]
    print(json.dumps({"answers": answers, "seconds": 0.25}), flush=True)
"""
COUNTING = ECHO.replace('"seconds": 0.25', '"seconds": 0.25, "counts": {"drafts": 3}')


@pytest.fixture
def peer(tmp_path, monkeypatch):
    made = []

    def make(worker, mode=None, interpreter=sys.executable, models=MODELS):
        script = tmp_path / "worker.py"
        script.write_text(worker)
        monkeypatch.setattr(module, "_WORKER", script)
        mode = mode or PeerMode("draft 5", "model")
        made.append(Peer("vllm", mode, interpreter, models, tmp_path / "logs" / "peer.log"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(peer):
    return peer.generate([[1, 2, 3], [4, 5]], [SamplingParams(max_tokens=3)] * 2)


def test_it_runs_in_its_own_process(peer):
    made = peer(ECHO)
    turn = ask(made)
    assert turn.answers == [[3, 2, 1], [5, 4]]
    assert (turn.seconds, turn.num_tokens, turn.records) == (0.25, 5, None)
    assert made.name == "vllm draft 5"
    said = made.describe()
    assert (said["version"], said["engine"], said["threads"]) == ("1", "vllm_engine", "2")
    assert ask(made).answers == turn.answers


def test_counters_are_returned(peer):
    assert ask(peer(COUNTING)).counts == {"drafts": 3.0}
    assert ask(peer(ECHO)).counts == {}


@pytest.mark.parametrize("drafts", ["none", "text"])
def test_a_mode_without_a_draft_model_has_no_draft_setting(peer, drafts):
    made = peer(ECHO, PeerMode("", drafts))
    ask(made)
    assert made.name == "vllm"
    said = made.describe()
    assert (said["draft"], said["drafts"]) == (None, drafts)


def test_a_mode_with_a_head_drafts_with_the_head(peer):
    models = replace(MODELS, draft=None, head="head-folder")
    made = peer(ECHO, PeerMode("eagle3 5", "head"), models=models)
    ask(made)
    assert made.describe()["draft"] == "head-folder"


TELLING = ECHO.replace(
    "    answers = [",
    "    print(json.dumps(wanted), file=sys.stderr, flush=True)\n    answers = [",
)


def wanted_by(peer, params):
    """Request that the worker gets."""
    peer.generate([[1], [2]], params)
    return json.loads(peer._printed().splitlines()[-1])


@pytest.mark.parametrize(("ignore_eos", "stops"), [(True, []), (False, [3, 4])])
def test_a_request_has_the_sampling_parameters(peer, ignore_eos, stops):
    shared = {"max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 40}
    params = [SamplingParams(**shared, seed=seed, ignore_eos=ignore_eos) for seed in (8, 9)]
    wanted = wanted_by(peer(TELLING), params)
    rest = {"prompts": [[1], [2]], "seeds": [8, 9], "stop_token_ids": stops}
    assert wanted == shared | rest


def test_a_request_without_seeds(peer):
    assert wanted_by(peer(TELLING), [SamplingParams(max_tokens=3)] * 2)["seeds"] is None


def test_it_must_run_on_the_same_device(peer):
    with pytest.raises(PeerError, match="runs on the device 'cuda', and Draftwise on 'cpu'"):
        ask(peer(ECHO.replace('"version": "1"', '"version": "1", "device": "cuda"')))


def test_all_prompts_must_be_answered(peer):
    with pytest.raises(PeerError, match="answered 1 of 2 prompts"):
        ask(peer(ECHO.replace('wanted["prompts"]]', 'wanted["prompts"][:1]]')))


def test_an_engine_is_named_once(tmp_path):
    with pytest.raises(InvalidParameterError, match="'vllm' is named more than once"):
        peers(["vllm=/a/python", "vllm=/b/python"], MODELS, tmp_path)


LEAVING = ECHO.replace(
    "settings = json",
    "import subprocess\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    "print(child.pid, file=sys.stderr, flush=True)\nsettings = json",
).replace('"seconds": 0.25', '"error": "ValueError: fell over"')


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states are not told here")
def test_processes_of_a_failed_engine_end_too(peer):
    made = peer(LEAVING)
    with pytest.raises(PeerError, match="fell over"):
        ask(made)
    child = int(made._printed().split()[0])
    for _ in range(500):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("it still runs")


def test_closing_ends_the_process(peer):
    made = peer(ECHO)
    ask(made)
    process = made._process
    made.close()
    made.close()
    assert process.poll() == 0


def is_stopped(pid):
    """Process state as reported by the system, once it has changed."""
    for _ in range(500):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states are not told here")
def test_its_processes_are_paused_between_turns(peer):
    """Including its child processes, as spinning threads would slow down other contenders."""
    child = "import time\nwhile True: time.sleep(0.001)"
    started = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    made = peer(started + ECHO.replace('{"version"', '{"child": p.pid, "version"') + "p.kill()")
    for _ in range(2):
        assert ask(made).answers == [[3, 2, 1], [5, 4]]
        assert is_stopped(made._process.pid)
        assert is_stopped(made.describe()["child"])
    process = made._process
    made.close()
    assert process.poll() == 0


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        ("import sys; sys.exit('no such engine')", "exited.*no such engine"),
        (ECHO.replace('"answers": answers, ', ""), "sent an invalid reply"),
        (ECHO.replace("0.25", "'x'"), "sent an invalid reply"),
        (ECHO.replace('{"version"', '{"error": "out of memory", "version"'), "out of memory"),
        (ECHO.replace("for line", "sys.exit(3)\nfor line"), "exited"),
        ("import sys\nprint('1 / 0', file=sys.stderr)\n1 / 0", "ZeroDivisionError: division"),
        (
            "import os, sys; print('core.OutOfRangeError: big', file=sys.stderr)\n"
            "print('frees memory', file=sys.stderr, flush=True); os._exit(1)",
            "last output: core.OutOfRangeError: big",
        ),
    ],
)
def test_failures_are_reported_with_reason_and_log(peer, tmp_path, worker, why):
    with pytest.raises(PeerError, match=why) as caught:
        ask(peer(worker))
    assert caught.value.field == "vllm draft 5"
    assert caught.value.message.endswith(f"(its log is {tmp_path / 'logs' / 'peer.log'})")
    assert "\n" not in caught.value.message


def test_an_error_in_another_process_is_found_in_the_log(peer):
    failing = """
import json, sys
print("(EngineCore pid=7) ERROR [core.py:8] ValueError: no memory for the cache", file=sys.stderr)
print("(EngineCore pid=7) ERROR [core.py:8] shutting down", file=sys.stderr)
error = "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}"
print(error, file=sys.stderr, flush=True)
print(json.dumps({"error": error}), flush=True)
"""
    with pytest.raises(PeerError, match="ValueError: no memory for the cache") as caught:
        ask(peer(failing))
    assert "root cause" not in caught.value.message


# Stand-ins for OpenVINO and its exporter, which fails.
TASKS = """
class Newest:
    MAX_TRANSFORMERS_VERSION = "5.0"

class Any:
    MAX_TRANSFORMERS_VERSION = None

class TasksManager:
    def get_exporter_config_constructor(exporter, *, model_type, task, library_name):
        assert (exporter, task) == ("openvino", "text-generation-with-past")
        import functools
        return functools.partial({"gemma3_text": Newest, "llama": Any}[model_type], task)
"""
GENAI = "class SchedulerConfig: pass\ndef draft_model(*_, **__): raise ValueError('converted')"
EXPORTER = """
import sys
print("Traceback (most recent call last):", file=sys.stderr)
print("KeyError: 'a layer that nobody knows'", file=sys.stderr)
sys.exit(1)
"""


@pytest.fixture
def openvino(tmp_path, monkeypatch):
    """OpenVINO with drafts, in an environment with that version of transformers."""
    made = []

    def make(transformers, target_type):
        site = tmp_path / "site"
        (site / f"transformers-{transformers}.dist-info").mkdir(parents=True)
        (site / f"transformers-{transformers}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: transformers\nVersion: {transformers}\n"
        )
        (site / "optimum" / "commands").mkdir(parents=True)
        (site / "optimum" / "exporters" / "openvino").mkdir(parents=True)
        (site / "optimum" / "exporters" / "openvino" / "model_configs.py").touch()
        (site / "optimum" / "exporters" / "tasks.py").write_text(TASKS)
        (site / "optimum" / "commands" / "optimum_cli.py").write_text(EXPORTER)
        (site / "openvino_genai.py").write_text(GENAI)
        (site / "openvino.py").write_text("class Tensor: pass")
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path / "cache"))
        for name, kind in (("target", target_type), ("draft", "llama")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
        models = PeerModels(
            str(tmp_path / "target"), str(tmp_path / "draft"), "bfloat16", 2, 128, 8
        )
        mode = PeerMode("draft", "model").with_length(3)
        made.append(Peer("openvino", mode, sys.executable, models, tmp_path / "openvino.log"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_export_that_would_fail_is_not_started(openvino):
    with pytest.raises(
        PeerError, match=r"requires transformers 5\.0 or older.* has 5\.0\.1"
    ) as caught:
        ask(openvino("5.0.1", "gemma3_text"))
    assert f"{sys.executable} -m pip install 'transformers<=5.0'" in caught.value.message
    assert "nobody knows" not in caught.value.message


@pytest.mark.parametrize(
    ("version", "kind"),
    [("4.57.6", "gemma3_text"), ("5.0.0", "gemma3_text"), ("5.1.0", "llama"), ("5.1.0", "new")],
)
def test_an_export_failure_includes_the_reason(openvino, tmp_path, version, kind):
    """The error has the last line of the exporter's output, not the command."""
    with pytest.raises(PeerError, match=r"failed: KeyError: 'a layer that nobody") as caught:
        ask(openvino(version, kind))
    assert "optimum_cli" not in caught.value.message
    assert str(tmp_path / "openvino.log") in caught.value.message
    assert "Traceback" in (tmp_path / "openvino.log").read_text()


def test_a_converted_model_is_not_exported_again(openvino, tmp_path):
    made = openvino("5.1.0", "gemma3_text")
    for name in ("target", "draft"):
        path = str(tmp_path / name).strip("/").replace("/", "-")
        (tmp_path / "cache" / "openvino" / path).mkdir(parents=True)
    with pytest.raises(PeerError, match="ValueError: converted"):
        ask(made)


def test_a_missing_interpreter(peer):
    with pytest.raises(PeerError, match="cannot run"):
        ask(peer(ECHO, interpreter="/nowhere/python"))


def test_a_peer_that_hangs_times_out(peer, monkeypatch):
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.2)
    made = peer(ECHO.replace("    answers =", "    import time; time.sleep(60)\n    answers ="))
    with pytest.raises(PeerError, match="timed out"):
        ask(made)
    assert made._process is None


def test_each_mode_is_a_peer_with_its_own_log(tmp_path):
    found = peers(["vllm=/opt/bin/python"], MODELS, tmp_path, [3])
    assert [each.name for each in found] == ["vllm", "vllm draft 5", "vllm ngram 3", "vllm suffix"]
    assert len({each._log for each in found}) == 4
    assert {each._interpreter for each in found} == {"/opt/bin/python"}
    assert found[0].refusal(8, SamplingParams()) is None
