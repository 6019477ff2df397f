"""Folders of heads that draft blocks, in three layouts, are read as they come or refused."""

from pathlib import Path

import pytest
import torch

from draftwise.checkpoints.heads import HeadKind, HeadLayout, find_head, read_head
from draftwise.checkpoints.heads.block_parsing import parse_block_head_config
from draftwise.errors import UnsupportedModelError
from draftwise.models.heads.loading import check_head_kind

from ..refusals import error_of
from ..tiny_blocks import LAYOUTS, BlockRecipe

HEAD = BlockRecipe(layers=(-1, 0), markov="gated", confidence=True)
SLIDING = HEAD.changed(markov=None, windows=(7, None))


def test_all_layouts_give_the_same_head(tmp_path):
    for layout in LAYOUTS:
        folder = HEAD.changed(discards_anchor=layout == "z-lab").save(tmp_path / layout, layout)
        assert find_head(folder) == Path(folder)
        config, weights = read_head(folder)
        assert config.layout == HeadLayout(layout)
        assert config.kind is HeadKind.DSPARK
        # The output of layer k is the input of layer k + 1.
        assert config.state_layers == (0, 1), layout
        assert (config.block_size, config.mask_token_id) == (5, 3), layout
        assert config.discards_anchor == (layout == "z-lab")
        assert config.num_drafted == (4 if layout == "z-lab" else 5)
        assert config.is_causal == (False, False), layout
        assert (config.markov.kind, config.markov.rank) == ("gated", 6), layout
        assert config.has_confidence
        assert config.confidence_reads_markov
        assert weights.tensors.keys() == HEAD.tensors().keys(), layout
        assert torch.equal(weights.target_ids, torch.arange(8))


def test_attention_in_the_block():
    """Which layers are causal, and where windows end."""
    zlab, other = SLIDING.config("z-lab"), SLIDING.config("speculators")
    for config, causal in [
        (zlab, (True, False)),
        ({**zlab, "is_causal": False}, (False, False)),
        ({**zlab, "is_causal": True}, (True, True)),
        ({**zlab, "dflash_config": {**zlab["dflash_config"], "causal": False}}, (False, False)),
        ({**zlab, "layer_types": None}, (False, False)),
        (other, (True, False)),
        ({**other, "sliding_window_non_causal": True}, (False, False)),
    ]:
        parsed = parse_block_head_config(config)
        assert parsed.is_causal == causal
        assert parsed.windows_from_anchor == ("speculators_config" in config)


def test_a_part_of_the_vocabulary(tmp_path):
    head = HEAD.changed(draft_vocab=6, discards_anchor=False)
    config, weights = read_head(head.save(tmp_path, "speculators"))
    assert (config.draft_vocab_size, config.target_vocab_size) == (6, 8)
    assert weights.target_ids.tolist() == head.target_ids().tolist()
    for without, message in [("lm_head.weight", "such as lm_head.weight"), ("d2t", "no tensor")]:
        folder = head.save(tmp_path / without, "speculators", without=(without, "t2d"))
        error_of(read_head, folder, error=UnsupportedModelError, match=message)


SECOND = HEAD.changed(markov=None, confidence=False, second=True)


def test_heads_of_dflash_2(tmp_path):
    for layout in LAYOUTS:
        config, weights = read_head(SECOND.save(tmp_path / layout, layout))
        assert config.kind is HeadKind.DFLASH2
        assert (config.convolution.taps, config.convolution.group_size) == (3, 4), layout
        assert (config.selector.rank, config.selector.num_candidates) == (6, 5), layout
        assert weights.tensors.keys() == SECOND.tensors().keys(), layout
        # In `speculators`, these heads are not causal unless they say so.
        windowed = SECOND.changed(windows=(7, None)).config(layout)
        windowed.pop("sliding_window_non_causal", None)
        if layout == "speculators":
            assert parse_block_head_config(windowed).is_causal == (False, False)
    # Embeddings are also stored under the names of their parameters.
    names = ["predecessor_codebook", "successor_codebook"]
    tensors = {f"candidate_selector.{name}" for name in names}
    renamed = {f"{name}.weight": SECOND.tensors()[name] for name in tensors}
    folder = SECOND.save(tmp_path / "names", without=tuple(tensors), tensors=renamed)
    assert read_head(folder)[1].tensors.keys() == SECOND.tensors().keys()
    check_head_kind(folder, "dflash")


def test_settings_that_are_off_change_nothing(tmp_path):
    changes = {"gate": None, "use_heads": False, "loss_decay_gamma": 4.0}
    read_head(HEAD.save(tmp_path, "speculators", changes=changes))


def test_states_of_the_last_layer_are_refused():
    """They are normalised in one place and not in another."""
    for layout, key in [("z-lab", "target_layer_ids"), ("speculators", "aux_hidden_state_layer_")]:
        config = parse_block_head_config(HEAD.changed(layers=(0, 2)).config(layout))
        assert config.states_of(4) == (1, 3)
        error_of(config.states_of, 3, error=UnsupportedModelError, match=key)


def test_methods_name_the_kind(tmp_path):
    folder = HEAD.save(tmp_path, "deepspec")
    check_head_kind(folder, "dspark")
    with pytest.raises(UnsupportedModelError, match="is a head of DSpark, and the method is 'dfl"):
        check_head_kind(folder, "dflash")


SIZES = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-6,
}


def test_settings_of_published_folders():
    """With what else their configurations have."""
    others = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dtype": "bfloat16",
        "max_window_layers": 5,
        "num_target_layers": 36,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }
    first = parse_block_head_config(
        {
            **SIZES,
            **others,
            "architectures": ["DFlashDraftModel"],
            "block_size": 16,
            "dflash_config": {"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]},
            "layer_types": ["full_attention"] * 5,
        }
    )
    assert first.states_of(36) == (2, 10, 18, 26, 34)
    assert (first.kind, first.num_drafted, first.windows) == (HeadKind.DFLASH, 15, (None,) * 5)
    second = parse_block_head_config(
        {
            **SIZES,
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "dflash_config": {
                "block_size": 16,
                "conv_group_size": 16,
                "conv_kernel_size": 2,
                "final_logit_softcapping": 20.0,
                "mask_token_id": 151_669,
                "output_multiplier": 0.196,
                "selector_rank": 256,
                "selector_top_k": 16,
                "target_layer_ids": [1, 13, 25, 37, 49],
            },
            "layer_types": ["sliding_attention"] * 5,
            "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
            "sliding_window": 2048,
        }
    )
    assert second.kind is HeadKind.DFLASH2
    assert (second.is_causal, second.windows) == ((False,) * 5, (2048,) * 5)
    assert (second.logit_scale, second.logit_softcap) == (0.196, 20.0)
    third = parse_block_head_config(
        {
            **SIZES,
            **others,
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "mask_token_id": 151_669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "num_anchors": 512,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "layer_types": ["full_attention"] * 5,
        }
    )
    assert (third.kind, third.num_drafted) == (HeadKind.DSPARK, 7)
