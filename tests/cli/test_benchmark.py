"""``draftwise benchmark`` as a user runs it, on tiny models."""

import json
from dataclasses import replace

import pytest

from ..tiny_models import Recipe, bigram_model, chain_logits, save
from .page import Page
from .running import assert_refused, write_prompts

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=300, context=128, tokenizer=True)
DRAFT = TARGET.draft(0.2)
COMPANION = TARGET.draft(0.2, noise_seed=2)


@pytest.fixture
def prompt_file(tmp_path):
    texts = ("abc", "a bed", "hi", "fed")
    return write_prompts(tmp_path / "questions.jsonl", texts, "question", category="letters")


@pytest.fixture
def command(models, draftwise, prompt_file, tmp_path):
    """Run the command with the tiny models; returns (exit status, stdout, stderr)."""

    def run(*arguments, workload=prompt_file, target=TARGET):
        named = ["--target", models.folder(target), "--draft", models.folder(DRAFT)]
        rest = ["--workload", str(workload), "-o", str(tmp_path / "out"), "--dtype", "float32"]
        rest += ["--max-tokens", "6", "--rounds", "2", "--batch-sizes", "1,3"]
        rest += ["--longest-prompt", "64", "--no-guard"]
        return draftwise("benchmark", *named, *rest, *arguments)

    return run


def results(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_files_and_tables_are_written(command, tmp_path):
    status, out, err = command("--policies", "fixed:2,heuristic")
    assert (status, err) == (0, "")
    report = results(tmp_path)
    assert [cell["batch_size"] for cell in report["cells"]] == [1, 3]
    for cell in report["cells"]:
        assert list(cell["contenders"]) == ["none", "fixed:2", "heuristic"]
        for own in cell["contenders"].values():
            # In float32 all texts are the same.
            assert own["identical_answers"] == own["answers"] == 2 * cell["batch_size"]
            assert own["num_tokens"] == 6 * own["answers"]
            assert own["tokens_per_second"]["median"] > 0
            assert sum(own["share_of_time"].values()) == pytest.approx(1.0)
        assert "questions, temperature 0, batch" in out
    assert report["contenders"]["fixed:2"]["num_speculative_tokens"] == 2
    assert report["models"]["draft"]["parameters"] > 0
    assert report["settings"]["workload"] == ["questions.jsonl"]
    assert report["peak_memory_gib"] > 0
    assert "--policies" in report["command"]


def test_the_page_loads_no_external_resources(command, tmp_path):
    command("--policies", "fixed")
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.pictures == 4
    assert page.fetched == []
    assert "questions, temperature 0, batch 3" in text
    assert "3 of 3" not in text
    assert "6 of 6" in text


def test_answers_in_the_format_of_spec_bench(command, tmp_path):
    command("--policies", "fixed")
    folder = tmp_path / "out" / "answers"
    assert {file.name for file in folder.iterdir()} == {
        f"questions-T0-{size}-{name}.jsonl" for size in (1, 3) for name in ("none", "fixed")
    }
    lines = (folder / "questions-T0-3-fixed.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert [each["question_id"] for each in answers] == [0, 1, 2, 3, 0, 1]
    for each in answers:
        assert (each["category"], each["model_id"]) == ("letters", "fixed")
        (choice,) = each["choices"]
        assert choice["new_tokens"] == [6]
        assert sum(choice["accept_lengths"]) == 6
        assert choice["decoding_steps"] == [len(choice["accept_lengths"])]
        assert choice["wall_time"][0] > 0


def test_sampled_workload_with_a_companion(command, models, tmp_path):
    status, out, _ = command(
        *("--policies", "sv-published,oracle", "--companion", models.folder(COMPANION)),
        *("--temperature", "1", "--top-p", "0.9"),
    )
    assert status == 0
    report = results(tmp_path)
    own = report["cells"][1]["contenders"]["sv-published"]
    assert own["scored_per_step"] > 0
    assert "identical_answers" not in own
    assert report["contenders"]["sv-published"]["lossless"] is False
    assert "same" in out


def test_several_temperatures(command, tmp_path):
    status, out, _ = command("--policies", "fixed", "--temperature", "0,0.5", "--batch-sizes", "1")
    assert status == 0
    report = results(tmp_path)
    greedy, sampled = report["cells"]
    assert (greedy["temperature"], sampled["temperature"]) == (0, 0.5)
    assert "identical_answers" in greedy["contenders"]["fixed"]
    assert "identical_answers" not in sampled["contenders"]["fixed"]
    assert "questions, temperature 0.5, batch 1" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "at temperature 0 and 0.5" in page
    assert page.count("<th>T 0.5, batch 1</th>") == 1
    files = {file.name for file in (tmp_path / "out" / "answers").iterdir()}
    assert "questions-T0.5-1-fixed.jsonl" in files


def test_a_preset_sets_what_is_not_given(command, tmp_path):
    ending = replace(TARGET, config={"eos_token_id": list(range(0, 300, 3))})
    status, _, err = command(
        *("--preset", "gemma", "--draft", "suffix", "--max-model-len", "128"), target=ending
    )
    assert (status, err) == (0, "")
    report = results(tmp_path)
    settings = report["settings"]
    # What the command line says counts more.
    assert (settings["rounds"], settings["max_tokens"], settings["batch_sizes"]) == (2, 6, "1,3")
    assert (settings["policies"], settings["temperature"]) == ("adaptive", "0,0.8")
    assert settings["num_speculative_tokens"] == 8
    assert settings["stop_at_eos"] is True
    assert list(report["contenders"]) == ["none", "adaptive"]


class TestTrainedHead:
    """A head that is trained before the measurement."""

    TARGET = replace(TARGET, context=1024)

    @pytest.fixture
    def arguments(self, prompt_file):
        training = ["--train-on", str(prompt_file), "--train-minutes", "0.1"]
        return [*training, "--policies", "fixed:2", "--batch-sizes", "1", "--max-model-len", "600"]

    def test_it_drafts_beside_copied_text(self, command, arguments, tmp_path):
        status, _, err = command(*arguments, "--draft", "suffix", target=self.TARGET)
        assert status == 0
        head = tmp_path / "out" / "head"
        assert "training an EAGLE-3 head of" in err
        report = results(tmp_path)
        assert report["settings"]["draft"] == f"suffix,{head}"
        assert report["peak_memory_gib"] is None
        own = report["cells"][0]["contenders"]["fixed:2"]
        assert own["identical_answers"] == own["answers"]
        written = (head / "model.safetensors").stat().st_mtime_ns
        # A second run measures with the same head, also alone and by its name.
        by_name = ("--draft", "suffix", "--policies", f"fixed:2@{head}")
        status, _, err = command(*arguments, *by_name, target=self.TARGET)
        assert status == 0, err
        assert "using the head in" in err
        assert (head / "model.safetensors").stat().st_mtime_ns == written
        status, _, err = command(*arguments, "--draft", "none", target=self.TARGET)
        assert status == 0
        report = results(tmp_path)
        assert report["settings"]["draft"] == str(head)

    def test_errors_come_before_the_training(self, command, arguments, tmp_path):
        for more, field in (
            ([], "--draft"),  # the fixture's draft is a model
            (["--draft", "ngram"], "--draft"),
            (["--draft", "suffix", "--companion", "draft:int8"], "--companion"),
            (["--draft", "suffix", "--policies", "nonsense"], "--policies"),
            (["--draft", "suffix", "--peers", "llama"], "--peers"),
            (["--draft", "suffix", "--compare", "/nowhere/results.json"], "--compare"),
            (["--draft", "suffix", "--temperature", "-1"], "--temperature"),
            (["--draft", "suffix", "--train-on", "/nowhere.jsonl"], "--train-on"),
            (["--draft", "suffix", "--workload", "/nowhere.jsonl"], "--workload"),
        ):
            assert_refused(command(*arguments, *more, target=self.TARGET), f"{field}: ")
            assert not (tmp_path / "out" / "head" / "config.json").exists()

    def test_a_head_of_another_target_is_not_used(self, command, arguments, tmp_path):
        head = tmp_path / "out" / "head"
        head.mkdir(parents=True)
        (head / "training.json").write_text('{"run": {"target": "other"}}')
        ran = command(*arguments, "--draft", "suffix", target=self.TARGET)
        assert_refused(ran, "--output: ")


def test_changes_since_an_earlier_report_are_shown(command, tmp_path):
    command("--policies", "fixed")
    old = tmp_path / "out" / "results.json"
    report = json.loads(old.read_text())
    for spread in ("low", "median", "high"):
        report["cells"][0]["contenders"]["fixed"]["ratio"][spread] = 1000.0
    kept = tmp_path / "old.json"
    kept.write_text(json.dumps(report))
    status, out, _ = command("--policies", "fixed", "--compare", str(kept))
    assert status == 0
    assert "-100% fixed, questions, temperature 0, batch 1: 1000.00 →" in out
    assert "measurements are slower" in out


def test_a_failing_peer_does_not_end_the_run(command, tmp_path):
    status, _, _ = command("--policies", "fixed", "--peers", "vllm=/nowhere/python")
    assert status == 0
    report = results(tmp_path)
    for name in ("vllm", "vllm draft 5"):
        assert "cannot run" in report["cells"][0]["contenders"][name]["error"]
    assert "cannot run" in (tmp_path / "out" / "report.html").read_text()


def test_transformers_can_be_a_peer(command, tmp_path):
    """transformers in its own process on the same models gives the same greedy answers."""
    status, _, _ = command("--policies", "fixed", "--peers", "transformers", "--batch-sizes", "1")
    assert status == 0
    report = results(tmp_path)
    (cell,) = report["cells"]
    for name in ("transformers", "transformers assisted"):
        own = cell["contenders"][name]
        assert (own["identical_answers"], own["num_tokens"]) == (2, 12), own
        assert report["contenders"][name]["version"]


def test_transformers_can_draft_from_the_text(command, tmp_path):
    """Prompt lookup gives the same greedy answers; larger batches are left out with a reason."""
    status, out, _ = command(
        *("--draft", "suffix", "--policies", "fixed:2,fixed"),
        *("--peers", "transformers", "--num-speculative-tokens", "3"),
    )
    assert status == 0
    report = results(tmp_path)
    lookups = {f"transformers prompt lookup {length}" for length in (2, 3)}
    one, three = report["cells"]
    assert set(one["contenders"]) == {"none", "fixed:2", "fixed", "transformers", *lookups}
    for own in one["contenders"].values():
        assert (own["identical_answers"], own["num_tokens"]) == (2, 12), own
    assert not set(three["contenders"]) & lookups
    assert one["left_out"] == {}
    assert set(three["left_out"]) == lookups
    assert "transformers prompt lookup 2 is left out: it answers at most 1 prompt at once" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "prompt lookup 3 is left out: it answers at most 1 prompt at once." in page


def test_the_share_of_repeated_text_is_reported(command, tmp_path):
    """In a loop of three tokens, all after the first eight and the first loop are repeated."""
    looping = bigram_model(chain_logits(300, [5, 6, 7]), context=128)
    folder = save(looping, tmp_path / "looping", tokenizer=True)
    arguments = ("--policies", "fixed", "--max-tokens", "16", "--target", folder)
    status, out, _ = command(*arguments)
    assert status == 0
    report = results(tmp_path)
    for own in report["cells"][0]["contenders"].values():
        assert own["repeated_share"] == 6 / 16
    assert "repeated" in out
    assert "38%" in out
    assert "<td>38%</td>" in (tmp_path / "out" / "report.html").read_text()


def test_answers_can_end_at_the_end_of_the_sequence(command, tmp_path):
    ending = replace(TARGET, config={"eos_token_id": list(range(0, 300, 3))})
    status, _, _ = command("--policies", "fixed", "--stop-at-eos", target=ending)
    assert status == 0
    report = results(tmp_path)
    own, base = (report["cells"][1]["contenders"][name] for name in ("fixed", "none"))
    assert own["num_tokens"] == base["num_tokens"] < 6 * own["answers"]
    assert own["identical_answers"] == own["answers"]
    assert "until their end" in (tmp_path / "out" / "report.html").read_text()


def test_conversations_of_several_turns(command, tmp_path):
    file, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    lines = [{"turns": [text, "fed"]} for text in ("abc", "hi")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    template.write_text("{% for each in messages %}{{ each.content }}.{% endfor %}")
    given = ("--multi-turn", "--chat-template", str(template))
    status, _, _ = command("--policies", "fixed", *given, workload=file)
    assert status == 0
    report = results(tmp_path)
    own = report["cells"][0]["contenders"]["fixed"]
    assert own["identical_answers"] == own["answers"] == 2
    assert report["settings"]["multi_turn"] is True


def test_invalid_input_is_refused(command, tmp_path):
    for arguments, field in (
        (["--policies", "nonsense"], "--policies"),
        (["--policies", "fixed:many"], "--policies"),
        (["--batch-sizes", "0"], "--batch-sizes"),
        (["--batch-sizes", "1,x"], "--batch-sizes"),
        (["--peers", "llama"], "--peers"),
        (["--compare", "/nowhere/results.json"], "--compare"),
        (["--threads", "0"], "--threads"),
        (["--longest-prompt", "200"], "--longest-prompt"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "0,-1"], "--temperature"),
        (["--temperature", "0,cold"], "--temperature"),
        (["--preset", "llama"], "--preset"),
        (["--output", "/proc/here"], "--output"),
        (["--stop-at-eos"], "--stop-at-eos"),
        (["--multi-turn"], "--workload"),
        (["--chat-template", "template.jinja"], "--chat-template"),
        (["--chat", "--chat-template", "/nowhere/template.jinja"], "--chat-template"),
        (["--draft", "none", "--peers", "vllm-draftwise"], "--peers"),
    ):
        assert_refused(command(*arguments), f"{field}: ")
    file = write_prompts(tmp_path / "long.jsonl", ["abcdef" * 8])
    ran = command("--longest-prompt", "3", workload=file)
    assert_refused(ran, "--workload: no prompt")
    assert_refused(command(workload=tmp_path / "nothing.jsonl"), "--workload: ")
