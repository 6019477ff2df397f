"""Tiny targets with an MTP layer, in the layouts of checkpoints."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from .tiny_models import Recipe, edit_config

# Where the checkpoints of families have what transformers calls by other names.
QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "post_norm.": "mtp.norm.",
    "mtp_block.": "mtp.layers.0.",
}
DEEPSEEK = {
    "enorm.": "model.layers.2.enorm.",
    "hnorm.": "model.layers.2.hnorm.",
    "eh_proj.": "model.layers.2.eh_proj.",
    "post_norm.": "model.layers.2.shared_head.norm.",
    "mtp_block.": "model.layers.2.",
}
# transformers takes the norms of the last layer, which is one of attention in these families.
LAYERS = ["linear_attention", "linear_attention", "full_attention"]
# Family, settings, how its configuration counts, and the names in its checkpoint.
CASES = {
    "qwen3_5": (
        Recipe("qwen3_5", 8, 256, seed=3, config={"layer_types": LAYERS}),
        "mtp_num_hidden_layers",
        QWEN,
    ),
    # Without recurrent layers. Such a family has no names of its own for the layer.
    "qwen3": (Recipe("qwen3", 8, 256, seed=3), "num_nextn_predict_layers", DEEPSEEK),
    # With experts, and keys and values of different sizes.
    "deepseek_v3": (Recipe("deepseek_v3", 8, 256, seed=3), "num_nextn_predict_layers", DEEPSEEK),
}


@torch.inference_mode()
def expected_logits(main, layer, tokens):
    """Logits of a layer, with no cache.

    Args:
        main: the target of transformers.
        layer: its ``MtpModel``.
        tokens: token ids.

    Returns:
        ``[tokens - 1, vocab]`` of the token after each but the first.
    """
    ids = torch.tensor([tokens])
    states = main(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
    positions = torch.arange(1, len(tokens)).unsqueeze(0)
    cache = MtpCache(config=main.config.get_mtp_config())
    hidden = layer.forward_layer(0, states, positions, cache, input_ids=ids[:, 1:])
    return main.lm_head(hidden)[0]


def random_layer(main):
    """A random ``MtpModel`` for a target whose configuration says what kind of layer it is."""
    layer = MtpModel(main, 1).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in layer.layers.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Experts are not initialised.
        parameter.data = parameter.data + 0.1 * noise if "norm" in name else 0.3 * noise
    return layer


def add_layer(case, models, path):
    """Copy a target and give it a random MTP layer.

    Args:
        case: key of ``CASES``.
        models: the shelf of models.
        path: the folder to write.

    Returns:
        The folder, and the target and its layer as transformers computes them.
    """
    recipe, count, names = CASES[case]
    folder = Path(shutil.copytree(models.folder(recipe), path))
    edit_config(folder, **{count: 1})
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = main.config.get_text_config()
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None):
        text.mtp_layer_types = ["full_attention"]
    layer = random_layer(main)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in layer.layers[0].state_dict().items():
        begin = next(each for each in names if name.startswith(each))
        tensors[names[begin] + name.removeprefix(begin)] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, main, layer
