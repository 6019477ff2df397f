"""Models whose attention is not causal and full are refused at load."""

import torch
import transformers

from draftwise import LLM, SamplingParams
from draftwise.errors import DraftwiseError

from ..tiny_models import Recipe, save
from .loading_tools import load, refused, tiny


class TestUnsupported:
    def test_encoder_and_decoder(self, tmp_path):
        config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
        config.save_pretrained(tmp_path)
        error = refused(tmp_path, role="draft", max_model_len=64)
        assert error.field == "draft"
        assert "encoder" in error.message

    def test_encoder_only(self, tmp_path):
        transformers.BertConfig(hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
        assert refused(tmp_path, DraftwiseError).field == "target"

    def test_no_language_model(self, tmp_path):
        transformers.CLIPTextConfig(hidden_size=16).save_pretrained(tmp_path)
        assert refused(tmp_path).message == (
            f"{str(tmp_path)!r} is a CLIPText model, for which transformers has no causal language "
            "model"
        )

    def test_other_recurrences(self, tmp_path):
        config = transformers.RwkvConfig(
            vocab_size=16, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        error = refused(save(model, tmp_path), max_model_len=64)
        assert error.field == "target"
        assert "does not support custom attention functions" in error.message

    def test_no_context_length(self, tmp_path):
        config = transformers.MambaConfig(
            vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4
        )
        config.save_pretrained(tmp_path)
        error = refused(tmp_path)
        assert error.field == "max_model_len"
        assert "set one" in error.message

    def test_other_attention(self, tmp_path):
        for class_name, settings, reason in [
            # Positions as biases of the scores.
            ("Bloom", {"n_layer": 2, "n_head": 2}, "bloom does not support custom attention"),
            ("Falcon", {"alibi": True}, "does not support custom attention functions"),
            # Attention that cannot be replaced by a custom function.
            (
                "GPTJ",
                {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
                "custom attention",
            ),
            (
                "Mpt",
                {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
                "mpt does not support custom attention functions",
            ),
            (
                "XLM",
                {"emb_dim": 16, "n_layers": 2, "n_heads": 4},
                "xlm does not support custom attention functions",
            ),
            # Attention that is not softmax over the keys.
            ("DiffLlama", {}, "not plain causal attention"),
            # Bidirectional attention.
            ("Bert", {}, "not plain causal attention"),
        ]:
            error = refused(tiny(tmp_path, class_name, **settings), max_model_len=64)
            assert error.field == "target", class_name
            assert reason in error.message, class_name

    def test_a_model_without_a_limit_of_its_context(self, tmp_path):
        config = transformers.XLNetConfig(
            vocab_size=16, d_model=16, n_layer=2, n_head=4, d_inner=24
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        error = refused(save(model, tmp_path))
        assert error.field == "max_model_len"
        assert "has no context length; set one" in error.message
        error = refused(tmp_path, max_model_len=64)
        assert error.message == "xlnet does not support custom attention functions"

    def test_a_context_longer_than_the_models(self, models):
        error = refused(models.folder(Recipe()), max_model_len=65)
        assert error.field == "max_model_len"
        assert "65 exceeds the target's context of 64 tokens" in error.message


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 32,
}


class TestPositionScaling:
    def test_dynamic_scaling_within_the_original_context(self, tmp_path):
        rope = {**DYNAMIC, "original_max_position_embeddings": 32}
        folder = tiny(tmp_path, "Llama", rope_parameters=rope)
        error = refused(folder)
        assert "'dynamic'" in error.message
        assert "set max_model_len to 32 or less" in error.message
        assert load(folder, max_model_len=32).max_model_len == 32

    def test_factors_that_are_the_same_for_all_lengths(self, tmp_path):
        for kind in ["Phi3", "Gemma3Text"]:
            rope = {**LONG, "long_factor": [2.0, 3.0], "short_factor": [2.0, 3.0]}
            if kind == "Gemma3Text":  # has settings for each type of layers
                layers = ("full_attention", "sliding_attention")
                rope, size = dict.fromkeys(layers, rope), {"head_dim": 4}
            else:
                size = {"original_max_position_embeddings": 32}
            loaded = load(tiny(tmp_path, kind, rope_parameters=rope, sliding_window=64, **size))
            assert loaded.max_model_len == 64, kind
            assert "rotary" not in str(loaded.model.slow_path), kind

    def test_scaling_of_one_type_of_layers(self, tmp_path):
        for different in ["full_attention", "sliding_attention"]:
            default = {"rope_type": "default", "rope_theta": 10000.0}
            rope = {"full_attention": default, "sliding_attention": default, different: LONG}
            error = refused(tiny(tmp_path, "Gemma3Text", rope_parameters=rope, head_dim=4))
            assert "set max_model_len to 32 or less" in error.message, different

    def test_scaling_for_long_contexts(self, tmp_path):
        folder = tiny(
            tmp_path,
            "Phi3",
            rope_parameters=LONG,
            original_max_position_embeddings=32,
            sliding_window=None,
        )
        error = refused(folder)
        assert "'longrope'" in error.message
        assert "set max_model_len to 32 or less" in error.message
        assert load(folder, max_model_len=32).max_model_len == 32

    def test_constant_scaling_is_supported(self, tmp_path):
        for rope in [
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            },
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ]:
            folder = tiny(tmp_path, "Llama", rope_parameters=rope)
            (output,) = LLM(folder, dtype="float32").generate(
                [1, 2, 3], SamplingParams(temperature=0, max_tokens=50)
            )
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=50, do_sample=False)
            assert [1, 2, 3, *output.token_ids] == expected[0].tolist(), rope
