"""Models in GGUF files give llama.cpp's log-probabilities, whatever their metadata says.

llama.cpp's values are recorded for a tiny file per metadata key (``gguf_files``). Files that are
not computed in the same way are refused, and the key, the tensor or the architecture is named.
"""

import re
from pathlib import Path

import gguf
import pytest
import torch
from transformers.models.olmo3 import modeling_olmo3

from draftwise.checkpoints.gguf import GgufFile, configuration, read_configuration
from draftwise.checkpoints.gguf.architectures import ARCHITECTURES
from draftwise.errors import UnsupportedModelError
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..levels import exhaustive_unless
from ..refusals import error_of
from .gguf_files import CASES, Case, make, recorded, tokens
from .gguf_files.case import LONGROPE, YARN

CPU = torch.device("cpu")
RECORDED = recorded()["cases"]

# What the error names. All other cases give llama.cpp's values.
REFUSED = {
    # llama.cpp refuses these too.
    "llama, dimension_count below key_length": "'llama.rope.dimension_count' = 16",
    "llama, unknown scaling type": "'llama.rope.scaling.type' = 'dynamic'",
    "llama, value_length above key_length": "'llama.attention.value_length' = 48",
    "llama, nextn_predict_layers": "'llama.nextn_predict_layers' = 1",
    "llama, output bias": "'output.bias'",
    "llama, q/k norm": "'blk.0.attn_q_norm.weight'",
    "qwen2, rope_freqs": "'rope_freqs.weight'",
    "qwen2, partial": "'qwen2.rope.dimension_count' = 16",
    "qwen2, key_length": "'qwen2.attention.key_length' = 48",
    "qwen3, partial": "'qwen3.rope.dimension_count' = 16",
    "qwen2moe, tied": "'output.weight'",
    "gemma4, pattern absent": "'gemma4.attention.sliding_window_pattern'",
    "gemma4, window absent": "'gemma4.attention.sliding_window'",
    "gemma4, dimension_count_swa absent": "'gemma4.rope.dimension_count_swa'",
    "gemma4, no rope_freqs": "'rope_freqs.weight'",
    "granite, logit_scale absent": "'granite.logit_scale'",
    "olmo2, tied": "'output.weight'",
    "gpt-oss, window absent": "'gpt-oss.attention.sliding_window'",
    "gpt-oss, no sinks": "'blk.0.attn_sinks.weight'",
    "gpt-oss, tied": "'output.weight'",
    "glm4moe, no bias of choice": "'blk.1.exp_probs_b.bias'",
    # No configuration of transformers says these.
    "llama, causal false": "'llama.attention.causal' = False",
    "llama, experts, groups": "'llama.expert_group_count' = 2",
    "qwen2, output bias": "'output.bias'",
    "qwen3moe, expert groups": "'qwen3moe.expert_group_count' = 2",
    "gemma2, window, freq_base_swa": "'gemma2.rope.freq_base_swa' = 100.0",
    "gemma3, partial": "'gemma3.rope.dimension_count' = 16",
    "gemma4, widths and kv heads per layer": "'gemma4.attention.head_count_kv' = [2, 1, 2, 1]",
    "phi3, qkv bias": "'blk.0.attn_qkv.bias'",
    "lfm2moe, softmax": "'lfm2moe.expert_gating_func' = 1",
    "minimax-m2, softmax": "'minimax-m2.expert_gating_func' = 1",
    "glm4moe, softmax": "'glm4moe.expert_gating_func' = 1",
    "glm4moe, groups": "'glm4moe.expert_group_count' = 2",
    "deepseek2, groups": "'deepseek2.expert_group_count' = 2",
    "deepseek2, linear": "'deepseek2.rope.scaling.type' = 'linear'",
    "nemotron_h, qkv bias": "'blk.2.attn_q.bias'",
    "deepseek2, softmax, bias of choice": "'blk.1.exp_probs_b.bias'",
    "deepseek2, softmax, normalised": "'deepseek2.expert_weights_norm' = True",
    "gpt-oss, freq_base_swa": "'gpt-oss.rope.freq_base_swa' = 100.0",
    # The engine does not compute these architectures.
    "falcon": "architecture 'falcon'",
    "bloom": "architecture 'bloom'",
}
EQUAL = [name for name in CASES if name not in REFUSED]
# Computed in every run: each way to make a parameter and each kind of setting.
REPRESENTATIVE = {
    "llama, rope_freqs, linear",
    "llama, yarn, attn_factor",
    "llama, longrope, factor",
    "llama, fused qkv, separate bias",
    "llama, attn_output bias",
    "llama, tensor scales",
    "llama, experts, one used",
    "qwen2, tied",
    "qwen2moe, expert widths absent",
    "qwen3, yarn",
    "gemma2, caps",
    "gemma3, window, linear",
    "gemma4, experts",
    "gemma4, shared layers",
    "phi3, partial, long, attn_factor",
    "mistral3, all",
    "granite, all scales",
    "granite, finetuned false",
    "smollm3, yarn",
    "olmo2, window, yarn, attn_factor",
    "gpt-oss, yarn",
    "glm4, qkv bias",
    "hunyuan-dense, alpha",
    "stablelm, parallel",
    "nemotron",
    "gpt2",
    "qwen35, mtp",
    "qwen3next",
    "qwen3next, projections in one",
    "olmoe",
    "lfm2moe",
    "minimax-m2",
    "glm4moe, mtp",
    "deepseek2, yarn, multiplier",
    "deepseek2, sizes of old files",
    "nemotron_h_moe, latent",
    "ernie4_5-moe",
    "granitemoe, shared",
    "granitehybrid, experts",
}
# Both sides round to float32. transformers differs from llama.cpp by up to 2e-4 in a number, and by
# up to 2e-3 with 46 or 62 layers. What a key changes is more than 0.5.
TOLERANCE = 1e-3
DEEP_TOLERANCE = 5e-3
DEEP = {"gemma2, 46 layers", "gemma3, 62 layers", "exaone4, 64 layers, window"}
# The sum has 599 numbers, whose differences mostly cancel.
SUM_TOLERANCE = 50


def load(case, folder, max_model_len=None):
    file = make(case, folder / "case.gguf")
    return load_model(str(file), "target", torch.float32, CPU, max_model_len)


@torch.inference_mode()
def log_probabilities(loaded):
    """The log-probability of each recorded token but the first, given those before."""
    ids = tokens()
    cache = loaded.model.new_cache(1, len(ids))
    segments = [Segment(0, 0, len(ids))]
    logits = loaded.model.forward(cache, ids, segments, range(len(ids)))
    every = logits.double().log_softmax(-1)[:-1]
    return every.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_unless(REPRESENTATIVE.__contains__, EQUAL))
def test_log_probabilities_are_those_of_llama_cpp(tmp_path, name):
    found = log_probabilities(load(CASES[name], tmp_path, CASES[name].context))
    tolerance = DEEP_TOLERANCE if name in DEEP else TOLERANCE
    expected = torch.tensor(RECORDED[name]["every_20th"], dtype=torch.double)
    torch.testing.assert_close(found[::20], expected, rtol=0, atol=tolerance)
    assert found.sum().item() == pytest.approx(RECORDED[name]["sum"], abs=SUM_TOLERANCE * tolerance)


@pytest.mark.slow
def test_other_files_are_refused_by_name(tmp_path):
    for name in REFUSED:
        raised = error_of(load, CASES[name], tmp_path, error=UnsupportedModelError)
        assert raised.field == "target"
        assert REFUSED[name] in raised.message


def test_files_that_llama_cpp_refuses_are_refused():
    assert {name for name in CASES if "refused" in RECORDED[name]} <= REFUSED.keys()


def test_what_is_unknown_or_wrong_is_named(tmp_path):
    for case, named in [
        (Case("llama", {"attention.invented": 1.0}), "'llama.attention.invented' = 1.0"),
        (Case("llama", tensors={"blk.*.attn_invented.weight": (32,)}), "attn_invented.weight'"),
        (Case("llama", {"context_length": "many"}), "'llama.context_length' = 'many'"),
        (Case("llama", {"context_length": None}), "no key 'llama.context_length'"),
        (Case("llama", {"attention.head_count": [4, 4, 2]}), "'llama.attention.head_count' = [4"),
        (Case("llama", tensors={"blk.1.ffn_down.weight": None}), "'blk.1.ffn_down.weight'"),
        (Case("llama", tensors={"blk.1.ffn_down.weight": (128, 96)}), "of shape [128, 96]"),
        (Case("llama", tensors={"token_embd.weight": None}), "'token_embd.weight'"),
        (Case("llama", tensors={"rope_freqs.weight": [1.0] * 8}), "'rope_freqs.weight'"),
        (Case("llama", tensors={"rope_factors_long.weight": [1.0] * 16}), "rope_factors_long"),
        (Case("llama", LONGROPE, {"rope_factors_long.weight": [1.0] * 16}), "rope_factors_short"),
        (Case("llama", LONGROPE, {"rope_freqs.weight": [1.0] * 16}), "'rope_freqs.weight'"),
        (Case("llama", YARN, {"rope_freqs.weight": [1.0] * 16}), "'yarn': YaRN is not supported"),
    ]:
        raised = error_of(load, case, tmp_path, error=UnsupportedModelError)
        assert named in raised.message
        assert "\n" not in raised.message


def test_keys_of_others_are_harmless(tmp_path):
    keys = {"general.sampling.temp": 0.5, "general.license.name": "free", "tokenizer.other": 1}
    file = make(Case("llama", keys), tmp_path / "case.gguf")
    assert read_configuration(GgufFile([file], "target")).num_hidden_layers == 3


def test_the_served_context_chooses_the_factors_of_longrope(tmp_path):
    case = CASES["phi3, long"]
    file = GgufFile([make(case, tmp_path / "case.gguf")], "target")
    for length, tensor in ((None, "long"), (513, "long"), (512, "short")):
        rope = read_configuration(file, length).rope_parameters
        expected = case.tensors[f"rope_factors_{tensor}.weight"]
        assert rope["long_factor"] == rope["short_factor"]
        assert rope["long_factor"] == pytest.approx(expected, rel=1e-6)


def test_the_native_kernels_serve_factors_that_do_not_depend_on_the_text(tmp_path):
    loaded = load(CASES["llama, rope_freqs"], tmp_path)
    assert loaded.model.slow_path is None


def test_versions_of_transformers_that_lack_something_are_named(tmp_path, monkeypatch):
    def of_one_kind(self, x, position_ids):
        raise AssertionError

    case = CASES["olmo2, window, linear"]
    monkeypatch.setattr(modeling_olmo3.Olmo3RotaryEmbedding, "forward", of_one_kind)
    with pytest.raises(UnsupportedModelError, match="this version of transformers does not comp"):
        load(case, tmp_path)
    monkeypatch.setattr(configuration, "CONFIG_MAPPING", {})
    with pytest.raises(UnsupportedModelError, match="needs 'olmo3', which this version"):
        load(case, tmp_path)


def test_big_endian_files_are_refused(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "big.gguf"), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        GgufFile([tmp_path / "big.gguf"], "target")


def test_the_documentation_lists_the_architectures():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    listed = page.partition("These architectures are read:")[2].partition("\n\n")[0]
    assert re.findall("`(.+?)`", listed) == sorted(ARCHITECTURES)
