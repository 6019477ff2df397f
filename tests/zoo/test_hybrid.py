"""The hybrid of the family: its beginning, its MTP layer, its folder and its inflation."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from draftwise.training.llama import new_llama
from draftwise.training.loop import Runtime
from draftwise.zoo.hybrid import load_hybrid, new_hybrid, save_hybrid
from draftwise.zoo.inflate import inflate
from draftwise.zoo.inflation_plan import choose_plan, count_parameters
from draftwise.zoo.recipe import STAGES, Distillation, HybridShape, ModelShape, Stage
from draftwise.zoo.training import distillation_trainer

from .conftest import TINY_SCHEDULE

LLAMA = ModelShape(
    hidden_size=16, num_layers=5, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24
)
HYBRID = HybridShape(
    hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24
)
TOKENS = torch.randint(0, 4096, (2, 70), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def randomised(model, seed=0, amount=0.2):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def hybrid():
    """A hybrid whose weights are all random."""
    return randomised(new_hybrid(HYBRID.config(), 1, new_llama(LLAMA.config(), 0)))


@torch.no_grad()
def test_it_begins_with_the_layers_of_its_target():
    llama = randomised(new_llama(LLAMA.config(), 0))
    for layer in llama.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    hybrid = new_hybrid(HYBRID.config(), 1, llama).eval()
    # Layer 3 of 5 has no counterpart.
    del llama.model.layers[3]
    torch.testing.assert_close(
        hybrid(TOKENS).logits, llama(TOKENS, use_cache=False).logits, atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_its_attention_begins_with_that_of_its_target():
    llama = randomised(new_llama(LLAMA.config(), 0))
    hybrid = new_hybrid(HYBRID.config(), 1, llama)
    own, given = hybrid.model.layers[3].self_attn, llama.model.layers[4].self_attn
    # Queries and keys are normalised, to about their own size.
    for part in (own.q_norm, own.k_norm):
        part.forward = lambda x: x
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1))
    angles = [
        model.model.rotary_emb(x, position_ids=torch.arange(9).unsqueeze(0))
        for model in (hybrid, llama)
    ]
    outs = [
        attention(x, position_embeddings=each, attention_mask=None)[0]
        for attention, each in zip((own, given), angles, strict=True)
    ]
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)


def test_heads_of_a_new_delta_net_remember_for_different_times():
    hybrid = new_hybrid(HYBRID.config(), 1, new_llama(LLAMA.config(), 0))
    net = hybrid.model.layers[0].linear_attn
    rates = net.A_log.exp() * torch.nn.functional.softplus(net.dt_bias)
    assert (1 / rates).tolist() == pytest.approx([2, 1000], rel=1e-3)


@torch.no_grad()
def expected_second(main, layer, tokens):
    """The logits of the MTP layer by transformers' own model of such layers."""
    states = main(tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
    positions = torch.arange(1, tokens.shape[1]).unsqueeze(0)
    cache = MtpCache(config=main.config.get_mtp_config())
    return main.lm_head(layer.forward_layer(0, states, positions, cache, input_ids=tokens[:, 1:]))


@torch.no_grad()
def test_both_tokens_are_predicted_as_transformers_does(hybrid):
    layer = MtpModel(hybrid, 1).eval()
    layer.layers[0].load_state_dict(hybrid.mtp.state_dict())
    first, second = hybrid.both(TOKENS[:1])
    torch.testing.assert_close(first, hybrid(TOKENS[:1]).logits, atol=1e-5, rtol=1e-5)
    expected = expected_second(hybrid, layer, TOKENS[:1])
    torch.testing.assert_close(second, expected, atol=1e-4, rtol=1e-4)


def test_a_folder_has_the_layout_of_qwen(hybrid, tmp_path):
    save_hybrid(hybrid, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["mtp_num_hidden_layers"] == 1
    names = {name for name in load_file(tmp_path / "model.safetensors") if name.startswith("mtp.")}
    own = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    assert {f"mtp.{part}.weight" for part in own} < names
    assert "mtp.layers.0.self_attn.q_proj.weight" in names
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = load_hybrid(tmp_path, torch.float32).eval()
    with torch.no_grad():
        expected = hybrid.both(TOKENS)
        torch.testing.assert_close(plain(TOKENS).logits, expected[0])
        torch.testing.assert_close(again.both(TOKENS), expected)


@pytest.mark.slow
def test_training_lowers_both_losses(corpus, tmp_path):
    stage = Stage(
        "hybrid",
        HYBRID,
        TINY_SCHEDULE,
        1,
        Distillation(TINY_SCHEDULE, num_continuations=4, prompt_length=8, continuation_length=8),
    )
    teacher = randomised(new_llama(LLAMA.config(), 0))
    model = new_hybrid(HYBRID.config(), 1, teacher)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    trainer = distillation_trainer(
        model,
        teacher,
        stage,
        stage.distillation,
        corpus,
        tmp_path,
        Runtime(torch.device("cpu"), compile=False),
    )
    trainer.run()
    assert trainer.num_steps == 3
    changed = {n for n, each in model.state_dict().items() if not torch.equal(each, before[n])}
    for name in ("mtp.eh_proj.weight", "model.layers.0.linear_attn.out_proj.weight"):
        assert name in changed


def test_sizes_are_counted(hybrid):
    config = hybrid.config
    num_main = sum(each.numel() for n, each in hybrid.named_parameters() if "mtp." not in n)
    assert count_parameters(config, 1, 1, 4) == num_main


@pytest.mark.parametrize("size", [100_000_000, 200_000_000, 500_000_000])
def test_inflated_sizes(size):
    config = STAGES["hybrid"].shape.config()
    plan = choose_plan(config, size)
    assert plan.num_layers % 4 == 0
    assert plan.num_parameters == pytest.approx(size, rel=0.1)
    assert 40 < config.hidden_size * plan.num_copies / plan.num_layers < 250


def test_inflation_preserves_both_functions(hybrid, tmp_path):
    save_hybrid(hybrid, tmp_path / "source")
    report = inflate(tmp_path / "source", tmp_path / "large", 1_000_000)
    assert report.num_copies > 1
    assert report.num_layers > 4
    large = load_hybrid(tmp_path / "large", torch.float32).eval()
    num_main = sum(each.numel() for n, each in large.named_parameters() if "mtp." not in n)
    assert num_main == report.num_parameters == pytest.approx(1_000_000, rel=0.2)
    kinds = large.config.layer_types
    assert kinds == ["linear_attention"] * 3 + ["full_attention"] + kinds[4:]
    with torch.no_grad():
        for expected, found in zip(hybrid.both(TOKENS), large.both(TOKENS), strict=True):
            assert expected.std() > 0.1
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_the_bundled_shape():
    with torch.device("meta"):
        config = STAGES["hybrid"].shape.config()
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert count_parameters(config, 1, 1, 4) == pytest.approx(8.5e6, rel=0.05)
