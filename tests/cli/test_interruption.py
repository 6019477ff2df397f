"""Ctrl-C while ``draftwise generate`` runs: what there is so far is shown."""

import json
import os
import signal
import subprocess
import sys

import pytest

from draftwise.cli.interruption import interruptible

from ..tiny_models import Recipe

TARGET = Recipe(vocab=300, context=4096, tokenizer=True, config={"eos_token_id": None})
SENT_AFTER_STEPS = 8
PATIENCE_SECONDS = 120
# As a user who presses ctrl-C after some steps.
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
    return subprocess.run(
        [sys.executable, "-c", script, str(after), "generate", *arguments],
        start_new_session=group,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.fixture
def endless(models):
    """Options for texts that would take very long."""
    return ["--target", models.folder(TARGET), "--max-tokens", "4000", "--dtype", "float32"]


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("abc", "bed", "cab")))
    return str(file)


def test_what_was_generated_is_printed_into_a_pipe(endless):
    done = interrupted("a bed", *endless)
    assert done.returncode == 130
    assert "1  a bed" in done.stdout
    assert f"{SENT_AFTER_STEPS} tokens in" in done.stdout
    assert "Traceback" not in done.stderr


def test_json_has_what_was_generated(endless):
    done = interrupted("a bed", "--json", *endless)
    assert done.returncode == 130
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["finish_reason"] == "cancelled"
    assert len(output["token_ids"]) == SENT_AFTER_STEPS
    assert output["text"]


def test_with_drafts_and_several_prompts(endless, models, prompt_file):
    """Two run at once; the third has not begun."""
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


def test_replicas_that_are_interrupted_too_are_no_other_error(endless, models):
    """A terminal sends ctrl-C to all processes of a command."""
    arguments = ["--draft", models.folder(TARGET.draft()), "--policy", "fixed"]
    done = interrupted("a bed", "--json", "--draft-replicas", "2", *arguments, *endless, group=True)
    assert done.returncode == 130
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["finish_reason"] == "cancelled"
    assert output["token_ids"]


def test_texts_that_have_ended_stay_whole(endless, prompt_file):
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


def test_a_comparison_shows_what_came_with_drafts(endless, models):
    arguments = ["--draft", models.folder(TARGET.draft()), "--policy", "fixed", "--compare"]
    arguments += ["--max-tokens", "40", "--json"]
    done = interrupted("a bed", *endless, *arguments, after=70)
    assert done.returncode == 130
    result = json.loads(done.stdout)
    assert "compare" not in result
    (output,) = result["outputs"]
    assert output["finish_reason"] == "cancelled"


@pytest.mark.parametrize("way", [[], ["--json"]])
def test_a_reader_that_is_gone_is_no_other_error(endless, way):
    """A ctrl-C in a terminal ends the program that reads as well."""
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
            _, told = run.communicate(timeout=PATIENCE_SECONDS)
    finally:
        os.close(writes)
    assert run.returncode == 130
    assert "rror" not in told


def test_a_second_ctrl_c_ends_at_once():
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


def test_what_others_do_with_ctrl_c_stays_theirs():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as interruption:
            signal.raise_signal(signal.SIGINT)
            interruption.check()
    finally:
        signal.signal(signal.SIGINT, before)
