import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from draftwise.errors import InvalidParameterError, ModelNotFoundError
from draftwise.zoo import bundled, export, names, resolve, train
from draftwise.zoo.bundled import TOKENIZER_FILES, cache_folder
from draftwise.zoo.inflation_plan import parse_num_parameters
from draftwise.zoo.tokenizer import load_tokenizer

from .conftest import TINY


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Two small bundled models, and a separate cache."""
    folder = tmp_path / "weights"
    for name in ("target", "draft"):
        LlamaForCausalLM(TINY.config()).save_pretrained(folder / name)
    (folder / "unfinished").mkdir()
    monkeypatch.setattr(bundled, "_WEIGHTS", folder)
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path / "cache"))
    return folder


def test_names(weights):
    assert names() == ["draft", "target"]


def test_names_without_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "_WEIGHTS", tmp_path / "nothing")
    assert names() == []
    with pytest.raises(ModelNotFoundError, match="weights are missing"):
        resolve("zoo:target")


@pytest.mark.parametrize("name", ["zoo:target", "target"])
def test_resolve(weights, name):
    assert resolve(name) == weights / "target"


def test_a_model_without_a_tokenizer_is_completed_with_the_targets(weights, tmp_path):
    for file in TOKENIZER_FILES:
        (weights / "target" / file).write_text(file)
    folder = resolve("zoo:draft")
    assert folder.parent == tmp_path / "cache" / "zoo"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    expected = [*(weights / "draft").iterdir(), *(weights / "target" / f for f in TOKENIZER_FILES)]
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert contents == {path.name: path.read_bytes() for path in expected}
    assert TOKENIZER_FILES[0] in {path.name for path in resolve("zoo:draft@1m").iterdir()}
    # It is another folder when the tokenizer changes, and none when the model has its own.
    (weights / "target" / "tokenizer.json").write_text("another")
    assert resolve("zoo:draft") != folder
    (weights / "draft" / "tokenizer.json").write_text("its own")
    assert resolve("zoo:draft") == weights / "draft"


@pytest.mark.parametrize("name", ["target", "draft", "companion", "hybrid"])
def test_bundled_models_are_whole_folders(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path))
    folder = resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    ids = tokenizer("def f(x):", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


def test_unknown_name_lists_the_known(weights):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("zoo:targte")
    message = str(caught.value)
    assert "did you mean zoo:target?" in message
    assert "zoo:draft, zoo:target" in message


@pytest.mark.parametrize("name", ["zoo:", "zoo:../weights/target", "zoo:unfinished", "zoo:/"])
def test_only_names_are_resolved(weights, name):
    with pytest.raises(ModelNotFoundError):
        resolve(name)


@pytest.mark.parametrize(
    ("text", "size"), [("200m", 200_000_000), ("1.5B", 1_500_000_000), ("12", 12), ("3k", 3000)]
)
def test_sizes(text, size):
    assert parse_num_parameters(text) == size


@pytest.mark.parametrize("text", ["", "m", "0m", "-1m", "1e9", "200 millions", "9" * 400])
def test_unusable_sizes(text):
    with pytest.raises(InvalidParameterError, match="parameters"):
        parse_num_parameters(text)


def test_a_cache_that_cannot_be_written_is_named(weights, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InvalidParameterError, match="set DRAFTWISE_CACHE to another folder"):
        resolve("zoo:target@1m")


def test_inflated_is_built_once(weights, tmp_path, monkeypatch):
    folder = resolve("zoo:target@1m")
    assert folder.parent == tmp_path / "cache" / "zoo"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr("draftwise.zoo.inflate.inflate", None)
    assert resolve("target@1M") == folder


def test_inflated_follows_its_source(weights):
    first = resolve("zoo:target@1m")
    LlamaForCausalLM.from_pretrained(weights / "draft").save_pretrained(weights / "target")
    assert resolve("zoo:target@1m") != first


def test_failed_build_leaves_nothing(weights, tmp_path):
    with pytest.raises(InvalidParameterError):
        resolve("zoo:target@5")
    assert list((tmp_path / "cache" / "zoo").iterdir()) == []


def test_default_cache(monkeypatch):
    monkeypatch.delenv("DRAFTWISE_CACHE", raising=False)
    assert cache_folder().parts[-2:] == (".cache", "draftwise")


def test_a_run_can_begin_with_the_bundled_target(tmp_path):
    train.use_bundled_target(tmp_path)
    files = {path.name: path.read_bytes() for path in resolve("target").iterdir()}
    copied = tmp_path / "target" / "model"
    assert files == {path.name: path.read_bytes() for path in copied.iterdir()}
    found = load_tokenizer(tmp_path)
    assert found.get_vocab() == AutoTokenizer.from_pretrained(resolve("target")).get_vocab()


@pytest.mark.slow
def test_from_training_to_a_name(data, tiny_stages, tmp_path, monkeypatch, capsys):
    runs, shipped = tmp_path / "runs", tmp_path / "shipped"
    command = ["--data", str(data), "--out", str(runs), "--no-compile", "--device", "cpu"]
    train.main(command)
    train.main(command)
    assert "draft: already finished" in capsys.readouterr().out
    monkeypatch.setattr(export, "_NUM_CONTINUATIONS", 4)
    monkeypatch.setattr(export, "_CONTINUATION_LENGTH", 8)
    export.main(["--runs", str(runs), "--destination", str(shipped)])
    assert (shipped / "draft" / "tokenizer.json").exists()
    # In the package, the tokenizer is stored once.
    monkeypatch.setattr(export, "WEIGHTS", shipped)
    export.main(["--runs", str(runs), "--destination", str(shipped)])
    assert not (shipped / "draft" / "tokenizer.json").exists()
    monkeypatch.setattr(bundled, "_WEIGHTS", shipped)
    monkeypatch.setenv("DRAFTWISE_CACHE", str(tmp_path / "cache"))
    assert names() == ["draft", "hybrid", "target"]
    model = LlamaForCausalLM.from_pretrained(resolve("zoo:draft"))
    tokenizer = AutoTokenizer.from_pretrained(resolve("zoo:draft"))
    assert model.dtype.itemsize == 2
    assert model.config.eos_token_id == tokenizer.eos_token_id
    card = (shipped / "draft" / "README.md").read_text()
    assert "DistillSpec" in card
    assert "--data DIR --out RUNS" in card
    assert str(tmp_path) not in card
    assert "sampled from the target" in card
    card = (shipped / "hybrid" / "README.md").read_text()
    assert "Qwen3.5 architecture with tied embeddings" in card
    assert "Its mean acceptance by the model" in card
    tensors = load_file(shipped / "hybrid" / "model.safetensors")
    assert tensors["mtp.fc.weight"].shape == (16, 32)
    assert tensors["mtp.fc.weight"].dtype == tensors["model.norm.weight"].dtype == torch.bfloat16
