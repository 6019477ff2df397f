"""Drafts of kinds that Draftwise does not run are refused by the name of their kind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftwise import LLM
from draftwise.checkpoints import hub, source
from draftwise.checkpoints.heads import files
from draftwise.checkpoints.other_drafts import RUN_AS_DRAFTS, other_kind
from draftwise.errors import UnsupportedModelError
from draftwise.models import loading

from ..refusals import error_of
from ..tiny_heads import HeadRecipe
from ..tiny_models import Recipe
from .loading_tools import refused

QWEN3 = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
LLAMA = {**QWEN3, "model_type": "llama"}
EAGLE3 = HeadRecipe().config("safeailab")
SPECULATORS = HeadRecipe().config("speculators")
# What the published folders of each kind have in their configuration.
KINDS = [
    ("DFlash", {**QWEN3, "architectures": ["DFlashDraftModel"], "dflash_config": {"mask": 1}}),
    ("DFlash", {**SPECULATORS, "speculators_model_type": "dflash"}),
    ("DFlash", {"model_type": "muse_glimmer", "architectures": ["DFlashMuseGlimmerModel"]}),
    ("DFlash-2", {**QWEN3, "architectures": ["DFlash2DraftModel"]}),
    ("DFlash-2", {**QWEN3, "dflash_config": {"selector_rank": 256, "conv_kernel_size": 2}}),
    ("DSpark", {**QWEN3, "architectures": ["Qwen3DSparkModel"], "markov_rank": 256}),
    ("DSpark", {**QWEN3, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0}),
    ("DSpark", {**QWEN3, "architectures": ["DFlashDraftModel"], "markov_rank": 256}),
    ("DSpark", {**QWEN3, "architectures": ["DSparkDraftModel"], "dflash_config": {"mask": 1}}),
    ("DSpark", {**SPECULATORS, "speculators_model_type": "dspark"}),
    ("Medusa", {"medusa_num_heads": 5, "base_model_name_or_path": "vicuna"}),
    ("Medusa", {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 4}),
    ("MLP speculator", {"architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 3}),
    ("MLP speculator", {"model_type": "mlp_speculator", "n_predict": 3}),
    ("Hydra", {"hydra_num_heads": 4, "hydra_num_layers": 1, "base_model_name_or_path": "vicuna"}),
    ("P-EAGLE", {**EAGLE3, "architectures": ["PEagleDraftModel"]}),
    ("P-EAGLE", {**EAGLE3, "ptd_token_id": 3}),
    ("P-EAGLE", {**SPECULATORS, "speculators_model_type": "peagle"}),
    ("MTP", {"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"]}),
    ("MTP", {"model_type": "qwen3_next", "architectures": ["Qwen3NextMTP"]}),
    ("MTP", {**SPECULATORS, "speculators_model_type": "mtp"}),
    (
        "Gemma 4 assistant",
        {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]},
    ),
    (
        "Gemma 4 assistant",
        {"architectures": ["Gemma4UnifiedAssistantForCausalLM"]},
    ),
    ("assistant", {"model_type": "muse_glimmer_assistant"}),
    ("domino", {**SPECULATORS, "speculators_model_type": "domino"}),
]
REMEDY = "use 'suffix', a draft model or an EAGLE-3 head of the target instead"

OF_THE_HUB = next(config for kind, config in KINDS if kind == "Medusa")


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(16, 48)}, folder / "model.safetensors")
    return str(folder)


def test_other_kinds_are_refused_as_drafts(models, tmp_path):
    for kind, config in KINDS:
        if kind in RUN_AS_DRAFTS:
            assert other_kind(config) == kind
            continue
        folder = write(tmp_path / "draft", config)
        caught = error_of(
            LLM,
            models.folder(Recipe()),
            {"draft": ["suffix", folder]},
            dtype="float32",
            error=UnsupportedModelError,
        )
        assert caught.field == "draft"
        assert f"is a draft of the kind {kind}, which is not run by Draftwise" in caught.message
        assert REMEDY in caught.message


def test_other_kinds_are_refused_in_other_roles(models, tmp_path):
    for role in ["target", "companion"]:
        folder = write(tmp_path / "draft", KINDS[0][1])
        names = {"target": models.folder(Recipe()), role: folder}
        target = names.pop("target")
        caught = error_of(
            LLM,
            target,
            {"draft": models.folder(Recipe()), **names},
            dtype="float32",
            error=UnsupportedModelError,
        )
        assert caught.field == role
        assert "of the kind DFlash, which is no model of its own; name " in caught.message


@pytest.mark.parametrize("role", ["target", "draft"])
def test_other_kinds_of_the_hub(monkeypatch, tmp_path, role):
    """The configuration is in the local cache once the loader has asked for it."""
    folder = Path(write(tmp_path / "draft", OF_THE_HUB))
    for module in (source, files):
        monkeypatch.setattr(module, "find_on_hub", lambda name, role: name)
    for module in (loading, files):
        monkeypatch.setattr(module, "cached_config", lambda name: None)
    monkeypatch.setattr(files, "hf_hub_download", lambda name, file: str(folder / file))
    if role == "draft":
        with pytest.raises(UnsupportedModelError, match="'z/medusa' is a draft of the kind Medusa"):
            files.find_head("z/medusa")
        return

    def download(name, **_):
        monkeypatch.setattr(loading, "cached_config", lambda name: folder / "config.json")
        raise ValueError("Unrecognized configuration class")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", download)
    assert "'z/medusa' is a draft of the kind Medusa" in refused("z/medusa", role=role).message


def test_the_cached_configuration_of_a_name(monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    assert hub.cached_config("a/b") == Path("/cache/a/b/config.json")
    monkeypatch.undo()
    assert hub.cached_config("/no/such/folder") is None


def test_other_configurations_are_not_of_such_drafts():
    for config in [
        EAGLE3,
        SPECULATORS,
        LLAMA,
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "mask_token_id": 3},
        {
            "model_type": "deepseek_v4",
            "dspark_target_layer_ids": [1],
            "num_nextn_predict_layers": 1,
        },
        {"model_type": "qwen3_next", "architectures": None},
        {"architectures": 5, "model_type": None},
    ]:
        assert other_kind(config) is None


def test_models_with_a_damaged_configuration_are_refused_as_before(models, tmp_path):
    folder = Path(shutil.copytree(models.folder(Recipe()), tmp_path / "model"))
    (folder / "config.json").write_text("[1]")
    assert refused(folder).field == "target"
