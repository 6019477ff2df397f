"""Folders of drafting heads with wrong configurations or tensors are refused, and say why."""

import torch

from draftwise.checkpoints.heads import read_head
from draftwise.errors import UnsupportedModelError

from ..refusals import error_of
from .test_block_head_files import HEAD as BLOCK
from .test_block_head_files import SECOND
from .test_eagle_head_files import HEAD, NORMED, SPECULATORS
from .test_head_files import HEAD as EAGLE3

OWN = torch.arange(6)
EAGLE3_SETTINGS = [
    ({"speculators_model_type": "medusa"}, "of type 'medusa'"),
    ({"transformer_layer_config": None}, "no transformer_layer_config"),
    ({"draft_vocab_size": 0}, "draft_vocab_size in config.json"),
    ({"logit_scale": "large"}, "logit_scale in config.json of the head must be a positive"),
    ({"logit_scale": -1.0}, "must be a positive number, got -1.0"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}, "must be ascending"),
    ({"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2, and 3 layer ids"),
    ({"draft_vocab_size": 7}, r"lm_head.weight of the head has the shape \[6, 16\]"),
    ({"target_hidden_size": 32}, r"fc.weight of the head has the shape \[16, 48\]"),
    ({"norm_before_fc": True}, "1 are missing, such as input_norm.weight"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ({"eagle_config": [1]}, "eagle_config in config.json of the head must be an object"),
    ({"eagle_aux_hidden_state_layer_ids": 2}, "must be a list, got 2"),
]
EAGLE_SETTINGS = [
    (SPECULATORS, {"speculators_model_type": "mlp"}, "of type 'mlp'; supported are .*'eagle'"),
    (SPECULATORS, {"transformer_layer_config": None}, "no transformer_layer_config"),
    (
        SPECULATORS,
        {"transformer_layer_architecture": "GemmaDecoderLayer"},
        "transformer_layer_architecture of the head is 'GemmaDecoderLayer'",
    ),
    (SPECULATORS, {"layernorms": True}, "3 are missing, such as embedding_layernorm.weight"),
    (SPECULATORS, {"fusion_bias": True}, "1 are missing, such as fc.bias"),
    (NORMED, {"fusion_bias": False}, "has a tensor 'fc.bias', which no EAGLE-1 or EAGLE-2"),
    (NORMED, {"layernorms": False}, "has a tensor '.*norm.weight', which no EAGLE-1"),
    (HEAD, {"bias": True}, "1 are missing, such as fc.bias"),
    (HEAD.changed(bias=True), {"bias": False}, "has a tensor 'fc.bias'"),
    (HEAD, {"model_type": "gemma"}, "layer is of type 'gemma'"),
    (HEAD, {"vocab_size": 9}, r"embed_tokens.weight of the head has the shape \[8, 16\]"),
    (HEAD, {"hidden_size": 32}, r"of the head has the shape"),
    (HEAD, {"num_attention_heads": None}, "config.json of the head has no num_attention_heads"),
    (
        HEAD,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "position scaling 'dynamic' depends on the length",
    ),
]
DFLASH = {"target_layer_ids": [-1, 0], "block_size": 5, "mask_token_id": 3}
BLOCK_SETTINGS = [
    # With the default of EAGLE-3 in their place nothing would be accepted.
    ("z-lab", {"dflash_config": {**DFLASH, "target_layer_ids": None}}, "no target_layer_ids"),
    ("deepspec", {"target_layer_ids": None}, "no target_layer_ids"),
    ("speculators", {"aux_hidden_state_layer_ids": None}, "no aux_hidden_state_layer_ids"),
    ("speculators", {"aux_hidden_state_layer_ids": [1, 1]}, "must be ascending layers, got"),
    ("deepspec", {"target_layer_ids": [-2, 0]}, "must be ascending layers, got"),
    ("z-lab", {"dflash_config": {**DFLASH, "mask_token_id": None}}, "mask_token_id .* got None"),
    ("speculators", {"mask_token_id": 8}, "mask_token_id .* is 8, and the target has 8 tokens"),
    ("z-lab", {"dflash_config": {**DFLASH, "block_size": 65}}, "block_size .* 2 to 64, got 65"),
    ("deepspec", {"block_size": None}, "no block_size"),
    ("z-lab", {"dflash_config": {**DFLASH, "gate": 1}}, r"dflash_config\.gate .* is unknown"),
    ("speculators", {"gate": "sigmoid"}, "gate in config.json of the head is unknown"),
    ("speculators", {"projector_type": "domino"}, "projector_type .* is 'domino'"),
    ("speculators", {"shift_label": True}, "shift_label .* is True"),
    ("deepspec", {"markov_head_type": "lstm"}, "markov_head_type .* is 'lstm'"),
    ("deepspec", {"markov_rank": 0}, "confidence_head_with_markov .* needs a markov_rank"),
    ("speculators", {"sample_from_anchor": 1}, "must be true or false, got 1"),
    ("deepspec", {"model_type": "gemma4"}, "layer is of type 'gemma4'"),
    ("deepspec", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "layer_types"),
    ("deepspec", {"markov_rank": 5}, "of the head has the shape .* asks for"),
    ("deepspec", {"enable_confidence_head": False}, "tensor 'confidence_head.proj"),
    ("deepspec", {"selector_rank": 4}, "no conv_kernel_size"),
]
SECOND_SETTINGS = [
    ("speculators", {"conv_group_size": 3}, "conv_group_size .*, 3, must divide hidden_size, 16"),
    ("speculators", {"conv_kernel_size": 6}, "conv_kernel_size .*, 6, must be at most block_size"),
    ("speculators", {"selector_top_k": 9}, "selector_top_k .* is 9, of 8 tokens of 8"),
    ("speculators", {"selector_rank": 4}, "candidate_selector.* has the shape .* asks for"),
    ("speculators", {"draft_ffn_type": "moe"}, "draft_ffn_type .* is 'moe'"),
    ("speculators", {"markov_rank": 6}, "a markov_rank and a selector_rank"),
]
EAGLE3_TENSORS = [
    # Ids in place of offsets lead beyond the vocabulary.
    ({"d2t": EAGLE3.target_ids()}, "must contain offsets"),
    ({"d2t": -OWN - 1}, "must contain offsets"),
    ({"d2t": -OWN}, "maps two tokens to one"),
    ({"d2t": OWN[:5]}, "must contain 6 integers"),
    ({"d2t": OWN.float()}, "must contain 6 integers"),
    ({"d2t": 0 * OWN}, "name different tokens"),
    ({"extra.weight": torch.zeros(1)}, "has a tensor 'extra.weight'"),
    (
        {"mask_hidden": torch.zeros(1, 1, 48)},
        "as those of P-EAGLE, and config.json has no mask_token_id",
    ),
    ({"norm.weight": torch.zeros(3)}, r"norm.weight of the head has the shape \[3\]"),
]
EAGLE_TENSORS = [
    # EAGLE-3's head reads three states, and some heads read the states only.
    ({"fc.weight": torch.zeros(16, 48)}, r"fc.weight .* shape \[16, 48\], .* \[16, 32\]"),
    ({"fc.weight": torch.zeros(16, 16)}, r"fc.weight .* shape \[16, 16\], .* \[16, 32\]"),
    ({"d2t": torch.arange(8)}, "has a tensor 'd2t', which no EAGLE-1 or EAGLE-2 head"),
    ({"extra.weight": torch.zeros(1)}, "has a tensor 'extra.weight'"),
    ({"layers.0.input_layernorm.weight": torch.ones(16)}, "has a tensor 'layers.0.input_"),
    ({"layers.0.mlp.up_proj.weight": torch.zeros(24, 8)}, r"up_proj.weight .*\[24, 8\]"),
]
MISSING = [
    (EAGLE3, "layers.0.mlp.up_proj.weight", "1 are missing, such as layers.0.mlp.up_proj.weight"),
    (EAGLE3, "d2t", "has no tensor 'd2t'"),
    (BLOCK, "fc.weight", "such as fc.weight"),
    (BLOCK, "hidden_norm.weight", "such as hidden_norm.weight"),
    (BLOCK, "layers.1.self_attn.k_proj.weight", "such as layers.1"),
    (BLOCK, "markov_head.gate_proj.bias", "such as markov_head.gate_proj.bias"),
    *(
        (head, name, f"1 are missing, such as {name}")
        for head in (HEAD, SPECULATORS)
        for name in (
            "layers.0.self_attn.o_proj.weight",
            "layers.0.post_attention_layernorm.weight",
            "fc.weight",
        )
    ),
]


def assert_refused(folder, message):
    caught = error_of(read_head, folder, error=UnsupportedModelError, match=message)
    assert caught.field == "draft", message
    assert "\n" not in caught.message, message


def test_wrong_configurations_are_refused(tmp_path):
    cases = [(EAGLE3, None, *case) for case in EAGLE3_SETTINGS]
    cases += [(head, None, *case) for head, *case in EAGLE_SETTINGS]
    cases += [(BLOCK, *case) for case in BLOCK_SETTINGS]
    cases += [(SECOND, *case) for case in SECOND_SETTINGS]
    for number, (head, layout, changes, message) in enumerate(cases):
        assert_refused(head.save(tmp_path / str(number), layout, changes), message)


def test_wrong_tensors_are_refused(tmp_path):
    cases = [(EAGLE3, *case) for case in EAGLE3_TENSORS]
    cases += [(head, *case) for head in (HEAD, SPECULATORS) for case in EAGLE_TENSORS]
    other = {"layers.2.other.weight": torch.zeros(2)}
    cases.append((BLOCK, other, "no DSpark head with its"))
    for number, (head, tensors, message) in enumerate(cases):
        assert_refused(head.save(tmp_path / str(number), tensors=tensors), message)


def test_missing_tensors_are_named(tmp_path):
    for number, (head, name, message) in enumerate(MISSING):
        assert_refused(head.save(tmp_path / str(number), without=(name,)), message)
