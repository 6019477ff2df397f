"""Models that are trained from random weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftwise.training.llama import is_layer_matrix, new_llama

CONFIG = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def test_layers_start_as_the_identity():
    model = new_llama(LlamaConfig(**CONFIG), 3)
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        embedded = model.model.embed_tokens(ids)
        torch.testing.assert_close(model.model(ids).last_hidden_state, model.model.norm(embedded))
    # All other weights are those that transformers draws from the seed.
    torch.manual_seed(3)
    drawn = LlamaForCausalLM(LlamaConfig(**CONFIG)).state_dict()
    for name, weight in model.state_dict().items():
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(weight, drawn[name]), name


def test_muon_trains_the_matrices_of_layers():
    names = dict(new_llama(LlamaConfig(**CONFIG), 0).named_parameters())
    matrices = {name for name in names if is_layer_matrix(name) and names[name].ndim == 2}
    assert len(matrices) == 2 * 7
    assert set(names) - matrices == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(
            f"model.layers.{index}.{norm}_layernorm.weight"
            for index in range(2)
            for norm in ("input", "post_attention")
        ),
    }
