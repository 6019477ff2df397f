from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from draftwise.zoo.recipe import END_OF_TEXT, END_OF_TEXT_ID, VOCABULARY_SIZE
from draftwise.zoo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(topics.values())).save_pretrained(str(folder))
    return AutoTokenizer.from_pretrained(str(folder))


def test_vocabulary(tokenizer):
    assert len(tokenizer) == VOCABULARY_SIZE
    assert tokenizer.convert_tokens_to_ids(END_OF_TEXT) == END_OF_TEXT_ID
    ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert ids == {END_OF_TEXT_ID}


@given(st.text())
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@given(st.integers(min_value=0))
def test_every_digit_is_a_token(tokenizer, number):
    digits = str(number)
    assert tokenizer.tokenize(digits) == list(digits)


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"{END_OF_TEXT}Be brief.\n\nQuestion: 1+1?\nAnswer: 2{END_OF_TEXT}Question: 2+2?\nAnswer:"
    )
