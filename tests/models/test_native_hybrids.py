"""Models with recurrent layers in the native kernels, compared with transformers' modules."""

import copy

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from draftwise.kernels.native import suitability
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.narrow import COMPRESSED_BITS
from draftwise.kernels.native.packed import PACKED
from draftwise.models import loading
from draftwise.models.hidden_states import StateTap
from draftwise.models.loading import load_model
from draftwise.models.packed_modules import has_packed_modules
from draftwise.models.pretrained import PretrainedModel
from draftwise.models.recurrent.cache import MAX_ROWS
from draftwise.models.recurrent.computation import state_at
from draftwise.models.segment import Segment
from draftwise.models.structure import relative_errors

from .gguf_files import CASES, make
from .passes import SIZES, assert_same_with_any_threads, logits_of, random_model

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

CPU = torch.device("cpu")
CONTEXT = 200
VOCAB = SIZES["vocab_size"]
DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 20,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 60}
# Sizes without whole vectors, biases, experts, groups of one head, and tiles of the matrix unit.
FAMILIES = {
    "Qwen3_5Text": DELTA_NET,
    "Qwen3_5Text, many heads": {
        **DELTA_NET,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 72,
    },
    "Qwen3_5Text, tiles": {
        **DELTA_NET,
        "hidden_size": 128,
        "head_dim": 32,
        "intermediate_size": 192,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "Qwen3_5MoeText": {
        **DELTA_NET,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "Qwen3Next": {
        **DELTA_NET,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "Lfm2": CONVOLUTION,
    "Lfm2, bias": {**CONVOLUTION, "conv_bias": True, "conv_L_cache": 5},
    "GraniteMoeHybrid": MAMBA,
    "GraniteMoeHybrid, rotation": {
        **MAMBA,
        "position_embedding_type": "rope",
        "mamba_proj_bias": True,
        "time_step_limit": [0.3, 1.2],
    },
    "GraniteMoeHybrid, experts": {
        **MAMBA,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}
# One of each kind.
KINDS = ["Qwen3_5Text", "Lfm2", "GraniteMoeHybrid"]
TEXT = torch.randint(0, VOCAB, (170,), generator=torch.Generator().manual_seed(6)).tolist()
WRONG = torch.randint(0, VOCAB, (170,), generator=torch.Generator().manual_seed(7)).tolist()


def build(family):
    return random_model(family, max_position_embeddings=CONTEXT, **FAMILIES[family])


def packed(family, dtype=torch.float32):
    model = PretrainedModel(build(family).to(dtype), "target", CONTEXT)
    assert model.native is not None
    assert model.slow_path is None
    return model


def assert_close(actual, expected):
    """Some positions depend on differences of almost equal numbers, in transformers, too."""
    errors = relative_errors(actual, expected)
    assert errors.quantile(0.9).item() < 1e-5
    assert errors.max().item() < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    own = build(family)
    expected_of = copy.deepcopy(own)
    model = PretrainedModel(own, "target", CONTEXT)
    assert model.native is not None
    assert model.slow_path is None
    expected = expected_of(torch.tensor([TEXT[:80]])).logits[0]
    for pieces in ([80], [9, 1, 1, 12, 57]):
        assert_close(logits_of(model, TEXT[:80], pieces), expected)


@torch.inference_mode()
@pytest.mark.parametrize("family", KINDS)
def test_bfloat16_is_close_to_float32(family):
    exact = build(family)
    expected = copy.deepcopy(exact)(torch.tensor([TEXT[:40]])).logits[0]
    got = logits_of(packed(family, torch.bfloat16), TEXT[:40])
    assert relative_errors(got, expected).median().item() < 0.1


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*KINDS, "Qwen3_5Text, tiles"])
def test_bits_do_not_depend_on_chunks_and_other_requests(family, dtype):
    model = packed(family, dtype)
    alone = logits_of(model, TEXT, [1] * len(TEXT))
    for size in (63, 64, 65, len(TEXT)):
        rest = len(TEXT) % size
        pieces = [*[size] * (len(TEXT) // size), *([rest] if rest else [])]
        assert torch.equal(logits_of(model, TEXT, pieces), alone), size
    cache = model.new_cache(3, CONTEXT)
    segments = [Segment(2, 0, 40), Segment(0, 0, 50), Segment(1, 0, 3)]
    tokens = [*WRONG[:40], *TEXT[:50], *WRONG[:3]]
    together = model.forward(cache, tokens, segments, range(40, 90)).float()
    assert torch.equal(together, alone[:50])
    for slot in range(3):
        cache.truncate(slot, cache.lengths[slot])
    segments = [Segment(1, 3, 1), Segment(0, 50, 9), Segment(2, 40, 2)]
    tokens = [WRONG[3], *TEXT[50:59], *WRONG[40:42]]
    together = model.forward(cache, tokens, segments, range(1, 10)).float()
    assert torch.equal(together, alone[50:59])


@torch.inference_mode()
@pytest.mark.parametrize("family", KINDS)
def test_threads_do_not_change_results(family):
    model = packed(family, torch.bfloat16)
    assert_same_with_any_threads(lambda: logits_of(model, TEXT[:60], [41, 1, 9, 9]), repeats=4)


def drafted(model, num_kept, count=9):
    """Logits around a draft of which ``num_kept`` tokens are accepted, and the cache after it."""
    cache = model.new_cache(3, CONTEXT)
    logits_of(model, TEXT[:20], [20], cache, slot=1)
    tokens = [*TEXT[20 : 20 + num_kept], *WRONG[:count]][:count]
    model.forward(cache, tokens, [Segment(1, 20, count)], range(count))
    cache.truncate(1, 20 + num_kept)
    following = TEXT[20 + num_kept :][:3]
    segments = [Segment(0, 0, 2), Segment(1, 20 + num_kept, 3)]
    logits = model.forward(cache, [*WRONG[:2], *following], segments, [2, 3, 4])
    cache.truncate(1, 23 + num_kept)
    return logits.float(), cache


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_every_accepted_length_leaves_the_bits_of_one_token_steps(family, dtype):
    model = packed(family, dtype)
    single, alone = model.new_cache(3, CONTEXT), []
    states = {}
    for position in range(33):
        segment = Segment(1, position, 1)
        alone.append(model.forward(single, TEXT[position : position + 1], [segment], [0]))
        single.truncate(1, position + 1)
        states[position + 1] = states_of(single, position + 1)
    alone = torch.cat(alone).float()
    for num_kept in range(10):
        logits, cache = drafted(model, num_kept)
        assert torch.equal(logits, alone[20 + num_kept : 23 + num_kept])
        for own, expected in zip(
            states_of(cache, 23 + num_kept), states[23 + num_kept], strict=True
        ):
            assert torch.equal(own, expected)


def states_of(cache, length):
    """States and the convolution inputs that the next token reads."""
    recurrent = cache.recurrent
    states = [state_at(recurrent, index, 1, length) for index in range(len(recurrent.states))]
    inputs = []
    for ring, shape in zip(recurrent.inputs, recurrent.shapes.convolutions, strict=True):
        positions = torch.arange(length - shape.width + 1, length)
        inputs.append(ring[1, positions % ring.shape[1]].clone())
    return states + inputs


@torch.inference_mode()
def test_a_state_at_another_position_is_refused():
    model = packed("GraniteMoeHybrid")
    cache = model.new_cache(2, CONTEXT)
    logits_of(model, TEXT[:100], [100], cache, slot=0)
    for start in (20, 100 + MAX_ROWS + 1):
        with pytest.raises(ValueError, match="the state of cache slot 0 is at"):
            model.native(cache, [1], [Segment(0, start, 1)], [0])


@torch.inference_mode()
@pytest.mark.parametrize("family", KINDS)
def test_hidden_states_are_those_of_transformers(family):
    own = build(family)
    expected = copy.deepcopy(own)(torch.tensor([TEXT[:9]]), output_hidden_states=True)
    model = PretrainedModel(own, "target", CONTEXT)
    tap = StateTap((0, 2, 3))
    model.forward(model.new_cache(1, CONTEXT), TEXT[:9], [Segment(0, 0, 9)], None, tap)
    embedded, second, last = tap.rows.split(SIZES["hidden_size"], dim=1)
    for got, index in [(embedded, 0), (second, 2)]:
        assert_close(got, expected.hidden_states[index][0])
    # That of transformers is normalised.
    normed = model.final_norm()(last) if family != "Lfm2" else own.model.embedding_norm(last)
    assert_close(normed, expected.hidden_states[3][0])


@torch.inference_mode()
def test_large_models_are_compressed(monkeypatch):
    monkeypatch.setattr(suitability, "is_large", lambda model: True)
    own = build("Qwen3_5Text, tiles").to(torch.bfloat16)
    for parameter in own.parameters():  # few exponents, as trained weights have
        parameter.data = parameter.data.clamp(-0.5, 0.5)
        parameter.data += 2e-3 * parameter.data.sign()
    expected = copy.deepcopy(own).float()(torch.tensor([TEXT[:30]])).logits[0]
    model = PretrainedModel(own, "target", CONTEXT)
    if native_library().multiplies_pairs:
        assert model.native.bits == COMPRESSED_BITS
    assert relative_errors(logits_of(model, TEXT[:30]), expected).median().item() < 0.1


@torch.inference_mode()
@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "granitehybrid",
        "granitehybrid, no rotation",
        "qwen35",
        "qwen35, equal heads",
        "qwen35moe",
        "qwen3next",
        "qwen3next, projections in one",
    ],
)
def test_blocks_of_a_file(name, tmp_path, monkeypatch):
    for module in (loading, suitability):
        monkeypatch.setattr(module, "is_large", lambda model: True)
    file = make(CASES[name], tmp_path / "case.gguf", Type.Q8_0)
    expected = logits_of(load_model(str(file), "target", torch.float32, CPU).model, TEXT[:30])
    model = load_model(str(file), "target", torch.bfloat16, CPU).model
    assert model.native is not None
    assert model.native.bits == PACKED
    assert not has_packed_modules(model.module)
    whole = logits_of(model, TEXT[:30])
    assert relative_errors(whole, expected).median().item() < 0.1
    assert torch.equal(logits_of(model, TEXT[:30], [1] * 12 + [18]), whole)
    cache = model.new_cache(3, CONTEXT)
    segments = [Segment(2, 0, 11), Segment(0, 0, 30), Segment(1, 0, 3)]
    tokens = [*WRONG[:11], *TEXT[:30], *WRONG[:3]]
    assert torch.equal(model.forward(cache, tokens, segments, range(11, 41)).float(), whole)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"linear_key_head_dim": 520}, "states have 520 keys"),
        ({"layer_types": ["linear_attention"] * 3}, "none of its layers has attention"),
    ],
)
def test_other_layers_run_in_modules(settings, reason):
    config = transformers.Qwen3_5TextConfig(**{**SIZES, **DELTA_NET, **settings})
    own = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = PretrainedModel(own, "target", CONTEXT)
    assert model.native is None
    assert reason in model.slow_path.reason
