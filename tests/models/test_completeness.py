"""Models that have not read a tensor of their checkpoint which may change what they compute."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, LlamaConfig

from draftwise.checkpoints.stored.completeness import check_complete
from draftwise.errors import UnsupportedModelError

from ..refusals import error_of
from .loading_tools import load, refused

LAYER = "model.layers.0.self_attn"


def check(name, config=None):
    report = {"missing_keys": set(), "unexpected_keys": {name}}
    check_complete(report, config or LlamaConfig(num_hidden_layers=2), "draft", "NAME")


def test_tensors_that_a_language_model_does_not_need():
    for name in [
        f"{LAYER}.rotary_emb.inv_freq",
        "rotary_pos_emb.inv_freq",
        "model.rotary_emb.local_inv_freq",
        "transformer.h.0.attn.bias",
        "h.0.attn.masked_bias",
        "gpt_neox.layers.0.attention.masked_bias",
        "transformer.h.0.attn.attention.bias",
        "model.embeddings.position_ids",
        f"{LAYER}.k_scale",
        f"{LAYER}.k_proj.k_scale",
        f"{LAYER}.kv_scale",
        "model.decoder.version",
        "model.embed_positions.weights",
        "score.weight",
        "bert.pooler.dense.weight",
        "v_head.summary.weight",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "visual.blocks.0.attn.qkv.weight",
        "model.visual.blocks.0.attn.proj.bias",
        "multi_modal_projector.linear.weight",
        "model.audio_tower.conv1.weight",
        "model.embed_vision.embedding.weight",
        "mtp.layers.0.mlp.up_proj.weight",
    ]:
        check(name)


def test_tensors_that_may_change_what_it_computes():
    for name in [
        # Scales of quantised weights and of what multiplies inputs.
        f"{LAYER}.q_proj.weight_scale",
        f"{LAYER}.q_proj.input_scale",
        f"{LAYER}.q_proj.pre_quant_scale",
        "model.layers.0.mlp.act.scales",
        # Parts of layers that the configuration does not describe.
        f"{LAYER}.q_proj.bias",
        f"{LAYER}.q_norm.weight",
        f"{LAYER}.q_proj.lora_A.weight",
        "model.layers.2.mlp.up_proj.weight",
        "lm_head.bias",
    ]:
        caught = error_of(check, name, error=UnsupportedModelError)
        assert caught.field == "draft"
        assert f"LlamaConfig has no use for 1 of the weights of 'NAME', such as {name}" in str(
            caught
        )


def test_layers_that_predict_several_tokens():
    config = DeepseekV3Config(num_hidden_layers=2, num_nextn_predict_layers=1)
    check("model.layers.2.mlp.up_proj.weight", config)
    with pytest.raises(UnsupportedModelError):
        check("model.layers.3.mlp.up_proj.weight", config)


def with_tensor(folder, name):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_model_with_a_tensor_that_it_does_not_read(llama):
    error = refused(with_tensor(llama, f"{LAYER}.q_proj.weight_scale"))
    assert error.field == "target"
    assert f"{LAYER}.q_proj.weight_scale" in error.message


def test_a_model_with_a_tensor_that_it_does_not_need(llama):
    expected = load(llama).fingerprint
    assert load(with_tensor(llama, "score.weight")).fingerprint == expected
