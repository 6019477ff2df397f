"""Drafts of a target's MTP layer, compared with transformers' own, and refused without one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwise import LLM, SamplingParams
from draftwise.checkpoints import mtp, source
from draftwise.engine.drafting.native_head import NativeHeadBackend
from draftwise.errors import ModelNotFoundError, UnsupportedModelError
from draftwise.kernels.native.head import NativeHead
from draftwise.kernels.native.library import native_library
from draftwise.models.segment import Segment

from ..stand_ins import unguarded
from ..tiny_models import edit_config
from ..tiny_mtp import CASES, add_layer, expected_logits

INSTEAD = "use 'suffix', a draft model or an EAGLE-3 head"
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def refused(target, speculation=None):
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(str(target), speculation or {"draft": "mtp"}, dtype="float32")
    assert caught.value.field == "draft"
    return caught.value.message


def add_tensor(folder, name):
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(2)}, file, {"format": "pt"})


@pytest.fixture(params=CASES)
def with_layer(request, models, tmp_path):
    """A folder of a target with an MTP layer, and both as transformers computes them."""
    return add_layer(request.param, models, tmp_path / request.param)


def test_logits_are_those_of_transformers(with_layer):
    folder, main, layer = with_layer
    llm = LLM(folder, unguarded("mtp", policy="fixed"), dtype="float32")
    tokens = [5, 3, 6, 6, 1, 0, 2, 7, 1, 4]
    target, head = llm.target.model, llm.draft.model
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        # The layer before the final norm, whose output transformers returns.
        states = []
        hook = main.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        main(ids)
        hook.remove()
        cache = head.new_cache(1, 16)
        rows = range(len(tokens) - 1)
        segments = [Segment(0, 0, len(tokens) - 1)]
        output = head.read(cache, tokens[1:], segments, rows, states[0][0, :-1])
    if folder.name == "deepseek_v3":
        assert "a layer of its target" in head.slow_path.reason
    else:
        assert (head.native is None) == (native_library() is None)
    expected = expected_logits(main, layer, tokens)
    assert target.vocab_size == expected.shape[1]
    assert (output.logits - expected).abs().max() < 1e-4 * expected.std()


def test_drafts_do_not_change_texts(with_layer):
    folder, *_ = with_layer
    prompts = [[(7 * index + place) % 8 for place in range(1 + 5 * index)] for index in range(8)]
    plain = LLM(folder, dtype="float32", max_batch_size=4)
    expected = [output.token_ids for output in plain.generate(prompts, GREEDY)]
    for draft in ("mtp", "qwen3_next_mtp", ["suffix", "mtp"]):
        for policy in ("fixed", "svip", "adaptive"):
            speculation = unguarded(draft, policy=policy, num_speculative_tokens=3)
            llm = LLM(folder, speculation, dtype="float32", max_batch_size=4)
            for _ in range(2):  # the second time with stored prefixes
                outputs = llm.generate(prompts, GREEDY)
                assert [output.token_ids for output in outputs] == expected
            assert policy == "adaptive" or any(each.speculation.num_drafted for each in outputs)


def test_token_trees_do_not_change_texts(models, tmp_path):
    folder, *_ = add_layer("qwen3", models, tmp_path / "target")
    prompts = [[(7 * index + place) % 8 for place in range(1 + 5 * index)] for index in range(6)]
    expected = LLM(folder, dtype="float32", max_batch_size=4).generate(prompts, GREEDY)
    speculation = unguarded("mtp", policy="eagle2", num_speculative_tokens=3, tree_width=2)
    outputs = LLM(folder, speculation, dtype="float32", max_batch_size=4).generate(prompts, GREEDY)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
    assert sum(each.speculation.num_accepted for each in outputs) > 0


def test_drafts_after_partial_acceptance_are_those_of_a_computation_without_cache(with_layer):
    """The first drafted token of each step is the layer's choice, given the true states."""
    folder, main, layer = with_layer
    speculation = unguarded("mtp", policy="fixed", num_speculative_tokens=3)
    llm = LLM(folder, speculation, dtype="float32", max_batch_size=1)
    engine, drafted = llm.engine, []
    propose = engine.pipeline.propose

    def recorded(batch):
        draft = propose(batch)
        if batch.generating:
            drafted.append((list(batch.generating[0].tokens), draft.tokens[0].tolist()))
        return draft

    engine.pipeline.propose = recorded
    request = engine.add(None, [4, 0, 7, 1, 6], GREEDY)
    while engine.num_unfinished:
        engine.step()
    stats = request.output().speculation
    assert 0 < stats.num_accepted < stats.num_drafted
    compared = 0
    for tokens, draft in drafted:
        if len(tokens) > 5 and draft:
            assert draft[0] == int(expected_logits(main, layer, tokens)[-1].argmax())
            compared += 1
    assert compared > 5


@pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")
def test_the_kernels_catch_up_and_draft_in_one_call(models, tmp_path, monkeypatch):
    folder, *_ = add_layer("qwen3_5", models, tmp_path / "target")
    speculation = unguarded("mtp", policy="fixed", num_speculative_tokens=3)
    llm = LLM(folder, speculation, dtype="float32", max_batch_size=4)
    calls, begun, read = [], [], []
    draft, begin = NativeHead.draft, NativeHeadBackend.begin
    monkeypatch.setattr(NativeHead, "draft", lambda *each: (calls.append(0), draft(*each)))
    monkeypatch.setattr(NativeHeadBackend, "begin", lambda *each: (begun.append(0), begin(*each)))
    monkeypatch.setattr(NativeHead, "read", lambda *each: read.append(0))
    outputs = llm.generate([[4, 0, 7], [1, 6], [5], [2, 2, 3, 1, 0]], GREEDY)
    assert sum(each.speculation.num_accepted for each in outputs) > 0
    assert len(calls) == len(begun) > 5
    assert not read


def test_all_names_are_refused_without_a_layer(llama):
    for speculation in [
        {"draft": "mtp"},
        {"draft": ["suffix", "mtp"]},
        {"draft": "qwen3_next_mtp"},
        {"method": "deepseek_mtp"},
        unguarded("mtp"),
    ]:
        message = refused(llama, speculation)
        assert f"an MTP layer of the target: {str(llama)!r} has none" in message
        assert INSTEAD in message


def test_a_layer_that_cannot_be_read_is_refused(llama, tmp_path):
    for settings, tensor, clause in [
        ({}, "mtp.fc.weight", "has some"),
        ({"num_nextn_predict_layers": 1}, "model.layers.2.eh_proj.weight", "cannot be loaded"),
        ({"mtp_num_hidden_layers": 2}, "mtp.layers.0.mlp.up_proj.weight", "has 2 MTP layers"),
        ({"num_nextn_predict_layers": 0}, "other.weight", "has none"),
    ]:
        folder = Path(shutil.copytree(llama, tmp_path / tensor, dirs_exist_ok=True))
        edit_config(folder, **settings)
        add_tensor(folder, tensor)
        assert clause in refused(folder), settings


def test_a_damaged_configuration_counts_none(llama):
    (llama / "config.json").write_text("{")
    assert "has none" in refused(llama)


def test_files_of_the_hub_are_not_downloaded(monkeypatch, tmp_path):
    """Only the configuration is, which counts the layers."""
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 0}))
    monkeypatch.setattr(source, "find_on_hub", lambda name, role: name)
    monkeypatch.setattr(mtp, "hf_hub_download", lambda name, file: str(tmp_path / file))
    assert "'someone/target' has none" in refused("someone/target")


def test_a_target_that_does_not_exist_is_named():
    with pytest.raises(ModelNotFoundError) as caught:
        LLM("./no-such-target", {"draft": "mtp"})
    assert caught.value.field == "target"


def test_other_settings_on_a_loaded_target(llama):
    llm = LLM(str(llama), {"method": "ngram"}, dtype="float32")
    with pytest.raises(UnsupportedModelError, match="has none"):
        llm.with_speculation({"draft": "mtp"})


def test_a_folder_may_have_the_name(llama, monkeypatch):
    monkeypatch.chdir(llama.parent)
    Path(llama).rename("mtp")
    llm = LLM("./mtp", {"draft": "mtp", "policy": "fixed"}, dtype="float32")
    assert llm.draft is not None
