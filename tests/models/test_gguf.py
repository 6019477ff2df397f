"""Models in GGUF files: their blocks, their weights, and damaged files."""

import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from draftwise import LLM, SamplingParams
from draftwise.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from draftwise.kernels.native import suitability
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.packed import PACKED
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..refusals import error_of
from ..tiny_models import Recipe
from .gguf_files.writing import save

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "tie_word_embeddings": False}
RECIPE = Recipe("llama", 128, seed=7, config=SIZES)
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def write_gguf(
    path, model, kinds=(Type.Q8_0,), architecture="llama", kind=None, merges=True, part_tensors=0
):
    """Write a Llama as llama.cpp's converter does; the linear layers use the kinds in turn."""
    config, weights = model.config, dict(model.named_parameters())
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=part_tensors)
    if kind is not None:
        writer.add_type(kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{at}" for at in range(3, config.vocab_size))])
    writer.add_token_types([1] * config.vocab_size)
    if merges:
        writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)

    def add(name, parameter, stored=None):
        data = weights[parameter].detach().float().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        count = heads.get(name.split(".")[-2])
        if count:  # the numbers that are rotated together are stored next to each other
            rows = data.reshape(count, 2, -1, data.shape[1])
            data = rows.swapaxes(1, 2).reshape(data.shape)
        if stored is None:
            writer.add_tensor(name, np.ascontiguousarray(data))
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)

    add("token_embd.weight", "model.embed_tokens.weight", kinds[0])
    add("output_norm.weight", "model.norm.weight")
    if "lm_head.weight" in weights:
        add("output.weight", "lm_head.weight", kinds[0])
    for layer in range(config.num_hidden_layers):
        for at, (name, module) in enumerate(LAYER.items()):
            add(
                f"blk.{layer}.{name}.weight",
                f"model.layers.{layer}.{module}.weight",
                kinds[at % len(kinds)],
            )
        for name, module in NORMS.items():
            add(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{module}.weight")
    save(writer)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", RECIPE.build())


@torch.inference_mode()
def logits_of(loaded, tokens):
    cache = loaded.model.new_cache(1, len(tokens))
    return loaded.model.forward(cache, tokens, [Segment(0, 0, len(tokens))], range(len(tokens)))


@pytest.mark.parametrize("kinds", [(Type.Q8_0,), (Type.Q8_0, Type.Q4_0, Type.Q5_1)])
def test_logits_are_those_of_the_quantised_weights(tmp_path, monkeypatch, kinds):
    model = RECIPE.build()
    path = str(write_gguf(tmp_path / "tiny.gguf", model, kinds))
    plain = load_model(path, "target", torch.float32, CPU)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = logits_of(plain, tokens)
    exact = model(input_ids=torch.tensor([tokens])).logits[0]
    # A wrong order of the rows would make the logits unrelated.
    assert torch.nn.functional.cosine_similarity(expected, exact, dim=1).min() > 0.9
    assert plain.eos_token_ids == {1, 2}
    assert plain.tokenizer.convert_ids_to_tokens([2, 3]) == ["ab", "t3"]
    monkeypatch.setattr(suitability, "_SMALL_MODEL", 0)
    monkeypatch.setattr(suitability, "_why_slower", lambda *_: None)
    stored = load_model(path, "target", torch.bfloat16, CPU)
    if native_library() is not None:
        assert stored.model.native.bits == PACKED
    error = (logits_of(stored, tokens) - expected).square().mean().sqrt() / expected.std()
    assert error < 0.03


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_counted_once(tmp_path, monkeypatch, is_tied):
    model = replace(RECIPE, config=SIZES | {"tie_word_embeddings": is_tied}).build()
    path = str(write_gguf(tmp_path / "tiny.gguf", model))
    monkeypatch.setattr(suitability, "_SMALL_MODEL", 0)
    monkeypatch.setattr(suitability, "_why_slower", lambda *_: None)
    loaded = load_model(path, "draft", torch.bfloat16, CPU)
    assert loaded.num_parameters == sum(each.numel() for each in model.parameters())


def test_a_file_is_target_and_draft(file):
    prompts, params = [[3, 5, 7], [2, 2]], SamplingParams(temperature=0.0, max_tokens=8)
    plain = LLM(str(file), dtype="float32").generate(prompts, params)
    both = LLM(str(file), {"draft": f"{file}:int8", "policy": "fixed"}, "float32")
    drafted = both.generate(prompts, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_truncated_file(file, tmp_path):
    for kept in [2, 100, 3000, -200]:
        part = tmp_path / "part.gguf"
        part.write_bytes(file.read_bytes()[:kept])
        raised = error_of(
            LLM,
            str(part),
            error=UnsupportedModelError,
            match=r"target: .* (truncated|not a GGUF file)",
        )
        assert "\n" not in str(raised), kept


def test_unknown_architecture(tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", RECIPE.build(), architecture="warbler")
    with pytest.raises(UnsupportedModelError, match="architecture 'warbler'") as raised:
        LLM(str(path))
    assert "\n" not in str(raised.value)


def test_other_files_and_missing_ones(tmp_path):
    other = tmp_path / "text.gguf"
    other.write_text("no model")
    with pytest.raises(UnsupportedModelError, match="is not a GGUF file"):
        LLM(str(other))
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        LLM(str(tmp_path / "none.gguf"))


def test_files_without_a_usable_model(tmp_path):
    for settings, reason in [
        ({"kind": "adapter"}, "is a LoRA adapter; merge it"),
        ({"architecture": "clip", "kind": "mmproj"}, "is an encoder of images"),
        ({"merges": False}, "has no tokenizer.ggml.merges"),
    ]:
        path = write_gguf(tmp_path / "odd.gguf", RECIPE.build(), **settings)
        error_of(LLM, str(path), error=UnsupportedModelError, match=reason)


def test_missing_packages(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InvalidParameterError, match=r"pip install 'draftwise\[gguf\]'"):
        LLM(str(file))
