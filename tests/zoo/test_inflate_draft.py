"""Heads and exits that are enlarged with their target draft the same tokens."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from draftwise import LLM, SamplingParams
from draftwise.errors import UnsupportedModelError
from draftwise.zoo import bundled, resolve
from draftwise.zoo.inflate_draft import inflate_draft

from ..stand_ins import unguarded
from ..tiny_heads import HeadRecipe
from .test_inflate import tiny_model

SIZE = "4m"
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5], [11, 21, 31, 1, 11, 21, 31]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The folder of the bundled models: a target, heads and an exit of it."""
    folder = tmp_path_factory.mktemp("weights")
    model = tiny_model(kv_heads=2, group=2, layers=3, seed=3)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder / "target")
    hidden = model.config.hidden_size
    recipe = HeadRecipe(
        (0, 2, 3),
        vocab=32,
        draft_vocab=20,
        hidden=hidden,
        target_hidden=hidden,
        # Rounding does not change the order of logits that differ this much.
        sharpness=2.0,
        layer={"max_position_embeddings": 64},
    )
    recipe.save(folder / "plain")
    normed = recipe.changed(
        settings={"norm_before_fc": True, "fc_norm": True, "norm_before_residual": True},
        own_embedding=True,
        qwen=True,
        draft_vocab=32,
        seed=5,
    )
    normed.save(folder / "normed")
    exits = folder / "early"
    exits.mkdir()
    generator = torch.Generator().manual_seed(2)
    adapter = {
        "norm.weight": 1 + 0.2 * torch.randn(hidden, generator=generator),
        "down.weight": torch.randn(4, hidden, generator=generator) / hidden**0.5,
        "up.weight": torch.randn(hidden, 4, generator=generator),
    }
    save_file(adapter, exits / "model.safetensors")
    config = {
        "draftwise_model_type": "exit",
        "exit": 2,
        "num_hidden_layers": 3,
        "hidden_size": hidden,
        "adapter_rank": 4,
        "rms_norm_eps": model.config.rms_norm_eps,
    }
    (exits / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", autouse=True)
def stored(weights, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundled, "_WEIGHTS", weights)
        # The kernels stay in the user's cache, as compiling them takes minutes.
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(bundled, "cache_folder", lambda: cache)
        yield


@pytest.fixture(scope="module")
def targets(stored):
    """The target and the inflated one, by the suffix of their names."""
    return {
        size: LLM(f"zoo:target{size}", dtype="float32", max_batch_size=3, max_model_len=48)
        for size in ("", f"@{SIZE}")
    }


@pytest.mark.parametrize("draft", ["plain", "normed", "early"])
def test_the_same_tokens_are_drafted(targets, draft):
    found = []
    for size, target in targets.items():
        speculation = unguarded(f"zoo:{draft}{size}", policy="fixed", num_speculative_tokens=4)
        outputs = target.with_speculation(speculation).generate(PROMPTS, GREEDY)
        found.append(
            [(o.token_ids, o.speculation.num_drafted, o.speculation.num_accepted) for o in outputs]
        )
    assert found[0] == found[1]
    assert sum(accepted for *_, accepted in found[0])


def test_an_inflated_draft_has_the_sizes_of_the_inflated_target():
    target = json.loads((resolve(f"zoo:target@{SIZE}") / "config.json").read_text())
    head = json.loads((resolve(f"zoo:plain@{SIZE}") / "config.json").read_text())
    early = json.loads((resolve(f"zoo:early@{SIZE}") / "config.json").read_text())
    assert target["hidden_size"] > 32
    assert target["num_hidden_layers"] > 3
    assert head["target_hidden_size"] == early["hidden_size"] == target["hidden_size"]
    assert head["transformer_layer_config"]["hidden_size"] == target["hidden_size"]
    assert early["num_hidden_layers"] == target["num_hidden_layers"]
    source = target["draftwise_inflated"]["source_layers"]
    assert head["eagle_aux_hidden_state_layer_ids"] == [0, source[1] + 1, source[2] + 1]
    assert early["exit"] == source[1] + 1


def test_only_heads_and_exits_are_inflated_as_drafts(weights, tmp_path):
    with pytest.raises(UnsupportedModelError, match="neither a head nor an exit"):
        inflate_draft(weights / "target", weights / "target", tmp_path / "out", 200_000)


def test_a_head_without_layer_ids_is_refused(weights, tmp_path):
    HeadRecipe(None, hidden=32, target_hidden=32).save(tmp_path / "head")
    with pytest.raises(UnsupportedModelError, match="eagle_aux_hidden_state_layer_ids"):
        inflate_draft(tmp_path / "head", weights / "target", tmp_path / "out", 200_000)
