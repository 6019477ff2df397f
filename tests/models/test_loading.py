"""What can be loaded, and how everything else is refused: by name, before a token is made."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.errors import (
    DraftwiseError,
    InvalidParameterError,
    ModelNotFoundError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from draftwise.models.loading import load_model, resolve_device, resolve_dtype
from draftwise.models.packing import can_pack

from ..tiny_models import FAMILIES, Recipe, byte_tokenizer, edit_config, save

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def load(folder, role="target", max_model_len=None, **options):
    return load_model(str(folder), role, torch.float32, CPU, max_model_len, **options)


def refused(folder, error=UnsupportedModelError, role="target", **options):
    with pytest.raises(error) as caught:
        load(folder, role, **options)
    return caught.value


@pytest.fixture
def llama(models, tmp_path):
    """A folder of its own that a test may change."""
    return Path(shutil.copytree(models.folder(Recipe(vocab=32, tokenizer=True)), tmp_path / "m"))


def tiny(tmp_path, class_name, **settings):
    """The folder of a model of any architecture, with transformers' own random weights."""
    config = getattr(transformers, f"{class_name}Config")(**{**SMALL, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return save(model, tmp_path / class_name)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_of_a_loaded_model(models, family):
    recipe = Recipe(family, vocab=32)
    loaded = load(models.folder(recipe))
    assert loaded.name == models.folder(recipe)
    assert loaded.max_model_len == recipe.context
    assert loaded.model.vocab_size == 32
    assert loaded.model.dtype == torch.float32
    assert loaded.num_parameters == sum(p.numel() for p in models.reference(recipe).parameters())
    assert loaded.tokenizer is None
    assert loaded.eos_token_ids == frozenset()
    assert len(loaded.model.layers) == 2


def test_a_tokenizer_is_loaded_where_there_is_one(llama):
    assert load(llama).tokenizer.get_vocab() == byte_tokenizer().get_vocab()


@pytest.mark.parametrize("eos", [3, [3, 5]])
def test_tokens_that_end_a_text(llama, eos):
    edit_config(llama, eos_token_id=7)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load(llama).eos_token_ids == {3, 5} & set([eos] if isinstance(eos, int) else eos)
    (llama / "generation_config.json").unlink()
    assert load(llama).eos_token_ids == {7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted(models, dtype):
    loaded = load_model(models.folder(Recipe()), "target", dtype, CPU)
    assert loaded.model.dtype == dtype


class TestNotFound:
    @pytest.mark.parametrize("name", ["/no/such/folder", "./nothing/here", "~/nobody", "a/b/c"])
    def test_no_such_folder(self, name):
        error = refused(name, ModelNotFoundError, role="draft")
        assert error.field == "draft"
        assert f"there is no folder {name!r}" in error.message

    def test_folder_without_config(self, tmp_path):
        error = refused(tmp_path, ModelNotFoundError)
        assert error.field == "target"
        assert "has no config.json" in error.message

    def test_only_pickled_weights(self, llama):
        """They could run code when they are read."""
        weights = models_weights(llama)
        torch.save(weights, llama / "pytorch_model.bin")
        (llama / "model.safetensors").unlink()
        error = refused(llama, ModelNotFoundError)
        assert error.field == "target"
        assert "safetensors" in error.message

    def test_no_weights_at_all(self, llama):
        (llama / "model.safetensors").unlink()
        assert "safetensors" in refused(llama, ModelNotFoundError).message

    def test_a_hub_id_that_cannot_be_reached(self, monkeypatch):
        def offline(name, **_):
            raise OSError(f"We couldn't connect to load {name}")

        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
        error = refused("someone/something", ModelNotFoundError)
        assert "'someone/something'" in error.message
        assert "couldn't connect" in error.message

    def test_a_bundled_model_that_does_not_exist(self):
        error = refused("zoo:giant", DraftwiseError, role="draft")
        assert isinstance(error, ModelNotFoundError)
        assert "giant" in error.message


def models_weights(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.state_dict()


class TestDamaged:
    @pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "{}", '{"model_type": "nope"}'])
    def test_config(self, llama, content):
        (llama / "config.json").write_text(content)
        assert refused(llama, DraftwiseError).field == "target"

    def test_weights(self, llama):
        (llama / "model.safetensors").write_bytes(b"not safetensors")
        assert refused(llama, DraftwiseError).field == "target"

    @pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
    def test_tokenizer(self, llama, content):
        (llama / "tokenizer.json").write_text(content)
        assert refused(llama, DraftwiseError).field == "target"

    def test_weights_of_another_shape(self, llama):
        edit_config(llama, intermediate_size=40)
        assert refused(llama, DraftwiseError).field == "target"

    def test_missing_weights(self, llama):
        """A model that would partly consist of random numbers."""
        edit_config(llama, num_hidden_layers=3)
        error = refused(llama)
        assert error.field == "target"
        assert "missing are 9, such as model.layers.2.input_layernorm.weight" in error.message

    def test_the_weights_of_no_language_model(self, tmp_path):
        """Without the layer that tells tokens."""
        transformers.LlamaModel(Recipe().build().config).save_pretrained(tmp_path)
        error = refused(tmp_path)
        assert "missing are 1, such as lm_head.weight" in error.message


class TestUnsupported:
    def test_encoder_and_decoder(self, tmp_path):
        config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
        config.save_pretrained(tmp_path)
        error = refused(tmp_path, role="draft", max_model_len=64)
        assert error.field == "draft"
        assert "encoder" in error.message

    def test_encoder_only(self, tmp_path):
        transformers.BertConfig(hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
        assert refused(tmp_path, DraftwiseError).field == "target"

    @pytest.mark.parametrize("class_name", ["Mamba", "Mamba2"])
    def test_state_space(self, tmp_path, class_name):
        config = getattr(transformers, f"{class_name}Config")(
            vocab_size=16,
            hidden_size=16,
            num_hidden_layers=1,
            state_size=4,
            num_heads=4,
            head_dim=8,
            n_groups=1,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        error = refused(save(model, tmp_path), max_model_len=64)
        assert error.field == "target"
        assert "attention" in error.message

    def test_no_context_length(self, tmp_path):
        config = transformers.MambaConfig(
            vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4
        )
        config.save_pretrained(tmp_path)
        error = refused(tmp_path)
        assert error.field == "max_model_len"
        assert "set one" in error.message

    def test_attention_and_state_space(self, tmp_path):
        folder = tiny(
            tmp_path,
            "Jamba",
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        )
        assert refused(folder, max_model_len=32).field == "target"

    @pytest.mark.parametrize(
        ("class_name", "settings", "reason"),
        [
            # Positions as biases of the scores.
            ("Bloom", {"n_layer": 2, "n_head": 2}, "bloom does not attend through exchangeable"),
            ("Falcon", {"alibi": True}, "does not attend through exchangeable"),
            # Attention that no function of ours can replace.
            ("GPTJ", {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4}, "exchangeable"),
            ("StableLm", {}, "does not take packed tokens"),
            # Scores beside those of the keys.
            ("GptOss", {"head_dim": 8, "sliding_window": 64}, "'s_aux'"),
            # Attention that is not softmax over the keys.
            ("DiffLlama", {}, "not plain causal attention"),
            # Attention to both sides.
            ("Bert", {}, "not plain causal attention"),
        ],
    )
    def test_other_attention(self, tmp_path, class_name, settings, reason):
        error = refused(tiny(tmp_path, class_name, **settings), max_model_len=64)
        assert error.field == "target"
        assert reason in error.message

    def test_capped_scores(self, tmp_path):
        folder = tiny(tmp_path, "Gemma2", head_dim=8, sliding_window=64)
        error = refused(folder)
        assert "softcap" in error.message

    def test_longer_than_the_model(self, models):
        error = refused(models.folder(Recipe()), max_model_len=65)
        assert error.field == "max_model_len"
        assert "65 exceeds the target's context of 64 tokens" in error.message


WINDOWS = {
    "Mistral": {"sliding_window": 20, "head_dim": 4},
    "Phi3": {"sliding_window": 20},
    "Qwen2": {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {
        "sliding_window": 20,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "head_dim": 8,
    },
}


class TestSlidingWindow:
    @pytest.mark.parametrize("class_name", WINDOWS)
    def test_shorter_than_the_context(self, tmp_path, class_name):
        folder = tiny(tmp_path, class_name, **WINDOWS[class_name])
        error = refused(folder, role="draft")
        assert error.field == "draft"
        assert "20 tokens" in error.message
        assert "set max_model_len to 20 or less" in error.message
        assert refused(folder, max_model_len=21).field == "target"
        assert load(folder, max_model_len=20).max_model_len == 20

    @pytest.mark.parametrize("class_name", WINDOWS)
    def test_texts_up_to_the_window(self, tmp_path, class_name):
        folder = tiny(tmp_path, class_name, **WINDOWS[class_name])
        llm = LLM(folder, dtype="float32", max_model_len=20)
        (output,) = llm.generate([1, 2, 3], SamplingParams(temperature=0))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([[1, 2, 3]])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=17, do_sample=False
        )
        assert [1, 2, 3, *output.token_ids] == expected[0].tolist()

    def test_of_a_draft(self, models, tmp_path):
        """The context of the target limits the draft's too."""
        draft = tiny(tmp_path, "Mistral", **WINDOWS["Mistral"])
        target = models.folder(Recipe(vocab=16))
        with pytest.raises(UnsupportedModelError) as caught:
            LLM(target, SpeculationConfig(draft), dtype="float32")
        assert caught.value.field == "draft"
        llm = LLM(target, SpeculationConfig(draft), dtype="float32", max_model_len=20)
        assert llm.draft.max_model_len == 20
        alone = LLM(target, dtype="float32", max_model_len=20)
        greedy = SamplingParams(temperature=0)
        assert llm.generate([1], greedy)[0].text == alone.generate([1], greedy)[0].text

    def test_switched_off(self, tmp_path):
        folder = tiny(tmp_path, "Qwen2", sliding_window=20, use_sliding_window=False)
        assert load(folder).max_model_len == 64


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 32,
}


class TestPositionScaling:
    def test_dynamic_within_the_original_context(self, tmp_path):
        rope = {**DYNAMIC, "original_max_position_embeddings": 32}
        folder = tiny(tmp_path, "Llama", rope_parameters=rope)
        error = refused(folder)
        assert "'dynamic'" in error.message
        assert "set max_model_len to 32 or less" in error.message
        assert load(folder, max_model_len=32).max_model_len == 32

    def test_long(self, tmp_path):
        folder = tiny(
            tmp_path,
            "Phi3",
            rope_parameters=LONG,
            original_max_position_embeddings=32,
            sliding_window=None,
        )
        error = refused(folder)
        assert "'longrope'" in error.message
        assert "set max_model_len to 32 or less" in error.message
        assert load(folder, max_model_len=32).max_model_len == 32

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            },
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_scaling_that_never_changes_is_served(self, tmp_path, rope):
        folder = tiny(tmp_path, "Llama", rope_parameters=rope)
        (output,) = LLM(folder, dtype="float32").generate(
            [1, 2, 3], SamplingParams(temperature=0, max_tokens=50)
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=50, do_sample=False)
        assert [1, 2, 3, *output.token_ids] == expected[0].tolist()


class TestCodeOfTheModel:
    """Code that comes with a model runs only if the user says so."""

    @pytest.fixture
    def evil(self, llama):
        """Every file that could bring code does, and would leave a trace."""
        trace = llama / "trace"
        code = f"open({str(trace)!r}, 'w').write('ran')\n"
        for module in ("configuration_evil", "modeling_evil", "tokenization_evil"):
            (llama / f"{module}.py").write_text(code)
        auto_map = {
            "AutoConfig": "configuration_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
        }
        edit_config(llama, auto_map=auto_map)
        file = llama / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["auto_map"] = {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]}
        file.write_text(json.dumps(settings))
        return llama

    def test_an_architecture_of_its_own(self, evil):
        edit_config(evil, model_type="evil", architectures=["EvilForCausalLM"])
        error = refused(evil)
        assert not (evil / "trace").exists()
        assert error.field == "target"
        assert "trust_remote_code" in error.message

    def test_a_known_architecture(self, evil):
        """Is served by the library's own code."""
        assert load(evil).max_model_len == 64
        assert not (evil / "trace").exists()

    def test_a_tokenizer_of_its_own(self, evil):
        edit_config(evil, auto_map=None)
        file = evil / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"tokenizer_class": "EvilTokenizer"}
        file.write_text(json.dumps(settings))
        assert "trust_remote_code" in refused(evil).message
        assert not (evil / "trace").exists()


class TestVocabularies:
    def build(self, models, target, draft):
        folders = models.folder(target), models.folder(draft)
        with pytest.raises(VocabularyMismatchError) as caught:
            LLM(folders[0], SpeculationConfig(folders[1]), dtype="float32")
        assert caught.value.field == "draft"
        for folder in folders:
            assert repr(folder) in caught.value.message
        return caught.value.message

    def test_other_widths_without_tokenizers(self, models):
        message = self.build(models, Recipe(vocab=8), Recipe(vocab=16))
        assert "8" in message
        assert "16 tokens" in message

    def test_other_widths_with_one_tokenizer(self, models):
        self.build(models, Recipe(vocab=32, tokenizer=True), Recipe(vocab=48))

    def test_other_tokens(self, models, llama):
        vocab = json.loads((llama / "tokenizer.json").read_text())
        tokens = vocab["model"]["vocab"]
        tokens["g"], tokens["h"] = tokens["h"], tokens["g"]
        (llama / "tokenizer.json").write_text(json.dumps(vocab))
        target = models.folder(Recipe(vocab=32, tokenizer=True))
        with pytest.raises(VocabularyMismatchError) as caught:
            LLM(target, SpeculationConfig(str(llama)), dtype="float32")
        assert "differs" in caught.value.message
        assert "4 entries" in caught.value.message
        assert repr(str(llama)) in caught.value.message
        assert repr(target) in caught.value.message


class TestPlaceAndType:
    def test_types(self):
        assert resolve_dtype("float16", CPU) is torch.float16
        assert resolve_dtype("auto", CPU) in (torch.bfloat16, torch.float32)
        assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16

    @pytest.mark.parametrize("dtype", ["int8", "", "float64", "BFLOAT16"])
    def test_unknown_types(self, dtype):
        with pytest.raises(InvalidParameterError) as caught:
            resolve_dtype(dtype, CPU)
        assert caught.value.field == "dtype"
        assert "bfloat16" in caught.value.message

    def test_devices(self):
        assert resolve_device("cpu") == CPU
        assert resolve_device("auto").type in ("cpu", "cuda")

    @pytest.mark.parametrize("device", ["gpu", "", "cuda:99", "meta:x"])
    def test_devices_that_are_not_there(self, device):
        with pytest.raises(InvalidParameterError) as caught:
            resolve_device(device)
        assert caught.value.field == "device"


class TestTrustedCode:
    """What a model's own code may and may not do."""

    HEAD = "from transformers import LlamaForCausalLM\n\nclass OwnForCausalLM(LlamaForCausalLM):\n"

    def write(self, llama, body):
        (llama / "modeling_own.py").write_text(self.HEAD + body)
        edit_config(llama, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
        return llama

    @pytest.fixture(autouse=True)
    def own_module_cache(self, monkeypatch, tmp_path):
        monkeypatch.setattr(
            transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
        )

    def test_runs_where_it_is_trusted(self, llama):
        self.write(llama, "    pass\n")
        assert load(llama, trust_remote_code=True).model.vocab_size == 32

    def test_that_ignores_which_logits_are_wanted(self, llama):
        """It would hand back the first ones for the last."""
        self.write(
            llama,
            "    def forward(self, logits_to_keep=0, **kwargs):\n"
            "        return super().forward(**kwargs)\n",
        )
        error = refused(llama, trust_remote_code=True)
        assert "other logits" in error.message

    def test_that_reads_the_weights_of_its_layers(self, llama):
        """It may ask for their shape and type, but once packed they hold no numbers."""
        forward = (
            "    def forward(self, *args, **kwargs):\n"
            "        assert {}\n"
            "        return super().forward(*args, **kwargs)\n"
        )
        asks = "self.lm_head.weight.shape == (32, 16) and self.lm_head.weight.dtype.itemsize == 4"
        self.write(llama, forward.format(asks))
        assert load(llama, trust_remote_code=True).model.vocab_size == 32
        self.write(llama, forward.format("bool(self.lm_head.weight.any())"))
        if can_pack(torch.float32, CPU):
            assert "packed" in refused(llama, trust_remote_code=True).message

    def test_that_fails(self, llama):
        self.write(llama, "    def forward(self, *args, **kwargs):\n        raise KeyError(5)\n")
        assert "llama fails by itself: 5" in refused(llama, trust_remote_code=True).message

    def test_that_attends_in_another_way(self, llama):
        self.write(
            llama,
            "    def forward(self, input_ids, **kwargs):\n"
            "        output = super().forward(input_ids, **kwargs)\n"
            "        output.logits = output.logits + input_ids.float().mean()\n"
            "        return output\n",
        )
        error = refused(llama, trust_remote_code=True)
        assert "not plain causal attention" in error.message
