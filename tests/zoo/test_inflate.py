import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from draftwise.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from draftwise.zoo import resolve
from draftwise.zoo.inflate import inflate, inflate_weights, main, power_of_two_coefficients
from draftwise.zoo.inflation_plan import (
    InflationPlan,
    choose_plan,
    count_parameters,
    source_layer_positions,
)
from draftwise.zoo.recipe import STAGES


def tiny_model(*, kv_heads=1, group=2, layers=2, tied=True, bias=False, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8 * kv_heads * group,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=8,
        intermediate_size=12,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    # Far from the initial values, where biases are zero and norms are one.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


@torch.no_grad()
def assert_same_function(first, second, vocabulary):
    tokens = torch.randint(vocabulary, (3, 20), generator=torch.Generator().manual_seed(1))
    expected, actual = first(tokens).logits, second(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    tied=st.booleans(),
    bias=st.booleans(),
    copies=st.integers(1, 6),
    mlp_copies=st.integers(1, 6),
    extra_layers=st.integers(0, 3),
)
def test_function_is_preserved(kv_heads, group, tied, bias, copies, mlp_copies, extra_layers):
    source = tiny_model(kv_heads=kv_heads, group=group, tied=tied, bias=bias)
    config = source.config
    layers = config.num_hidden_layers + extra_layers
    size = count_parameters(config, copies, mlp_copies, layers)
    plan = InflationPlan(copies, mlp_copies, layers, size)
    values = config.to_dict()
    values["hidden_size"] *= copies
    values["num_attention_heads"] *= copies
    values["num_key_value_heads"] *= copies
    values["intermediate_size"] *= mlp_copies
    values["num_hidden_layers"] = layers
    larger = LlamaForCausalLM(LlamaConfig(**values)).eval()
    weights = inflate_weights(source.state_dict(), config, plan, seed=0)
    missing, unexpected = larger.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    assert larger.num_parameters() == size
    assert_same_function(source, larger, config.vocab_size)


def test_added_layers_compute():
    source = tiny_model()
    plan = InflationPlan(2, 2, 4, 0)
    weights = inflate_weights(source.state_dict(), source.config, plan, seed=0)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert weights[f"model.layers.0.{part}.weight"].count_nonzero() > 0
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        assert weights[f"model.layers.0.{part}.weight"].count_nonzero() == 0
        assert weights[f"model.layers.1.{part}.weight"].count_nonzero() > 0


@given(st.integers(1, 100))
def test_coefficients(count):
    coefficients = power_of_two_coefficients(count)
    assert len(coefficients) == count
    assert sum(coefficients) == 1.0
    assert all((1 / c).is_integer() and int(1 / c).bit_count() == 1 for c in coefficients)
    assert max(coefficients) <= 2 * min(coefficients)


@given(st.integers(1, 10), st.integers(0, 30))
def test_layer_positions(num_source, extra):
    positions = source_layer_positions(num_source, num_source + extra)
    assert len(set(positions)) == num_source
    assert positions[0] >= 0
    assert positions[-1] == num_source + extra - 1
    assert list(positions) == sorted(positions)


@pytest.mark.parametrize("size", [50_000_000, 200_000_000, 500_000_000, 1_000_000_000])
def test_sizes_of_the_target(size):
    config = STAGES["target"].shape.config()
    plan = choose_plan(config, size)
    assert plan.num_parameters == pytest.approx(size, rel=0.05)
    aspect = config.hidden_size * plan.num_copies / plan.num_layers
    assert 40 < aspect < 200


@pytest.mark.parametrize("name", ["companion", "spare", "mid", "draft"])
@pytest.mark.parametrize("size", [20_000_000, 40_000_000])
def test_small_models_are_inflated_to_widths_of_the_native_kernels(name, size):
    config = STAGES[name].shape.config()
    plan = choose_plan(config, size)
    assert plan.num_parameters == pytest.approx(size, rel=0.05)
    assert config.hidden_size * plan.num_copies % 32 == 0
    assert config.intermediate_size * plan.num_mlp_copies % 32 == 0


def test_folder(tmp_path):
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    report = inflate(source, tmp_path / "large", 100_000)
    larger = AutoModelForCausalLM.from_pretrained(tmp_path / "large").eval()
    assert larger.num_parameters() == report.num_parameters == pytest.approx(100_000, rel=0.1)
    assert_same_function(tiny_model(), larger, 32)
    values = json.loads((tmp_path / "large" / "config.json").read_text())
    assert values["draftwise_inflated"]["source"] == "source"
    assert "labelled" in (tmp_path / "large" / "README.md").read_text()
    assert (tmp_path / "large" / "tokenizer.json").exists()


def test_seed_determines_the_added_layers():
    source = tiny_model()
    plan = InflationPlan(2, 2, 3, 0)
    first, same, other = (
        inflate_weights(source.state_dict(), source.config, plan, seed) for seed in (0, 0, 1)
    )
    assert all(torch.equal(weight, same[name]) for name, weight in first.items())
    differing = {name for name, weight in first.items() if not torch.equal(weight, other[name])}
    assert {name.split(".")[2] for name in differing} == {"1"}


def test_errors(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        inflate(tmp_path, tmp_path / "large", 100_000)
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        inflate(tmp_path / "gpt2", tmp_path / "large", 100_000)
    tiny_model().save_pretrained(tmp_path / "source")
    with pytest.raises(InvalidParameterError, match="num_parameters"):
        inflate(tmp_path / "source", tmp_path / "large", 100)
    assert not (tmp_path / "large").exists()


def test_command_line(tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path / "source")
    paths = [str(tmp_path / "source"), str(tmp_path / "large")]
    assert main([*paths, "--parameters", "0.1M"]) == 0
    assert json.loads(capsys.readouterr().out)["num_copies"] > 1
    assert main([*paths, "--parameters", "many"]) == 2
    assert "200m" in capsys.readouterr().err


def test_bundled_target(tmp_path):
    inflate(resolve("zoo:target"), tmp_path, 30_000_000)
    source, larger = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (resolve("zoo:target"), tmp_path)
    )
    assert_same_function(source, larger, source.config.vocab_size)
