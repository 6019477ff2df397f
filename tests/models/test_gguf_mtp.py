"""The MTP layer of a GGUF file: its logits are transformers', and it changes no text."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from draftwise import LLM, SamplingParams
from draftwise.errors import UnsupportedModelError
from draftwise.kernels.native import suitability
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.packed import PACKED
from draftwise.models import loading
from draftwise.models.heads import mtp
from draftwise.models.packed_model import LazyEmbedding
from draftwise.models.segment import Segment
from draftwise.models.structure import relative_errors

from ..stand_ins import unguarded
from ..tiny_mtp import expected_logits
from .mtp_files import ARCHITECTURES, build, tensors_of, write
from .passes import logits_of

MTP = unguarded("mtp", policy="fixed", num_speculative_tokens=3)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TOKENS = [5, 3, 60, 6, 1, 0, 22, 7, 91, 4, 38, 38, 17]
PROMPTS = [[(17 * index + 5 * place) % 96 for place in range(1 + 4 * index)] for index in range(5)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request):
    """An architecture, a model of it and its layer."""
    return request.param, *build(request.param)


@pytest.fixture
def all_are_large(monkeypatch):
    for module in (loading, suitability):
        monkeypatch.setattr(module, "is_large", lambda model: True)
    monkeypatch.setattr(suitability, "_is_large_head", lambda layers: True)


def states_of(main):
    """The output of the last layer before the final norm, which transformers does not return."""
    states = []
    hook = main.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    with torch.inference_mode():
        main(torch.tensor([TOKENS]))
    hook.remove()
    return states[0]


def head_logits(llm, states):
    head, count = llm.draft.model, len(TOKENS) - 1
    with torch.inference_mode():
        cache = head.new_cache(1, 16)
        segments = [Segment(0, 0, count)]
        return head.read(cache, TOKENS[1:], segments, range(count), states[:-1]).logits


def assert_computes(path, main, layer):
    """A file gives the logits of a model and of its layer, as transformers computes them."""
    llm = LLM(str(path), MTP, dtype="float32")
    with torch.inference_mode():
        expected = main(torch.tensor([TOKENS])).logits[0]
    assert relative_errors(logits_of(llm.target.model, TOKENS), expected).max() < 1e-4
    expected = expected_logits(main, layer, TOKENS)
    assert relative_errors(head_logits(llm, states_of(main)), expected).max() < 1e-4


def test_logits_are_those_of_transformers(models, tmp_path):
    architecture, main, layer = models
    path = write(tmp_path / "a.gguf", architecture, main.config, tensors_of(main, layer))
    assert_computes(path, main, layer)


def test_copies_of_the_embedding_and_the_projection_are_not_needed(tmp_path):
    """Files of GLM have them in the block of the layer."""
    main, layer = build("glm4moe")
    tensors = tensors_of(main, layer)
    for own, name in (("token_embd", "embed_tokens"), ("output", "shared_head_head")):
        tensors[f"blk.3.nextn.{name}.weight"] = tensors[f"{own}.weight"]
    path = write(tmp_path / "a.gguf", "glm4moe", main.config, tensors)
    assert_computes(path, main, layer)


def test_heads_may_be_rotated_as_a_whole(tmp_path):
    """The configurations of these families rotate a quarter if they are not told otherwise."""
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    main, layer = build("qwen35", rope_parameters=rotary)
    keys = {"rope.dimension_count": 32, "rope.dimension_sections": [6, 5, 5, 0]}
    path = write(tmp_path / "a.gguf", "qwen35", main.config, tensors_of(main, layer), **keys)
    assert_computes(path, main, layer)


@pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")
@pytest.mark.parametrize("by", ["kernels", "modules"])
def test_blocks_are_kept(models, tmp_path, all_are_large, monkeypatch, by):
    if by == "modules":
        monkeypatch.setattr(mtp, "_why_modules", lambda model, layer: "a reason")
    architecture, main, layer = models
    tensors = tensors_of(main, layer)
    path = str(write(tmp_path / "a.gguf", architecture, main.config, tensors, Type.Q8_0))
    exact, llm = LLM(path, MTP, dtype="float32"), LLM(path, MTP, dtype="bfloat16")
    target = llm.target.model
    assert target.native.bits == PACKED
    assert torch.equal(logits_of(target, TOKENS, [4, 1, 1, 5, 2]), logits_of(target, TOKENS))
    if by == "kernels":
        assert llm.draft.model.native.bits == PACKED
        assert llm.draft.model.slow_path is None
    else:
        layer = llm.draft.model._head_forward._spec.layer
        assert all(each.is_meta for each in layer.parameters() if each.ndim > 1 and len(each) > 4)
    assert llm.draft.num_parameters == exact.draft.num_parameters
    states = states_of(main)
    expected = head_logits(exact, states)
    assert relative_errors(head_logits(llm, states.bfloat16()), expected).median() < 0.1
    plain = LLM(path, dtype="bfloat16", max_batch_size=3)
    texts = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
    for draft in ("mtp", ["suffix", "mtp"]):
        speculation = unguarded(draft, policy="fixed", num_speculative_tokens=3)
        outputs = plain.with_speculation(speculation).generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == texts
        assert any(output.speculation.num_drafted for output in outputs)
    # Its rows were read from the blocks.
    assert isinstance(target.embedding_as_stored, LazyEmbedding)


@pytest.fixture(scope="module")
def dense():
    main, layer = build("qwen35")
    return main.config, tensors_of(main, layer)


def refused(path):
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(str(path), MTP, dtype="float32")
    return caught.value


def test_only_the_layer_is_refused(dense, tmp_path):
    """The model is served without it."""
    config, tensors = dense
    trunk = {name: each for name, each in tensors.items() if not name.startswith("blk.3.")}
    embedding = {"blk.3.nextn.embed_tokens.weight": tensors["token_embd.weight"]}
    no_norm = {name: each for name, each in tensors.items() if name != "blk.3.nextn.hnorm.weight"}
    second = {name.replace("blk.3.", "blk.4."): each for name, each in tensors.items()}
    for own, keys, clause in [
        (trunk, {}, "has none"),
        (trunk, {"nextn_predict_layers": None, "block_count": 3}, "has none"),
        ({**tensors, **embedding}, {}, "'blk.3.nextn.embed_tokens.weight'"),
        (no_norm, {}, "'blk.3.nextn.hnorm.weight'"),
        ({**tensors, **second}, {"nextn_predict_layers": 2, "block_count": 5}, "has 2 MTP layers"),
    ]:
        keys = {"attention.recurrent_layers": None, "full_attention_interval": 3, **keys}
        path = write(tmp_path / "a.gguf", "qwen35", config, own, **keys)
        error = refused(path)
        assert error.field == "draft"
        assert clause in error.message
        assert len(LLM(str(path), dtype="float32").generate([[1, 2]], GREEDY)[0].token_ids) == 24


def test_the_final_norm_stands_for_a_missing_one(dense, tmp_path):
    config, tensors = dense
    shared = "blk.3.nextn.shared_head_norm.weight"
    logits = []
    for own in (
        {**tensors, shared: tensors["output_norm.weight"]},
        {name: each for name, each in tensors.items() if name != shared},
    ):
        path = write(tmp_path / "a.gguf", "qwen35", config, own)
        states = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(1))
        logits.append(head_logits(LLM(str(path), MTP, dtype="float32"), states))
    assert torch.equal(*logits)


def test_a_file_of_the_layer_alone(dense, tmp_path):
    config, tensors = dense
    own = {
        name: each for name, each in tensors.items() if not name.startswith("blk.") or ".3." in name
    }
    error = refused(write(tmp_path / "mtp-a.gguf", "qwen35", config, own))
    assert error.field == "target"
    assert "contains an MTP layer without its model" in error.message
