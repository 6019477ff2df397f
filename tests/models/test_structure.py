"""The checks at load find another structure, and never rounding."""

import pytest
import torch
import transformers
from torch import nn

from draftwise.errors import UnsupportedModelError
from draftwise.models.float_copy import FloatCopy
from draftwise.models.pretrained import PretrainedModel

from ..tiny_models import Recipe

CONTEXT = 64


class Bidirectional(transformers.LlamaForCausalLM):
    def forward(self, input_ids, **kwargs):
        size = input_ids.shape[1]
        return super().forward(input_ids, attention_mask=torch.zeros(1, 1, size, size), **kwargs)


class OwnPositions(transformers.LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


class MixesTheBatch(transformers.LlamaForCausalLM):
    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + input_ids.float().mean()
        return output


class IgnoresLogitsToKeep(transformers.LlamaForCausalLM):
    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        return super().forward(input_ids, **kwargs)


class ReadsTheTokenBefore(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return self.mlp(hidden + 0.5 * hidden.roll(1, dims=1))


class ShiftsTokens(transformers.LlamaForCausalLM):
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        model = super().from_pretrained(*args, **kwargs)
        model.model.layers[1].mlp = ReadsTheTokenBefore(model.model.layers[1].mlp)
        return model


class Distances(transformers.LlamaForCausalLM):
    """Scores with a bias by distance, as in ALiBi."""

    def forward(self, input_ids, **kwargs):
        at = torch.arange(input_ids.shape[1])
        distance = (at[:, None] - at).float()
        mask = torch.where(distance < 0, float("-inf"), -distance)[None, None]
        return super().forward(
            input_ids, attention_mask=mask.to(self.lm_head.weight.dtype), **kwargs
        )


class HiddenWindow(transformers.LlamaForCausalLM):
    """A window that the attention function is not told about."""

    def forward(self, input_ids, **kwargs):
        at = torch.arange(input_ids.shape[1])
        distance = at[:, None] - at
        mask = torch.where((distance < 0) | (distance > 4), -1e9, 0.0)[None, None]
        return super().forward(
            input_ids, attention_mask=mask.to(self.lm_head.weight.dtype), **kwargs
        )


class ScalesByLength(transformers.LlamaForCausalLM):
    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits * (1 + 0.1 * input_ids.shape[1])
        return output


class OtherLayersOfTheCache(transformers.LlamaForCausalLM):
    """Both layers store their keys and values in one place."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].self_attn.layer_idx = 1


SABOTAGED = [
    Bidirectional,
    OwnPositions,
    MixesTheBatch,
    IgnoresLogitsToKeep,
    ShiftsTokens,
    Distances,
    HiddenWindow,
    ScalesByLength,
    OtherLayersOfTheCache,
]


@pytest.mark.covering("kind", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SABOTAGED, ids=lambda kind: kind.__name__)
def test_another_structure_is_refused(models, kind, dtype):
    model = kind.from_pretrained(models.folder(Recipe(vocab=32)), dtype=dtype)
    with pytest.raises(UnsupportedModelError) as caught:
        PretrainedModel(model, "target", CONTEXT)
    assert caught.value.field == "target"


LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 32,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
WITH_EXPERTS = {
    "Glm4MoeLite": LATENT,
    "MiniMaxM2": {"head_dim": 16, "num_local_experts": 32},
    "DeepseekV3": LATENT,
    "GptOss": {"head_dim": 16, "num_local_experts": 32, "sliding_window": 8},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 32, "moe_intermediate_size": 32},
    "Mixtral": {"num_local_experts": 32, "sliding_window": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_another_choice_of_experts_by_rounding_is_not_refused(family):
    settings = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 256,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**{**settings, **WITH_EXPERTS[family]})
    for seed in range(4):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        assert PretrainedModel(model, "target", 256).vocab_size == 512


def test_a_rounded_scale_of_the_embedding_is_not_refused(models):
    """Gemma 3 keeps the root of its size, rounded to the dtype that it was loaded in."""
    recipe = Recipe("gemma3_text", vocab=32, config={"hidden_size": 40})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models.folder(recipe), dtype=torch.bfloat16
    )
    assert model.model.embed_tokens.embed_scale.float() != 40**0.5
    assert PretrainedModel(model, "target", CONTEXT).vocab_size == 32


class TestCopies:
    """Copies in float32 for the checks."""

    def copied(self, models, recipe, dtype=torch.bfloat16):
        folder = models.folder(recipe)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        ids = torch.tensor([[3, recipe.vocab - 1, 3]])
        return model, ids, FloatCopy(model, ids)

    def test_a_copy_computes_what_the_model_computes(self, models):
        """In float32, for the tokens that the copy has."""
        model, ids, part = self.copied(models, Recipe(vocab=300), torch.float32)
        assert part.num_layers == 2
        kept = torch.tensor([*range(64), 299])
        with torch.inference_mode():
            expected = model(ids).logits[..., kept]
            torch.testing.assert_close(part.model(part.ids).logits, expected)

    def test_the_model_is_not_changed(self, models):
        model, ids, part = self.copied(models, Recipe(vocab=300))
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        assert {each.dtype for each in part.model.parameters()} == {torch.float32}
        assert model(ids).logits.shape == (1, 3, 300)
