"""Names under which people know their GGUF files."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from draftwise.checkpoints.gguf import find_gguf, is_gguf
from draftwise.errors import ModelNotFoundError
from draftwise.models.loading import load_model

from .test_gguf import RECIPE, write_gguf

CPU = torch.device("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/Tiny-GGUF"


def load(name):
    return load_model(str(name), "target", torch.float32, CPU)


def touch(folder, *names):
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"GGUF")


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """The folder of a repository in the local cache, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return folder / "snapshots" / COMMIT


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(folder / "tiny.gguf", RECIPE.build(), part_tensors=8)
    return sorted(folder.iterdir())


def test_a_model_in_several_files(parts):
    """Every part names the whole model."""
    assert [each.name for each in parts] == [
        f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3)
    ]
    expected = sum(each.numel() for each in RECIPE.build().parameters())
    for part in parts:
        loaded = load(part)
        assert loaded.num_parameters == expected
        assert loaded.tokenizer.convert_ids_to_tokens([2]) == ["ab"]


def test_a_missing_part(parts, tmp_path):
    for part in (parts[0], parts[2]):
        shutil.copy(part, tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"tiny-00002-of-00003.gguf'$"):
        find_gguf(str(tmp_path / parts[0].name), "target")


def test_a_folder_with_one_model(parts, tmp_path):
    assert find_gguf(str(parts[0].parent), "target") == parts
    write_gguf(tmp_path / "Tiny-MTP-Q8_0.GGUF", RECIPE.build())
    touch(tmp_path, "mmproj-Tiny.gguf", "mtp-tiny.gguf")
    assert is_gguf(str(tmp_path))
    assert load(tmp_path).model.vocab_size == 128


def test_a_folder_with_several_models(tmp_path):
    touch(tmp_path, "a-Q4_K_M.gguf", "a-Q8_0.gguf")
    with pytest.raises(ModelNotFoundError, match=r"2 models; name one: a-Q4_K_M.gguf, a-Q8_0.gguf"):
        find_gguf(str(tmp_path), "target")


def test_any_name_of_a_file(tmp_path):
    path = write_gguf(tmp_path / "sha256-0123", RECIPE.build())
    assert is_gguf(str(path))
    assert load(path).model.vocab_size == 128


def test_a_quantisation_of_the_hub(repository):
    for tag, expected in [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny.Q8_0.gguf"),
        ("UD-Q4_K_M", "UD/tiny-UD-Q4_K_M.gguf"),
        ("tiny.Q8_0.gguf", "tiny.Q8_0.gguf"),
    ]:
        names = ("tiny-Q4_K_M.gguf", "tiny.Q8_0.gguf", "UD/tiny-UD-Q4_K_M.gguf", "mmproj-Q8_0.gguf")
        touch(repository, *names)
        assert find_gguf(f"{REPOSITORY}:{tag}", "target") == [repository / expected]


def test_a_file_of_the_hub(repository, parts):
    (repository / "Q4").mkdir(parents=True)
    for part in parts:
        shutil.copy(part, repository / "Q4")
    name = f"{REPOSITORY}/Q4/{parts[0].name}"
    assert find_gguf(name, "target") == [repository / "Q4" / part.name for part in parts]
    assert load(f"{REPOSITORY}:tiny").model.vocab_size == 128


def test_a_quantisation_that_the_repository_lacks(repository):
    touch(repository, "tiny-Q4_K_M.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no file of 'Q2_K'; its models are tiny-Q4_K_M"):
        find_gguf(f"{REPOSITORY}:Q2_K", "draft")


def test_a_repository_that_is_not_in_the_cache(repository):
    with pytest.raises(ModelNotFoundError, match="not in the local cache") as caught:
        find_gguf("another/one:Q4_K_M", "draft")
    assert caught.value.field == "draft"


def test_names_of_other_models():
    for name in ["zoo:target", "owner/model", "owner/model:int8", "zoo:target:int4"]:
        assert not is_gguf(name)


def test_a_pointer_of_git_lfs(tmp_path):
    path = Path(tmp_path, "tiny.gguf")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelNotFoundError, match="git lfs pull"):
        load(path)
