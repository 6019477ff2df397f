"""Checkpoints that read images as well: their text part is loaded, and computes their texts."""

import pytest
import torch
import transformers

from draftwise.checkpoints.stored.inputs import QuantizedInputs
from draftwise.checkpoints.text_part import AbsentEncoder, absent_encoders, text_model_class
from draftwise.errors import UnsupportedModelError
from draftwise.models.segment import Segment

from ..tiny_models import randomise
from .loading_tools import load, refused
from .quantized_folders import GPTQ, LOADED, Format, gptq

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def llava(**text):
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{**TEXT, **text}),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=31,
    )


def gemma3(**text):
    settings = {
        **TEXT,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**{**settings, **text}),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=1,
        image_token_index=31,
    )


def llama4(**text):
    settings = {
        **TEXT,
        "head_dim": 8,
        "intermediate_size_mlp": 24,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 1.0,
    }
    vision = {**VISION, "projector_input_dim": 8, "projector_output_dim": 8, "vision_output_dim": 8}
    return transformers.Llama4Config(
        text_config=transformers.Llama4TextConfig(**{**settings, **text}),
        vision_config=transformers.Llama4VisionConfig(**vision),
    )


def saved(config, folder):
    """A random model of text and images in a folder, and the model."""
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, seed=1, sharpness=2.0)
    model.save_pretrained(folder)
    return folder, model.eval()


def logits_in_chunks(model):
    """Logits of the tokens in chunks of which none begins where a window or chunk does."""
    cache, rows = model.new_cache(1, len(TOKENS)), []
    for start in range(0, len(TOKENS), 5):
        chunk = TOKENS[start : start + 5]
        segment = Segment(0, start, len(chunk))
        rows.append(model.forward(cache, chunk, [segment], range(len(chunk))).clone())
    return torch.cat(rows)


@pytest.mark.parametrize("make", [llava, gemma3, llama4])
def test_texts_are_those_of_the_whole_model(tmp_path, make):
    """Beyond windows, and for Llama 4 beyond the positions from which it scales queries."""
    folder, model = saved(make(), tmp_path)
    loaded = load(folder)
    assert loaded.max_model_len == 64
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_in_chunks(loaded.model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [llava, gemma3])
def test_a_known_text_architecture_is_on_the_fast_path(tmp_path, make):
    folder, _ = saved(make(), tmp_path)
    assert load(folder).model.native is not None


def test_encoders_take_no_memory(tmp_path):
    folder, model = saved(llava(), tmp_path)
    text = sum(each.numel() for each in model.model.language_model.parameters())
    rest = model.lm_head.weight.numel() + sum(
        each.numel() for each in model.model.multi_modal_projector.parameters()
    )
    assert load(folder).num_parameters == text + rest
    config = transformers.AutoConfig.from_pretrained(folder)
    part = text_model_class(config, "target").from_pretrained(folder)
    assert absent_encoders(part) == ["model.vision_tower"]


def test_an_absent_encoder_says_why():
    with pytest.raises(UnsupportedModelError) as caught:
        AbsentEncoder(None, "draft")(torch.zeros(1))
    assert caught.value.field == "draft"
    assert "only the text part" in caught.value.message


def test_missing_text_weights_are_refused(tmp_path):
    folder, model = saved(llava(), tmp_path)
    weights = {
        name: each for name, each in model.state_dict().items() if "layers.1.mlp" not in name
    }
    model.save_pretrained(folder, state_dict=weights)
    assert "missing" in refused(folder).message


@pytest.mark.parametrize("make", [llava, gemma3])
def test_quantised_weights(tmp_path, make):
    """Those of the encoder as well, which are not read."""
    each = Format("gptq", GPTQ | {"group_size": -1}, gptq(group=0))
    dense, _ = saved(make(), tmp_path / "dense")
    each.quantize_folder(dense, tmp_path / "quantised")
    loaded, expected = load(tmp_path / "quantised"), load(dense)
    assert loaded.fingerprint == expected.fingerprint
    assert (loaded.model.native is None) == (expected.model.native is None)
    assert torch.equal(logits_in_chunks(loaded.model), logits_in_chunks(expected.model))


def test_quantised_inputs(tmp_path):
    each = next(each for each in LOADED if each.name == "w8a8")
    dense, _ = saved(llava(), tmp_path / "dense")
    each.quantize_folder(dense, tmp_path / "quantised")
    loaded, expected = load(tmp_path / "quantised"), load(dense)
    modules = loaded.model._model.modules()
    assert sum(isinstance(module, QuantizedInputs) for module in modules) == 14
    difference = logits_in_chunks(loaded.model) - logits_in_chunks(expected.model)
    assert 0 < difference.abs().max() < 0.5


def test_layers_of_the_text_part_are_checked(tmp_path):
    """Scaling by the length of the text, which a layer type of its own has."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
    rope = {
        "full_attention": {**dynamic, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    folder, _ = saved(gemma3(rope_parameters=rope), tmp_path)
    assert "set max_model_len to 32" in refused(folder).message
    assert load(folder, max_model_len=32).max_model_len == 32


def test_encoders_that_need_another_package_are_not_built(tmp_path):
    """Gemma 3n's encoder of images needs timm, its text does not."""
    text = {
        **TEXT,
        "intermediate_size": [24, 24],
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 32,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "sliding_window": 8,
        "head_dim": 8,
    }
    config = transformers.Gemma3nConfig(
        text_config=transformers.Gemma3nTextConfig(**text),
        audio_config=transformers.Gemma3nAudioConfig(hidden_size=16, conf_num_hidden_layers=1),
    )
    part = text_model_class(config, "target")(config)
    assert "model.vision_tower" in absent_encoders(part)
