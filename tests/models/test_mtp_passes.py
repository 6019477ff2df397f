"""Passes of MTP layers with native kernels, compared with transformers' modules."""

import pytest
import torch
from transformers.modeling_layers import MtpModel

from draftwise.checkpoints.quantization import expand_weights, quantize_linear_layers
from draftwise.kernels.native.head import NativeHead
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.narrow import COMPRESSED_BITS
from draftwise.kernels.native.packed import PACKED
from draftwise.models.heads import model as head_model
from draftwise.models.heads import mtp
from draftwise.models.loading import LoadedModel
from draftwise.models.pretrained import PretrainedModel
from draftwise.models.structure import relative_errors

from .passes import assert_same_with_any_threads, random_model, treat_as_large
from .test_head_passes import DTYPES, TOLERANCE, assert_same_without_logits, chained
from .test_native_hybrids import CONTEXT
from .test_native_hybrids import FAMILIES as HYBRIDS

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

# transformers takes the norms of the last layer, which has attention.
LAYERS = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
FAMILIES = {
    "Qwen3_5Text": {**HYBRIDS["Qwen3_5Text"], **LAYERS},
    "Qwen3_5Text, tiles": {**HYBRIDS["Qwen3_5Text, tiles"], **LAYERS},
    "Qwen3_5MoeText": {**HYBRIDS["Qwen3_5MoeText"], **LAYERS},
    "Qwen3Next": {**HYBRIDS["Qwen3Next"], **LAYERS},
    "Qwen3": {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96},
    "Glm4Moe": {
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    # Factors of the residual stream and of the logits.
    "Granite": {"residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 2.0},
}


def build(family, dtype, quantization=None):
    """A random target, and a random layer as transformers computes it."""
    main = random_model(family, max_position_embeddings=CONTEXT, **FAMILIES[family])
    mtp._complete(main.config)
    layer = MtpModel(main, 1).eval()
    numbers = torch.Generator().manual_seed(4)
    for parameter in layer.layers.parameters():
        noise = torch.randn(parameter.shape, generator=numbers)
        size = parameter.shape[-1]
        is_norm = parameter.dim() == 1
        parameter.data = parameter.data + 0.2 * noise if is_norm else 1.5 * noise / size**0.5
    main.to(dtype)
    if quantization is not None:
        quantize_linear_layers(main, quantization)
        expand_weights(main)
    return main, layer


def load(family, dtype=torch.float32, native=True, quantization=None, **settings):
    main, layer = build(family, dtype, quantization)
    for name, value in settings.items():
        setattr(layer.config, name, value)
    model = PretrainedModel(main, "target", CONTEXT)
    assert model.native is not None
    target = LoadedModel("target", model, None, CONTEXT, frozenset(), 0, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "read_mtp", lambda *_: layer)
        if not native:
            patch.setattr(head_model, "native_head", lambda *_: None)
        head = mtp.load_mtp(target, "target").model
    assert isinstance(head.native, NativeHead) is (native and not settings)
    return head, model


def errors_of_kernels(*arguments, **keywords):
    """Root mean square of each row, relative to the logits of the modules."""
    results = [chained(load(*arguments, native=native, **keywords)[0]) for native in (True, False)]
    return relative_errors(*results)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_and_modules_agree(family, dtype):
    errors = errors_of_kernels(family, dtype)
    # Rounded to bfloat16, a token may choose another expert of almost the same score.
    error = errors.max() if dtype == torch.float32 else errors.median()
    assert error < TOLERANCE[dtype]


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_layer_uses_the_projection_of_a_quantised_target(quantization, monkeypatch):
    """Its own weights have another format."""
    treat_as_large(monkeypatch)
    head, target = load("Qwen3", torch.bfloat16, quantization=quantization)
    assert target.native.has_quantized_weights
    assert quantization == "int8" or target.native.bits == PACKED
    assert not head.native.has_quantized_weights
    errors = errors_of_kernels("Qwen3", torch.bfloat16, quantization=quantization)
    assert errors.max() < TOLERANCE[torch.bfloat16]


@torch.inference_mode()
@pytest.mark.skipif(
    native_library() is None or not native_library().multiplies_pairs,
    reason="needs instructions for bfloat16",
)
def test_compressed_weights_give_the_same_results(monkeypatch):
    """As layers that are larger than the processor's caches have them."""
    results = [chained(load("Qwen3_5Text, tiles", torch.bfloat16)[0])]
    treat_as_large(monkeypatch)
    head, _ = load("Qwen3_5Text, tiles", torch.bfloat16)
    assert head.native.bits == COMPRESSED_BITS
    results.append(chained(head))
    assert torch.equal(*results)


@torch.inference_mode()
def test_results_do_not_depend_on_the_number_of_threads():
    head, _ = load("Qwen3_5Text")
    assert_same_with_any_threads(lambda: chained(head))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Qwen3_5Text", "Qwen3"])
def test_keys_and_values_without_logits_are_the_same(family):
    """With a gate beside each query, and without."""
    assert_same_without_logits(load(family)[0])


def test_another_order_of_inputs_is_left_to_the_modules():
    head, _ = load("Qwen3_5Text", mtp_hidden_states_first=True)
    assert head.slow_path.reason == "it reads the state before the token"
