"""Code that comes with a model runs only if the user allows it."""

import json

import pytest
import torch
import transformers

from draftwise.models.blocked_linear import can_block

from ..tiny_models import edit_config
from .loading_tools import CPU, load, refused
from .quantized_folders import LOADED


class TestCodeOfTheModel:
    @pytest.fixture
    def evil(self, llama):
        """A model in which every possible file contains code. The code would leave a trace."""
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

    def test_a_custom_architecture_is_refused(self, evil):
        edit_config(evil, model_type="evil", architectures=["EvilForCausalLM"])
        error = refused(evil)
        assert not (evil / "trace").exists()
        assert error.field == "target"
        assert "trust_remote_code" in error.message

    def test_code_for_a_known_architecture_does_not_run(self, evil):
        """It is loaded with the code of ``transformers`` instead."""
        assert load(evil).max_model_len == 64
        assert not (evil / "trace").exists()

    def test_a_custom_tokenizer_is_refused(self, evil):
        edit_config(evil, auto_map=None)
        file = evil / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"tokenizer_class": "EvilTokenizer"}
        file.write_text(json.dumps(settings))
        assert "trust_remote_code" in refused(evil).message
        assert not (evil / "trace").exists()


class TestTrustedCode:
    """Custom code of models that the user trusts."""

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

    def test_trusted_code_runs(self, llama):
        self.write(llama, "    pass\n")
        assert load(llama, trust_remote_code=True).model.vocab_size == 32

    def test_trusted_code_of_a_model_with_quantised_weights(self, tmp_path):
        quantised = next(each for each in LOADED if each.name == "gptq")
        folder = self.write(quantised.write(tmp_path)[0], "    own = True\n")
        loaded = load(folder, trust_remote_code=True)
        assert loaded.model._model.own

    def test_code_that_ignores_logits_to_keep(self, llama):
        """It would return the first logits in place of the last."""
        self.write(
            llama,
            "    def forward(self, logits_to_keep=0, **kwargs):\n"
            "        return super().forward(**kwargs)\n",
        )
        error = refused(llama, trust_remote_code=True)
        assert "other logits" in error.message

    def test_code_that_reads_the_weights_of_its_layers(self, llama):
        """It may read their shape and dtype, but packed weights have no values."""
        forward = (
            "    def forward(self, *args, **kwargs):\n"
            "        assert {}\n"
            "        return super().forward(*args, **kwargs)\n"
        )
        asks = "self.lm_head.weight.shape == (32, 16) and self.lm_head.weight.dtype.itemsize == 4"
        self.write(llama, forward.format(asks))
        assert load(llama, trust_remote_code=True).model.vocab_size == 32
        self.write(llama, forward.format("bool(self.lm_head.weight.any())"))
        if can_block(torch.float32, CPU):
            assert "packed" in refused(llama, trust_remote_code=True).message

    def test_code_that_fails(self, llama):
        self.write(llama, "    def forward(self, *args, **kwargs):\n        raise KeyError(5)\n")
        error = refused(llama, trust_remote_code=True)
        assert error.message == (
            "llama fails in its own forward pass: the model's own code raises KeyError (5)"
        )

    def test_code_that_mixes_tokens_outside_attention(self, llama):
        self.write(
            llama,
            "    def forward(self, input_ids, **kwargs):\n"
            "        output = super().forward(input_ids, **kwargs)\n"
            "        output.logits = output.logits + input_ids.float().mean()\n"
            "        return output\n",
        )
        error = refused(llama, trust_remote_code=True)
        assert "not plain causal attention" in error.message
