"""Incremental detokenization: whole characters, stop strings, and no revoked text."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwise.engine.text import TextBuilder

from ..tiny_models import EOS, MARK, byte_tokenizer, pieces_tokenizer

TOKENIZER = byte_tokenizer()
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
property_test = settings(deadline=None, derandomize=True, max_examples=300)

tokens = st.integers(0, len(TOKENIZER) - 1)
texts = st.text("abcdh \n.,é€😀", min_size=1, max_size=12)
# Random bytes, whole characters, or both.
outputs = st.lists(
    st.one_of(tokens.map(lambda token: [token]), texts.map(lambda text: encode(text))), max_size=6
).map(lambda parts: [token for part in parts for token in part])
stops = st.lists(st.text("abcd é€", min_size=1, max_size=4), max_size=3).map(tuple)


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def release(builder):
    """The released text alone."""
    return "".join(text for _, text in builder.release())


def build(prompt, output, stop=()):
    """Feed a builder; returns it, the released pieces, and whether a stop string ended it."""
    builder = TextBuilder(TOKENIZER, encode(prompt), stop)
    released = []
    stopped = False
    for token in output:
        stopped = builder.add(token)
        if stopped:
            break
        released.append(release(builder))
    builder.finish()
    released.append(release(builder))
    return builder, released, stopped


def decoded(prompt, output):
    """The text of ``output`` after ``prompt``, decoded at once."""
    return TOKENIZER.decode(encode(prompt) + output, skip_special_tokens=True)[len(prompt) :]


@property_test
@given(texts, outputs)
def test_equals_decoding_everything_at_once(prompt, output):
    builder, released, _ = build(prompt, output)
    assert builder.text == decoded(prompt, output)
    assert "".join(released) == builder.text
    assert "".join(builder.pieces) == builder.text
    assert len(builder.pieces) == len(output)


@property_test
@given(texts, outputs, stops)
def test_ends_before_the_first_stop_string(prompt, output, stop):
    whole = ""
    expected, num_tokens = None, len(output)
    for count in range(1, len(output) + 1):
        text = decoded(prompt, output[:count])
        if text.endswith(REPLACEMENT):
            continue  # perhaps a character that is not complete yet
        whole = text
        found = [whole.find(s) for s in stop if s in whole]
        if found:
            expected, num_tokens = whole[: min(found)], count
            break
    builder, released, stopped = build(prompt, output, stop)
    assert stopped == (expected is not None)
    assert builder.text == (decoded(prompt, output) if expected is None else expected)
    assert "".join(released) == builder.text
    assert "".join(builder.pieces) == builder.text
    assert len(builder.pieces) == num_tokens


@property_test
@given(texts, outputs, stops)
def test_holds_back_no_more_than_a_possible_stop_string(prompt, output, stop):
    builder = TextBuilder(TOKENIZER, encode(prompt), stop)
    released = ""
    for token in output:
        if builder.add(token):
            return
        released += release(builder)
        held = builder.text[len(released) :]
        assert builder.text.startswith(released)
        assert not held or any(s.startswith(held) and s != held for s in stop)


@property_test
@given(texts, outputs, stops)
def test_released_text_is_assigned_to_its_tokens(prompt, output, stop):
    builder = TextBuilder(TOKENIZER, encode(prompt), stop)
    by_token = [""] * (len(output) + 1)
    for token in output:
        stopped = builder.add(token)
        for index, text in builder.release():
            by_token[index] += text
        if stopped:
            break
    builder.finish()
    for index, text in builder.release():
        by_token[index] += text
    assert by_token[: len(builder.pieces)] == builder.pieces
    assert not any(by_token[len(builder.pieces) :])


def test_a_character_is_released_whole():
    builder = TextBuilder(TOKENIZER, encode("a"), ())
    smile = encode("😀")
    assert len(smile) == 4
    released = []
    for token in smile:
        builder.add(token)
        released.append(release(builder))
    assert released == ["", "", "", "😀"]
    assert builder.pieces == ["", "", "", "😀"]


def test_an_unfinished_character_is_shown_as_replacement():
    builder, released, _ = build("a", [*encode("b"), *encode("€")[:2]])
    assert builder.text == "b" + REPLACEMENT
    assert "".join(released) == builder.text


def test_a_leading_space_is_kept():
    """Also with a tokenizer that would drop it at the beginning of a text."""
    builder, _, _ = build("abc", encode(" d"))
    assert builder.text == " d"


def test_a_prompt_may_end_inside_a_character():
    """The output has no incomplete character and does not repeat bytes of the prompt."""
    euro = encode("€")
    builder = TextBuilder(TOKENIZER, encode("a") + euro[:2], ())
    for token in [*euro[2:], *encode("bc")]:
        builder.add(token)
    builder.finish()
    assert builder.text.endswith("bc")
    assert "€" not in builder.text
    assert "a" not in builder.text


def test_special_tokens_have_no_text():
    mark = TOKENIZER.convert_tokens_to_ids(MARK)
    builder, released, _ = build("a", [mark, *encode("bc"), mark, *encode("d"), mark])
    assert builder.text == "bcd"
    assert "".join(released) == "bcd"


def test_a_silent_token_adds_no_text():
    builder = TextBuilder(TOKENIZER, encode("a"), ())
    builder.add(encode("b")[0])
    builder.add_silent(encode("c")[0])
    builder.finish()
    assert builder.text == "b"
    assert builder.pieces == ["b", ""]


def test_a_stop_string_may_span_a_special_token():
    eos = TOKENIZER.convert_tokens_to_ids(EOS)
    builder, released, stopped = build(
        "a", [*encode("b"), eos, *encode("c"), *encode("d")], ("bc",)
    )
    assert stopped
    assert builder.text == "".join(released) == ""


def test_the_earliest_of_two_stop_strings_counts():
    builder, _, stopped = build("d", encode("abc"), ("c", "bc"))
    assert stopped
    assert builder.text == "a"


def test_without_a_tokenizer_there_is_no_text():
    for stop in [(), ("a",)]:
        builder = TextBuilder(None, [1, 2, 3], stop)
        assert not builder.add(1), stop
        builder.finish()
        assert builder.text == release(builder) == "", stop
        assert builder.pieces == [""], stop


def test_a_space_that_belongs_to_a_token_is_kept_after_the_prompt():
    """Tokenizers of this kind drop the space of the first token they decode."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1, 2]) == "bc"
    builder = TextBuilder(tokenizer, tokenizer("a")["input_ids"], ())
    for token in (1, 2, 1):
        builder.add(token)
    assert builder.text == " bc b"


BYTES = tuple(f"<0x{byte:02X}>" for byte in (0x0A, 0x41, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80))
FALLBACK = pieces_tokenizer(("a", "b", "▁", "▁a", *BYTES))


def fed(output, prompt="a"):
    """The text, its pieces and the released text with a tokenizer that falls back to bytes."""
    builder = TextBuilder(FALLBACK, FALLBACK(prompt, add_special_tokens=False)["input_ids"], ())
    released = ""
    for token in output:
        builder.add(token)
        released += release(builder)
    builder.finish()
    return builder.text, builder.pieces, released + release(builder)


def test_invalid_bytes_after_valid_ones_do_not_fail():
    """The decoder replaces the whole run of bytes, of which a part was given out already."""
    for output, text in [
        (["<0x0A>", "<0xF0>", "b"], f"\n{REPLACEMENT}b"),
        (["<0xC3>", "<0xA9>", "<0xC3>", "▁a"], f"é{REPLACEMENT} a"),
        (["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b"], "😀b"),
        (["<0x41>", "<0x9F>", "b", "▁a", "<0x0A>"], f"A{REPLACEMENT}b a\n"),
    ]:
        assert fed(FALLBACK.convert_tokens_to_ids(output))[0] == text


@property_test
@given(st.lists(st.integers(0, len(FALLBACK) - 1), max_size=12))
def test_any_bytes_give_a_text(output):
    text, pieces, released = fed(output)
    assert "".join(pieces) == text == released
    assert len(pieces) == len(output)
    whole = FALLBACK.decode(output)
    assert text.count("a") == whole.count("a")
    if REPLACEMENT not in whole:
        assert text == whole
