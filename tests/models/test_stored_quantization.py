"""Checkpoints with quantised weights: the weights that they stand for, and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from draftwise import LLM, SamplingParams
from draftwise.checkpoints.fingerprint import checkpoint_fingerprint, model_fingerprint
from draftwise.checkpoints.stored.inputs import QuantizedInputs
from draftwise.checkpoints.stored.layouts import unpack
from draftwise.checkpoints.stored.loading import load_checkpoint
from draftwise.distillation.teacher import load_teacher
from draftwise.errors import ModelNotFoundError
from draftwise.models.segment import Segment

from ..tiny_models import edit_config
from .loading_tools import load, refused
from .quantized_folders import LOADED, REFUSED, Format, gptq, pack, save_tensors

BY_NAME = {each.name: each for each in LOADED}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def by_name(each: Format) -> str:
    return each.name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function that returns the folders of a format that is loaded, which are written once."""
    known = {}

    def written(name):
        if name not in known:
            known[name] = BY_NAME[name].write(tmp_path_factory.mktemp(name))
        return known[name]

    return written


@pytest.fixture
def gptq_folder(tmp_path):
    """A folder in GPTQ's format that a test may change."""
    return BY_NAME["gptq"].write(tmp_path)[0]


def reference(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def expanded(folder, dtype=torch.float32):
    config = AutoConfig.from_pretrained(folder)
    return load_checkpoint(AutoModelForCausalLM, str(folder), config, "target", "m", dtype)[0]


def quantize_inputs(model, each):
    """Round the inputs of a model's layers to 8 bits, as compressed-tensors describes it."""
    inputs = each.settings["config_groups"]["group_0"]["input_activations"]

    def rounded(module, args):
        values = args[0]
        largest = values.abs().amax(-1, keepdim=True)
        if inputs["type"] == "float":
            scale = largest / 448 if inputs["dynamic"] else each.extra[".input_scale"]
            return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        scale = largest / 127.5 if inputs["dynamic"] else each.extra[".input_scale"]
        return (values / scale).round().clamp(-128, 127) * scale

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("each", LOADED, ids=by_name)
def test_weights_equal_those_that_the_tensors_stand_for(each, folders):
    folder, dense = folders(each.name)
    expected, actual = reference(dense), expanded(folder)
    modules = [module for module in actual.modules() if isinstance(module, QuantizedInputs)]
    assert bool(modules) == each.inputs
    weights = [name.replace(".linear.", ".") for name, _ in actual.named_parameters()]
    for name, ours in zip(weights, actual.parameters(), strict=True):
        assert torch.equal(ours, expected.get_parameter(name)), name
    if each.inputs:
        quantize_inputs(expected, each)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(actual(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-blocks", "w8a8", "mxfp4"])
def test_the_fast_path(name, folders):
    """Expanded weights are computed as those of an unquantised model are."""
    each = BY_NAME[name]
    folder, dense = folders(name)
    ours, plain = load(folder), load(dense)
    assert ours.eos_token_ids == plain.eos_token_ids
    if each.inputs:
        assert "its layers quantise their inputs" in str(ours.model.slow_path)
        return
    assert ours.model.slow_path == plain.model.slow_path
    assert ours.fingerprint == plain.fingerprint
    logits = []
    for each_model in (ours.model, plain.model):
        cache = each_model.new_cache(1, len(PROMPT))
        rows = range(len(PROMPT))
        with torch.inference_mode():
            logits.append(each_model.forward(cache, PROMPT, [Segment(0, 0, len(PROMPT))], rows))
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-blocks", "w8a8"])
def test_texts_equal_those_of_transformers(name, folders):
    each = BY_NAME[name]
    folder, dense = folders(name)
    expected = reference(dense)
    if each.inputs:
        quantize_inputs(expected, each)
    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    ids = torch.tensor([PROMPT])
    texts = expected.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16)
    assert outputs[0].token_ids == texts[0, len(PROMPT) :].tolist()


def test_formats_that_are_refused(tmp_path):
    for each in REFUSED:
        error = refused(each.write(tmp_path / each.name)[0], role="draft")
        assert error.field == "draft", each
        assert each.refusal in error.message
        assert "load the unquantised checkpoint, or a GGUF file" in error.message, each


def test_integers_of_any_number_of_bits():
    for bits in range(1, 9):
        numbers = torch.randint(0, 2**bits, (3, 70))
        assert torch.equal(unpack(pack(numbers, bits), bits, 70).long(), numbers)


def test_zero_points_that_were_borrowed_from(tmp_path):
    """GPTQModel subtracts 1 from the zero points of a word at once, 0 included."""
    quantize = gptq(symmetric=False)

    def from_zero(weight):
        parts, dense = quantize(weight.abs())  # the lowest number of each group stands for 0
        return parts, dense

    folder, dense = Format("borrowed", BY_NAME["gptq"].settings, from_zero).write(tmp_path)
    layer = "model.layers.0.mlp.down_proj"
    assert (load_file(folder / "model.safetensors")[f"{layer}.qzeros"] == -0x11111111).all()
    expected, actual = (
        model.get_submodule(layer) for model in (reference(dense), expanded(folder))
    )
    assert torch.equal(actual.weight, expected.weight)


def test_weights_are_rounded_once(folders):
    dtype = torch.bfloat16
    folder, dense = folders("gptq")
    expected, actual = reference(dense, dtype), expanded(folder, dtype)
    for ours, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_the_head_and_the_embedding(tmp_path):
    which = ("_proj.weight", "lm_head.weight", "embed_tokens.weight")
    each = Format("all", BY_NAME["gptq"].settings, gptq(), which=which)
    folder, dense = each.write(tmp_path)
    assert load(folder).fingerprint == load(dense).fingerprint


def test_tensors_of_a_weight_in_several_files(gptq_folder):
    whole = load(gptq_folder).fingerprint
    tensors = load_file(gptq_folder / "model.safetensors")
    (gptq_folder / "model.safetensors").unlink()
    index = {name: f"part-{name.endswith('.scales'):d}.safetensors" for name in tensors}
    for file in set(index.values()):
        part = {name: each for name, each in tensors.items() if index[name] == file}
        save_file(part, gptq_folder / file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (gptq_folder / "model.safetensors.index.json").write_text(text)
    assert load(gptq_folder).fingerprint == whole
    (gptq_folder / "part-1.safetensors").unlink()
    error = refused(gptq_folder, ModelNotFoundError)
    assert "part-1.safetensors" in error.message


def test_end_tokens_of_the_generation_configuration(gptq_folder):
    (gptq_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert load(gptq_folder).eos_token_ids == {3, 5}


class TestDamaged:
    def change(self, folder, change):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_tensors(folder, tensors)

    def test_a_missing_tensor(self, gptq_folder):
        layer = "model.layers.1.mlp.up_proj"
        self.change(gptq_folder, lambda tensors: tensors.pop(f"{layer}.scales"))
        error = refused(gptq_folder)
        assert f"it has {layer}.qweight without {layer}.scales" in error.message

    def test_a_missing_weight(self, gptq_folder):
        layer = "model.layers.1.mlp.up_proj"

        def remove(tensors):
            for name in [name for name in tensors if name.startswith(layer)]:
                del tensors[name]

        self.change(gptq_folder, remove)
        assert f"1 are missing, such as {layer}.weight" in refused(gptq_folder).message

    def test_a_tensor_of_another_shape(self, gptq_folder):
        layer = "model.layers.1.mlp.up_proj"

        def shorten(tensors):
            tensors[f"{layer}.scales"] = tensors[f"{layer}.scales"][:, :8]

        self.change(gptq_folder, shorten)
        assert f"{layer}.qweight" in refused(gptq_folder).message

    def test_numbers_without_scales(self, gptq_folder):
        def add(tensors):
            tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)

        self.change(gptq_folder, add)
        message = refused(gptq_folder).message
        assert "model.norm.weight has the type F8_E4M3 and no scales that are known" in message

    def test_settings(self, gptq_folder):
        edit_config(
            gptq_folder, quantization_config={"quant_method": "fp8", "weight_block_size": 8}
        )
        assert "the quantization_config of" in refused(gptq_folder).message

    def test_a_format_with_other_tensors(self, gptq_folder):
        """Without the settings that name the format, nothing is guessed."""
        edit_config(gptq_folder, quantization_config=None)
        assert "_proj.weight" in refused(gptq_folder).message


def test_inputs_of_experts_are_refused(tmp_path):
    dynamic, packed = BY_NAME["w8a8"], BY_NAME["w8a16-experts"]
    settings = packed.settings | {"config_groups": dynamic.settings["config_groups"]}
    folder, _ = Format("experts", settings, packed.quantize, packed.recipe).write(tmp_path)
    message = refused(folder).message
    assert "the inputs of model.layers.0.mlp.experts.0.down_proj are" in message
    assert "linear layers only" in message


def test_inputs_without_their_scale_are_refused(tmp_path):
    each = replace(BY_NAME["w8a8-static"], extra={})
    message = refused(each.write(tmp_path)[0]).message
    assert (
        "the inputs of model.layers.0.mlp.down_proj are quantised without .input_scale" in message
    )


def test_training_reads_quantised_targets(folders):
    folder, dense = folders("gptq")
    teacher = load_teacher(
        str(folder), lambda count: [count], torch.float32, torch.device("cpu"), False, "target"
    )
    expected = dict(reference(dense).named_parameters())
    for name, ours in teacher._model.named_parameters():
        assert torch.equal(ours, expected[name])


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_the_fingerprint_of_the_files(name, folders):
    folder, dense = folders(name)
    assert checkpoint_fingerprint(folder) == model_fingerprint(reference(dense))


def test_layers_that_quantise_inputs_are_packed(folders):
    model = load(folders("w8a8")[0]).model._model
    layers = [module for module in model.modules() if isinstance(module, QuantizedInputs)]
    assert layers
    assert not any(isinstance(layer.linear, nn.Linear) for layer in layers)
