"""The family's tokenizer: byte-level BPE with 4,096 tokens, which splits numbers into digits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftwise.zoo.corpus import SOURCES, read_documents
from draftwise.zoo.recipe import END_OF_TEXT, MAX_POSITIONS, MIXTURE, VOCABULARY_SIZE

# A turn ends like a training document, so a conversation is a sequence of answered questions.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ 'Answer: ' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)

_TRAINING_CHARACTERS = 10_000_000


def _training_texts(data: Path) -> Iterator[str]:
    # Approximately the training mixture, so that merges match the token frequencies.
    for source in SOURCES:
        budget = int(_TRAINING_CHARACTERS * MIXTURE[source])
        for document in read_documents(source, data):
            if document.is_held_out:
                continue
            yield document.text
            budget -= len(document.text)
            if budget <= 0:
                break


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Learn the vocabulary from ``texts``: 4,096 entries, or fewer if the texts have too few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load_tokenizer(runs: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer that a run saved in ``runs``."""
    return PreTrainedTokenizerFast.from_pretrained(str(runs / "tokenizer"))


def ensure_tokenizer(runs: Path, data: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of ``runs``; train it and save it there if it does not exist."""
    folder = runs / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(_training_texts(data)).save_pretrained(str(folder))
    return load_tokenizer(runs)
