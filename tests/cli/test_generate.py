"""``draftwise generate`` as a user runs it, on tiny models."""

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from draftwise.cli.generate_run import _hint
from draftwise.engine.parallel.pinned_threads import shares
from draftwise.outputs import FinishReason, RequestOutput

from ..tiny_models import Recipe
from .running import assert_refused, write_prompts

TARGET = Recipe(vocab=300, context=96, tokenizer=True)
DRAFT = TARGET.draft()


@pytest.fixture
def command(models, draftwise):
    """Run the command with the tiny pair; returns (exit status, stdout, stderr).

    The default policy is ``fixed`` without a guard, which is deterministic and measures no
    latencies.
    """

    def run(*arguments, pair=True, policy="fixed"):
        named = ["--target", models.folder(TARGET), "--draft", models.folder(DRAFT)] if pair else []
        chosen = any(str(each).startswith("--policy") for each in arguments) or policy is None
        named += [] if chosen else ["--policy", policy]
        if policy is not None:
            named.append("--no-guard")
        return draftwise(*arguments, *named)

    return run


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "kinds.jsonl"
    records = [{"prompt": "abc"}, {"question": "cab"}, {"turns": ["bed", "x"]}, {"text": "fed"}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_json_is_one_object_with_outputs_and_timing(command):
    status, out, _ = command("generate", "head", "--json", "--max-tokens", "12", "--dtype=float32")
    assert status == 0
    result = json.loads(out)
    (output,) = result["outputs"]
    assert output["prompt"] == "head"
    assert len(output["token_ids"]) == 12
    assert output["finish_reason"] == "length"
    assert output["error"] is None
    assert output["speculation"]["lossless"] is True
    assert output["speculation"]["num_verified"] > 0
    assert result["timing"]["num_tokens"] == 12
    assert result["timing"]["tokens_per_second"] > 0


def test_all_kinds_of_prompt_files_load_up_to_the_given_number(command, prompt_file):
    for more, expected in (
        ([], ["abc", "cab", "bed", "fed"]),
        (["--num-prompts=2"], ["abc", "cab"]),
    ):
        arguments = ["--prompts", prompt_file, "--json", "--max-tokens", "4", *more]
        _, out, _ = command("generate", *arguments)
        assert [output["prompt"] for output in json.loads(out)["outputs"]] == expected


def test_compare_shows_both_and_equal_texts(command, prompt_file):
    arguments = ["generate", "--prompts", prompt_file, "--compare", "--max-tokens=16"]
    status, out, _ = command(*arguments, "--dtype=float32")
    assert status == 0
    for shown in ("target only", "times as fast", "all 4 texts are identical", "lossless"):
        assert shown in out
    _, out, _ = command(*arguments, "--dtype=float32", "--json")
    compared = json.loads(out)["compare"]
    assert compared["num_identical"] == compared["num_prompts"] == 4
    assert compared["speedup"] > 0
    assert compared["speculative"]["num_tokens"] == compared["target_only"]["num_tokens"]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_prompt_does_not_end_a_comparison(command, tmp_path, batch_size, bad):
    prompts = ["bad", "a bed", "head", "fed"]
    prompts[bad] = "deaf " * 60
    file = write_prompts(tmp_path / "prompts.jsonl", prompts)
    arguments = ["generate", "--prompts", file, "--compare", "--max-tokens", "4"]
    arguments += ["--dtype=float32", f"--batch-size={batch_size}"]
    status, out, _ = command(*arguments, "--json")
    assert status == 2
    result = json.loads(out)
    reasons = [output["finish_reason"] for output in result["outputs"]]
    assert reasons == ["error" if index == bad else "length" for index in range(4)]
    assert "context" in result["outputs"][bad]["error"]
    assert result["outputs"][bad]["error"].endswith("raise --max-model-len")
    assert result["compare"]["num_identical"] == result["compare"]["num_compared"] == 3
    assert result["compare"]["num_prompts"] == 4
    assert "all 3 texts are identical" in command(*arguments)[1]


def test_every_bad_prompt_of_a_batch_has_its_own_error(command, tmp_path):
    prompts = ["deaf " * 60, "deaf " * 70, "a bed", "head"]
    file = write_prompts(tmp_path / "prompts.jsonl", prompts)
    arguments = ["generate", "--prompts", file, "--max-tokens=4", "--batch-size=2"]
    for way in ((), ("--compare",)):
        status, out, _ = command(*arguments, *way, "--json")
        assert status == 2
        outputs = json.loads(out)["outputs"]
        assert [each["finish_reason"] for each in outputs] == ["error"] * 2 + ["length"] * 2
        assert outputs[0]["error"] != outputs[1]["error"]
        assert outputs[0]["error"].endswith("raise --max-model-len")
    assert "raise --max-model-len" in " ".join(command(*arguments)[1].split())


def test_a_comparison_in_which_every_prompt_fails_is_an_error(command):
    status, out, err = command("generate", "deaf " * 60, "--compare")
    assert (status, out) == (2, "")
    assert err.startswith("error prompt: ")


def test_sampled_comparison_does_not_claim_equal_texts(command):
    arguments = ["head", "--compare", "--temperature", "1", "--seed", "1", "--max-tokens", "16"]
    _, out, _ = command("generate", *arguments)
    assert "their distribution is the same" in out


def test_seed_repeats_and_differs_between_prompts(command, prompt_file):
    arguments = ["generate", "--temperature", "1", "--max-tokens", "8", "--json", "--dtype=float32"]
    texts = [
        json.loads(command(*arguments, "head", "--seed", seed)[1])["outputs"][0]["token_ids"]
        for seed in ("5", "5", "6")
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("way", [["--overlap"], ["--no-overlap"], ["--draft-replicas", "2"]])
def test_all_execution_options_give_the_same_text(command, prompt_file, way):
    if way == ["--overlap"] and shares() is None:
        pytest.skip("the machine has a single core")
    arguments = ["generate", "--prompts", prompt_file, "--json", "--max-tokens", "8"]
    arguments += ["--temperature", "1", "--seed", "3", "--dtype", "float32"]
    texts = []
    for options in ([], way):
        status, out, _ = command(*arguments, *options)
        assert status == 0
        texts.append([output["token_ids"] for output in json.loads(out)["outputs"]])
    assert texts[0] == texts[1]


def test_policy_none_needs_no_draft(command, models):
    status, out, _ = command(
        "generate",
        "head",
        "--policy=none",
        "--draft=/does/not/exist",
        f"--target={models.folder(TARGET)}",
        "--max-tokens=4",
        "--json",
        pair=False,
    )
    assert status == 0
    assert json.loads(out)["draft"] is None


def test_user_errors_print_one_line_and_exit_with_status_2(command):
    for arguments, field in (
        (["head", "--temperature", "-1"], "--temperature"),
        (["head", "--top-p", "0"], "--top-p"),
        (["head", "--max-tokens", "0"], "--max-tokens"),
        (["head", "--num-speculative-tokens", "65"], "--num-speculative-tokens"),
        (["head", "--policy", "fixd"], "--policy"),
        (["head", "--dtype", "int3"], "--dtype"),
        (["head", "--batch-size", "0"], "--batch-size"),
        (["head", "--draft-replicas", "0"], "--draft-replicas"),
        (["head", "--prompts", "file.jsonl"], "prompt"),
        (["--prompts", "/does/not/exist.jsonl"], "--prompts"),
        ([], "prompt"),
        ([""], "prompt"),
        (["a c" * 80], "prompt"),
        (["head", "--chat", "--max-model-len", "97"], "--max-model-len"),
    ):
        assert_refused(command("generate", *arguments), f"{field}: ")


def test_a_missing_model_lists_the_bundled_models(command):
    status, _, err = command("generate", "x", "--target", "zoo:targte", pair=False)
    assert status == 2
    assert "zoo:target" in err


def test_a_malformed_line_is_reported_with_its_number(command, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "bad"}\n{"nothing": 1}\n')
    status, _, err = command("generate", "--prompts", str(file))
    assert status == 2
    assert "prompts.jsonl:2" in err


def test_help_does_not_import_pytorch():
    script = "import sys; from draftwise.cli import main; sys.argv[1:] = ['--help']\n"
    script += "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_json_contains_logprobs(command):
    arguments = ["--max-tokens", "6", "--dtype=float32", "--logprobs", "2"]
    status, out, _ = command("generate", "head", "--json", *arguments)
    assert status == 0
    (output,) = json.loads(out)["outputs"]
    assert len(output["logprobs"]) == len(output["token_ids"]) == 6
    for entry, token in zip(output["logprobs"], output["token_ids"], strict=True):
        assert entry["rank"] == 1  # greedy
        assert entry["top"][0] == [token, entry["logprob"]]
        assert len(entry["top"]) == 2
    _, out, _ = command("generate", "head", "--json", "--max-tokens", "6")
    assert "logprobs" not in json.loads(out)["outputs"][0]
    status, _, err = command("generate", "head", *arguments)
    assert status == 2
    assert "logprobs" in err


def test_texts_match_a_json_schema(command, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": [{"cat": True}, {"dog": [1, 2]}]}))
    arguments = ["--json-schema", str(schema), "--json", "--max-tokens", "40"]
    status, out, _ = command("generate", "A cat as JSON:", *arguments, pair=False)
    assert status == 0
    (output,) = json.loads(out)["outputs"]
    assert json.loads(output["text"]) in ({"cat": True}, {"dog": [1, 2]})
    for content in ("{", "[1]"):
        schema.write_text(content)
        status, _, err = command("generate", "x", *arguments, pair=False)
        assert status == 2
        assert "--json-schema" in err


def test_chat_template_from_a_file(command, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}head {{ message.content }}{% endfor %}")
    options = ["--json", "--max-tokens", "8", "--dtype=float32"]
    template = f"--chat-template={file}"
    chat = command("generate", "abc", "--chat", template, *options)
    plain = command("generate", "head abc", *options)
    assert chat[0] == plain[0] == 0
    templated, expected = (json.loads(each[1])["outputs"][0] for each in (chat, plain))
    assert templated["token_ids"] == expected["token_ids"]
    assert command("generate", "abc", template, *options)[0] == 2  # without --chat
    file.write_text("{% for")
    status, _, error = command("generate", "abc", "--chat", template, *options)
    assert status == 2
    assert "error --chat-template: " in error


def test_chats_are_titled_by_their_message(command, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("system\n{% for message in messages %}head {{ message.content }}{% endfor %}")
    options = ["--chat", f"--chat-template={file}", "--max-tokens", "4"]
    status, out, _ = command("generate", "abc", *options)
    assert status == 0
    assert "1  abc" in out
    assert "system" not in out


@pytest.mark.parametrize(
    ("prompt", "text", "reason", "template", "is_shown"),
    [
        ("abc", "", FinishReason.STOP, "a template", True),
        ("abc", "text", FinishReason.STOP, "a template", False),
        ("abc", "", FinishReason.LENGTH, "a template", False),
        ("abc", "", FinishReason.STOP, None, False),
        ([{"role": "user", "content": "abc"}], "", FinishReason.STOP, "a template", False),
    ],
)
def test_empty_texts_have_a_hint(prompt, text, reason, template, is_shown):
    tokenizer = SimpleNamespace(chat_template=template)
    llm = SimpleNamespace(target=SimpleNamespace(tokenizer=tokenizer))
    output = replace(RequestOutput.empty(None, reason), text=text)
    console = Console(record=True, width=200, file=StringIO())
    _hint(console, llm, [prompt], SimpleNamespace(outputs=[output]))
    assert ("--chat" in console.export_text()) == is_shown


def test_a_target_from_outside_the_zoo_has_no_default_draft(command, models):
    """No zoo model is loaded, and a message says how to name a draft."""
    arguments = ["generate", "head", "--target", models.folder(TARGET), "--max-tokens", "4"]
    status, out, err = command(*arguments, "--json", pair=False, policy=None)
    assert status == 0
    assert err.splitlines()[0].startswith("no draft: ")
    assert "--draft" in err.splitlines()[0]
    result = json.loads(out)
    assert (result["draft"], result["policy"]) == (None, "none")
    assert len(result["outputs"][0]["token_ids"]) == 4
    for no_draft in (["--draft", "none"], ["--policy", "none"]):
        status, _, err = command(*arguments, *no_draft, pair=False, policy=None)
        assert (status, err) == (0, "")


def test_draft_and_companion_from_outside_the_zoo(command, models):
    companion = models.folder(TARGET.draft(noise_seed=5))
    arguments = ["generate", "head", "--companion", companion, "--max-tokens", "4", "--json"]
    status, out, _ = command(*arguments, policy="staged")
    assert status == 0
    result = json.loads(out)
    assert result["companion"] == companion
    assert result["draft"] == models.folder(DRAFT)


def test_missing_models_are_reported_before_loading(command):
    for arguments, begin in (
        (["--draft", "OWN"], "--target: missing: --draft is "),
        (["--companion", "OWN"], "--target: missing: --companion is "),
        (["--target", "OWN", "--companion", "OWN"], "--draft: missing: --companion needs "),
        (["--target", "OWN", "--policy", "sv"], "--draft: missing: --policy needs "),
        (
            ["--target", "OWN", "--num-speculative-tokens", "5", "--lenience", "1.0"],
            "--draft: missing: --num-speculative-tokens, --lenience need ",
        ),
        (["--target", "OWN", "--overlap"], "--draft: missing: --overlap needs a draft; "),
        (
            ["--draft", "none", "--overlap", "--draft-replicas", "2"],
            "--draft: missing: --overlap, --draft-replicas need a draft; ",
        ),
        (
            ["--draft", "suffix", "--draft-replicas", "2"],
            "--draft: must contain a model, got 'suffix'; --draft-replicas needs a draft ",
        ),
        (["--draft", "suffix", "--overlap"], "--draft: must contain a model, got 'suffix'; "),
        (["--target", "OWN", "--compare"], "--draft: missing: --compare "),
        (["--target", "OWN", "--draft", "none", "--compare"], "--draft: missing: "),
    ):
        named = ["/no/such/folder" if each == "OWN" else each for each in arguments]
        assert_refused(command("generate", "head", *named, pair=False, policy=None), begin)
