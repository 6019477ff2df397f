"""Models so small that everything about them can be computed: the mock of this project.

Weights are random, biases and norms included, and scaled so that the distributions are neither
flat nor one-hot. A model is known by its :class:`Recipe`; a :class:`ModelShelf` writes it to a
folder once and hands out the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

# What most families call their sizes.
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# With the head tied to the embedding, random models mostly repeat their last token.
_UNTIED = {"tie_word_embeddings": False}
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# Families with layers that have a recurrence.
RECURRENT = ("qwen3_5", "granitemoehybrid", "lfm2")
# Per family: its configuration class and what it needs beside or instead of the sizes above.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 4}),
    "gemma": ("GemmaConfig", {"head_dim": 8, "num_key_value_heads": 1, **_UNTIED}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4},
    ),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, **_UNTIED},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **_UNTIED,
        },
    ),
    # Full and sliding layers with heads of different sizes, without embeddings per layer.
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 0,
            **_UNTIED,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "olmo3": ("Olmo3Config", {"sliding_window": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "smollm3": ("SmolLM3Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", _UNTIED),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "opt": ("OPTConfig", {"ffn_dim": 24, "word_embed_proj_dim": 16, **_UNTIED}),
    "cohere": ("CohereConfig", _UNTIED),
    # Reshapes what attention gives it without a copy.
    "afmoe": ("AfmoeConfig", {"head_dim": 8, "num_experts": 9, "moe_intermediate_size": 8}),
    # Layers with a recurrence: the delta rule, Mamba-2, convolutions.
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            **_UNTIED,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "shared_intermediate_size": 24,
            "num_local_experts": 0,
            **_UNTIED,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 24, **_UNTIED},
    ),
    # Keys and values of different sizes.
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


@dataclass(frozen=True)
class Recipe:
    """What a tiny model is made of.

    Attributes:
        family: key of :data:`FAMILIES`.
        vocab: number of tokens.
        context: longest context.
        seed: of the weights.
        sharpness: standard deviation of the logits.
        noise: how much further random numbers, of ``noise_seed``, change every weight: a model
            that mostly agrees with the one without noise, as a draft does.
        noise_seed: of that noise.
        tokenizer: whether the folder has the tokenizer of :func:`byte_tokenizer`.
        pieces: tokens of the :func:`pieces_tokenizer` in the folder; empty for none.
        config: settings beside those of the family.
    """

    family: str = "llama"
    vocab: int = 8
    context: int = 64
    seed: int = 0
    sharpness: float = 2.0
    noise: float = 0.0
    noise_seed: int = 1
    tokenizer: bool = False
    pieces: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def draft(self, noise: float = 0.1, **changes: Any) -> Recipe:
        """A model that agrees with this one often, not always."""
        return replace(self, noise=noise, **changes)

    def build(self) -> nn.Module:
        """The model, in float32."""
        class_name, settings = FAMILIES[self.family]
        config = getattr(transformers, class_name)(
            **{
                **_SIZES,
                **_NO_SPECIAL_TOKENS,
                "vocab_size": self.vocab,
                "max_position_embeddings": self.context,
                **settings,
                **self.config,
            }
        )
        with torch.random.fork_rng(devices=()):
            # Some families draw numbers for what is no weight matrix.
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomise(model, self.seed, self.sharpness)
        if self.noise:
            add_noise(model, self.noise, self.noise_seed)
        return model


class ModelShelf:
    """Writes models to folders, each once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, str] = {}
        self._models: dict[str, nn.Module] = {}

    def folder(self, recipe: Recipe) -> str:
        """The folder of a model."""
        key = repr(recipe)
        if key not in self._folders:
            folder = self._root / str(len(self._folders))
            save(recipe.build(), folder, recipe.tokenizer, recipe.pieces)
            self._folders[key] = str(folder)
        return self._folders[key]

    def reference(self, recipe: Recipe) -> nn.Module:
        """The model as transformers runs it by itself, in float32."""
        key = repr(recipe)
        if key not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self.folder(recipe), dtype=torch.float32)
            self._models[key] = model.eval()
        return self._models[key]


def save(
    model: nn.Module, folder: Path, tokenizer: bool = False, pieces: tuple[str, ...] = ()
) -> str:
    """Write a model and perhaps a tokenizer to a folder.

    The tokenizer names an end token if the model's configuration does.

    Args:
        model: the model.
        folder: the folder.
        tokenizer: whether to write that of :func:`byte_tokenizer`.
        pieces: tokens of the :func:`pieces_tokenizer` to write; empty for none.
    """
    model.save_pretrained(folder)
    names_end = model.config.eos_token_id is not None
    if tokenizer:
        byte_tokenizer(names_end=names_end).save_pretrained(folder)
    if pieces:
        pieces_tokenizer(pieces, names_end).save_pretrained(folder)
    return str(folder)


def edit_config(folder: str | Path, **changes: Any) -> None:
    """Overwrite settings in a saved model's ``config.json``; ``None`` removes one."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


@torch.no_grad()
def randomise(
    model: nn.Module,
    seed: int,
    sharpness: float,
    logits: Callable[[Tensor], Tensor] | None = None,
    head: nn.Module | None = None,
) -> None:
    """Draw all weights at random, biases and norms included.

    Args:
        model: the model.
        seed: of the weights.
        sharpness: standard deviation of the logits.
        logits: the model's logits for ``[prompts, tokens]`` ids; by default those of its own
            forward pass.
        head: the projection to the vocabulary; by default the model's own. Without any, the logits
            are as they come.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(0.2 * noise)
        else:
            # Wide enough that attention and the layers above it matter.
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    head = model.get_output_embeddings() if head is None else head
    if head is None:
        return
    ids = torch.randint(0, head.weight.shape[0], (8, 16), generator=generator)
    for _ in range(4):  # a head tied to the embedding changes what it reads
        scores = model(input_ids=ids).logits if logits is None else logits(ids)
        head.weight.mul_(sharpness / scores.std())


@torch.no_grad()
def add_noise(model: nn.Module, amount: float, seed: int) -> None:
    """Change all weights at random, by ``amount`` times their mean size."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(amount * parameter.abs().mean() * noise)


def bigram_model(logits: Tensor, context: int = 64) -> nn.Module:
    """A model whose next token depends on the last one only.

    Args:
        logits: ``[vocab, vocab]`` logits of the next token, one row per last token.
        context: longest context.
    """
    vocab = logits.shape[0]
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=context,
        **_NO_SPECIAL_TOKENS,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # The final norm scales a one-hot vector to this length.
        length = (1 / vocab + config.rms_norm_eps) ** -0.5
        model.lm_head.weight.copy_(logits.T / length)
    return model


def chain_logits(vocab: int, chain: list[int], strength: float = 20.0) -> Tensor:
    """Logits of a :func:`bigram_model` that says the tokens of ``chain`` one after another.

    The last token is followed by the first; tokens outside the chain lead to its first token.
    """
    logits = torch.zeros(vocab, vocab)
    logits[:, chain[0]] = strength
    for token, following in zip(chain, chain[1:] + chain[:1], strict=True):
        logits[token] = 0.0
        logits[token, following] = strength
    return logits


BOS, EOS, MARK = "<s>", "</s>", "<mark>"
_TEXT = "abcdefgh \n.,:éñ€😀"
_MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "d"), ("Ã", "©")]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def byte_tokenizer(
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE,
    added: str | None = None,
    names_end: bool = True,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of a few dozen tokens, with characters of one to four bytes.

    Args:
        chat_template: its chat template, or several by name.
        added: a text with the special tokens that it adds, such as ``"<s> $A"``.
        names_end: whether ``EOS`` is named as the token at the end of a text.
    """
    to_character = {byte: char for char, byte in _byte_characters().items()}
    letters = sorted({to_character[byte] for byte in _TEXT.encode()})
    tokens = [BOS, EOS, MARK, *letters, *("".join(pair) for pair in _MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, _MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (BOS, EOS, MARK)])
    if added is not None:
        specials = [(token, vocab[token]) for token in (BOS, EOS, MARK)]
        tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS if names_end else None,
        chat_template=chat_template,
    )


def pieces_tokenizer(pieces: tuple[str, ...], names_end: bool = True) -> PreTrainedTokenizerFast:
    """A BPE tokenizer with the given entries in SentencePiece's form: ``▁`` and ``<0x0A>``.

    Args:
        pieces: the entries. Those in ``<|…|>`` are special tokens.
        names_end: whether ``<|end|>`` is named as the token at the end of a text.
    """
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [piece for piece in pieces if piece.startswith("<|")]
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in special])
    end = {"eos_token": "<|end|>"} if names_end and "<|end|>" in special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end)


def _byte_characters() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
