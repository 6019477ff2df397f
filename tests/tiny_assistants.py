"""Tiny assistants of Gemma 4 and their targets, as transformers computes them."""

from unittest.mock import patch

import torch
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
)

from .tiny_models import FAMILIES, Recipe, save

VOCAB = 8
# As in the small targets: layers that share keys, and embeddings per layer. As in the large ones:
# all layers have keys, and full layers have values that are their keys.
SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4}
SHARED |= {"vocab_size_per_layer_input": VOCAB}
KEYS_AS_VALUES = {"attention_k_eq_v": True}
# Settings of the target, the layers of it that an assistant reads, and settings of the assistant.
CASES = {
    "all tokens": (SHARED, {"sliding_attention": 0, "full_attention": 1}, {}),
    "ordered": (
        KEYS_AS_VALUES,
        {"sliding_attention": 2, "full_attention": 3},
        {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2},
    ),
}


def calm(model):
    """Make scores of attention small, as sharp ones turn rounding errors into other choices."""
    for name, parameter in model.named_parameters():
        if "q_norm" in name:
            parameter.data *= 0.3


def make_assistant(case, path):
    """Write a random target and a random assistant.

    Args:
        case: key of ``CASES``.
        path: the folder in which two folders are written.

    Returns:
        The folder of the target and that of the assistant, and both as transformers computes them.
    """
    main = Recipe("gemma4_text", VOCAB, 256, seed=3, config=CASES[case][0]).build()
    calm(main)
    target = save(main, path / "target")
    text = {
        **FAMILIES["gemma4_text"][1],
        **{name: each for name, each in CASES[case][0].items() if name == "attention_k_eq_v"},
        **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"]),
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "model_type": "gemma4_text",
    }
    # This version of transformers expects a layer that others share keys with.
    reads = property(lambda config: ["reuse"] * config.num_hidden_layers)
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", reads):
        config = Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=main.config.hidden_size, **CASES[case][2]
        )
        assistant = Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in assistant.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        size = 0.2 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
        parameter.data = parameter.data * (parameter.dim() == 1) + size * noise
    if assistant.masked_embedding is not None:
        ordering = torch.randperm(VOCAB, generator=generator)
        assistant.masked_embedding.token_ordering.copy_(ordering)
    calm(assistant)
    assistant.save_pretrained(path / "assistant")
    return target, str(path / "assistant"), main, assistant


@torch.inference_mode()
def expected_logits(case, main, assistant, tokens, drafted):
    """``[drafted, vocab]`` of the tokens of a draft, computed by transformers' module.

    Args:
        case: key of ``CASES``.
        main: the target.
        assistant: the assistant.
        tokens: a text, of which the target has not read the last token.
        drafted: the tokens that were drafted after it.
    """
    cache = DynamicCache()
    read = main(torch.tensor([tokens[:-1]]), past_key_values=cache, output_hidden_states=True)
    layers = {kind: cache.layers[layer] for kind, layer in CASES[case][1].items()}
    carried = read.hidden_states[-1][:, -1:]
    position = torch.tensor([[len(tokens) - 1]])
    rows = []
    for token in [tokens[-1], *drafted[:-1]]:
        embedded = main.get_input_embeddings()(torch.tensor([[token]]))
        output = assistant(
            inputs_embeds=torch.cat([embedded, carried], dim=-1),
            position_ids=position,
            shared_kv_states={kind: (each.keys, each.values) for kind, each in layers.items()},
        )
        rows.append(output.logits[0, 0])
        carried = output.last_hidden_state
    return torch.stack(rows)
