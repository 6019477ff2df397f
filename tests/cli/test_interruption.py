"""Ctrl-C during ``draftwise generate``: the text generated so far is printed."""

import json
import os
import signal
import subprocess
import sys

import pytest

from draftwise.cli.interruption import interruptible

from .. import forked
from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=300, context=4096, tokenizer=True, config={"eos_token_id": None})
SENT_AFTER_STEPS = 8
PATIENCE_SECONDS = 120
# Simulates a user who presses ctrl-C after some steps.
SCRIPT = """
import os, signal, sys, time
from draftwise.cli import main
from draftwise.engine.engine import Engine

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
after, *sys.argv[1:] = sys.argv[1:]
step, done = Engine.step, 0

def counted(engine):
    global done
    done += 1
    if done == int(after):
        os.kill(os.getpid(), signal.SIGINT)
    return step(engine)

Engine.step = counted
main()
"""


def interrupted(*arguments, after=SENT_AFTER_STEPS, group=False):
    script = SCRIPT.replace("os.kill(os.getpid()", "os.killpg(0") if group else SCRIPT
    return forked.run(str(after), "generate", *arguments, program=script, new_session=group)


@pytest.fixture
def endless(models):
    """Options for texts that would take very long to generate."""
    return ["--target", models.folder(TARGET), "--max-tokens", "4000", "--dtype", "float32"]


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("abc", "bed", "cab")))
    return str(file)


def test_generated_text_is_printed_to_a_pipe(endless):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(SENT_AFTER_STEPS), "generate", "a bed", *endless],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 130
    assert "1  a bed" in done.stdout
    assert f"{SENT_AFTER_STEPS} tokens in" in done.stdout
    assert "Traceback" not in done.stderr


def test_json_contains_the_generated_text(endless):
    done = interrupted("a bed", "--json", *endless)
    assert done.returncode == 130
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["finish_reason"] == "cancelled"
    assert len(output["token_ids"]) == SENT_AFTER_STEPS
    assert output["text"]


def test_every_started_text_is_printed(endless, models, prompt_file):
    """Two prompts run at once; the third has not started."""
    arguments = ["--draft", models.folder(TARGET.draft()), "--policy", "fixed", "--json"]
    arguments += ["--prompts", prompt_file, "--batch-size", "2"]
    done = interrupted(*endless, *arguments)
    assert done.returncode == 130
    result = json.loads(done.stdout)
    assert [each["finish_reason"] for each in result["outputs"]] == ["cancelled"] * 3
    first, second, third = (len(each["token_ids"]) for each in result["outputs"])
    assert min(first, second) >= SENT_AFTER_STEPS
    assert third == 0
    assert result["timing"]["num_tokens"] == first + second


def test_interrupted_replicas_cause_no_error(endless, models):
    """A terminal sends SIGINT to all processes of a command."""
    arguments = ["--draft", models.folder(TARGET.draft()), "--policy", "fixed"]
    done = interrupted("a bed", "--json", "--draft-replicas", "2", *arguments, *endless, group=True)
    assert done.returncode == 130
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["finish_reason"] == "cancelled"
    assert output["token_ids"]


def test_finished_texts_are_complete(endless, prompt_file):
    arguments = ["--prompts", prompt_file, "--batch-size", "1", "--json", "--max-tokens", "5"]
    done = interrupted(*endless, *arguments)
    assert done.returncode == 130
    outputs = json.loads(done.stdout)["outputs"]
    assert [(each["finish_reason"], len(each["token_ids"])) for each in outputs] == [
        ("length", 5),
        ("cancelled", SENT_AFTER_STEPS - 5),
        ("cancelled", 0),
    ]
    shown = interrupted(*endless, *(each for each in arguments if each != "--json"))
    assert shown.returncode == 130
    assert [title in shown.stdout for title in ("1  abc", "2  bed", "3  cab")] == [True] * 3


def test_a_comparison_shows_the_speculative_text(endless, models):
    arguments = ["--draft", models.folder(TARGET.draft()), "--policy", "fixed", "--compare"]
    arguments += ["--max-tokens", "40", "--json"]
    done = interrupted("a bed", *endless, *arguments, after=70)
    assert done.returncode == 130
    result = json.loads(done.stdout)
    assert "compare" not in result
    (output,) = result["outputs"]
    assert output["finish_reason"] == "cancelled"


@pytest.mark.parametrize("way", [[], ["--json"]])
def test_a_closed_pipe_causes_no_error(endless, way):
    """Ctrl-C in a terminal also ends the reader of a pipe."""
    reads, writes = os.pipe()
    try:
        leaves = SCRIPT.replace("os.kill(", f"os.close({reads}); os.kill(")
        command = [sys.executable, "-c", leaves, str(SENT_AFTER_STEPS), "generate", "a bed"]
        with subprocess.Popen(
            [*command, *endless, *way],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[reads],
        ) as run:
            os.close(reads)
            _, stderr = run.communicate(timeout=PATIENCE_SECONDS)
    finally:
        os.close(writes)
    assert run.returncode == 130
    assert "rror" not in stderr


def test_a_second_ctrl_c_exits_immediately():
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with interruptible() as interruption:
            interruption.check()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                interruption.check()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_handlers_of_ctrl_c_are_kept():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as interruption:
            signal.raise_signal(signal.SIGINT)
            interruption.check()
    finally:
        signal.signal(signal.SIGINT, before)
