"""Stop strings that contain special tokens, which the text leaves out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise import SamplingParams
from draftwise.engine.text import TextBuilder
from draftwise.outputs import FinishReason

from ..tiny_models import BOS, EOS, MARK, pieces_tokenizer
from .test_stopping import DRAFTS, build, chain_folders, streamed
from .test_text import REPLACEMENT, TOKENIZER, encode, release

SPECIALS = (BOS, EOS, MARK)
FALLBACK = pieces_tokenizer(
    ("a", "b", "ab", "▁", "▁a", "<|end|>", "<|turn|>", "<0x0A>", "<0xC3>", "<0xA9>")
)

letters = st.sampled_from(["a", "b", "ab", "abc", " d", "é", "\n", *SPECIALS, *SPECIALS])
outputs = st.lists(letters, max_size=9).map(lambda parts: encode("".join(parts)))
# Parts of the text with special tokens, so that they are often found.
stops = st.lists(
    st.lists(letters, min_size=1, max_size=3).map("".join), min_size=1, max_size=3
).map(tuple)
pieces = ["a", "b", "ab", "▁a", "▁", "<|end|>", "<|turn|>", "<|turn|>", "<0x0A>"]
fallback_outputs = st.lists(st.sampled_from(pieces), max_size=9).map(FALLBACK.convert_tokens_to_ids)
fallback_stops = st.lists(
    st.lists(st.sampled_from(["a", "b", " ", "\n", "<|end|>", "<|turn|>"]), min_size=1, max_size=3)
    .map("".join)
    .filter(lambda stop: "<|" in stop),
    min_size=1,
    max_size=2,
).map(tuple)


def run(tokenizer, output, stop, min_tokens=0, silent=()):
    """The builder, all released text, and the number of tokens up to the end."""
    builder = TextBuilder(tokenizer, [], stop, min_tokens)
    released = ""
    for token in output:
        if token in silent:
            builder.add_silent(token)
            break
        if builder.add(token):
            break
        released += release(builder)
        held = builder.text[len(released) :]
        assert builder.text.startswith(released)
        assert not held or any(held[0] in each for each in stop)
    builder.finish()
    released += release(builder)
    assert released == builder.text == "".join(builder.pieces)
    return builder.text, len(builder.pieces)


def expected(tokenizer, output, stop, specials):
    """The text and the number of tokens up to the first stop string, by decoding everything."""

    def plain(text):
        for special in specials:
            text = text.replace(special, "")
        return text

    for count in range(1, len(output) + 1):
        visible = tokenizer.decode(output[:count], skip_special_tokens=True)
        if visible.endswith(REPLACEMENT):
            continue
        whole = tokenizer.decode(output[:count], skip_special_tokens=False)
        found = [len(plain(whole[: whole.find(each)])) for each in stop if each in whole]
        found += [visible.find(each) for each in stop if each in visible]
        if found:
            return visible[: min(found)], count
    return tokenizer.decode(output, skip_special_tokens=True), len(output)


property_test = settings(deadline=None, derandomize=True, max_examples=100)


@property_test
@given(outputs, stops)
def test_texts_end_before_the_first_stop_string(output, stop):
    assert run(TOKENIZER, output, stop) == expected(TOKENIZER, output, stop, SPECIALS)


@property_test
@given(fallback_outputs, fallback_stops)
def test_with_byte_fallback(output, stop):
    specials = ("<|end|>", "<|turn|>")
    assert run(FALLBACK, output, stop) == expected(FALLBACK, output, stop, specials)


@property_test
@given(outputs, stops, st.integers(1, 5))
def test_the_first_tokens_are_not_searched(output, stop, num_tokens):
    """The text after them ends as a text of its own."""
    exempt = TOKENIZER.decode(output[:num_tokens], skip_special_tokens=True)
    text, count = run(TOKENIZER, output, stop, num_tokens)
    rest, num_others = expected(TOKENIZER, output[num_tokens:], stop, SPECIALS)
    if not exempt.endswith(REPLACEMENT):
        assert (text, count) == (exempt + rest, min(num_tokens, len(output)) + num_others)


def test_stop_strings_of_special_and_other_text():
    for stop, text in [
        (MARK, "abc"),
        (f"c{MARK}", "ab"),
        (f"{MARK} d", "abc"),
        (f"bc{MARK} d{EOS}", "a"),
        (f"{MARK} d{EOS}{EOS}", "abc"),
        (f"{EOS}{EOS}", "abc d"),
        (f"{EOS}\n", "abc d"),
        ("c d", "ab"),  # the text has it, although a special token is between
        ("rk>", "abc"),
        (f"c{EOS}", "abc d\n"),
    ]:
        output = encode(f"abc{MARK} d{EOS}{EOS}\n")
        assert run(TOKENIZER, output, (stop,))[0] == text


def test_text_before_the_stop_string_has_no_special_tokens():
    output = encode(f"a{MARK}b{BOS}c{MARK}d")
    assert run(TOKENIZER, output, (f"c{MARK}",)) == ("ab", 6)


def test_the_beginning_of_a_stop_string_is_held_back():
    builder = TextBuilder(TOKENIZER, [], (f"c{MARK}d",))
    given = []
    for token in encode(f"bc{MARK}c{MARK}h"):
        builder.add(token)
        given.append(release(builder))
    assert given == ["b", "", "", "c", "", "ch"]


def test_a_special_token_that_ends_the_text_may_complete_a_stop_string():
    eos = TOKENIZER.eos_token_id
    output = encode(f"abc{EOS}")
    assert run(TOKENIZER, output, (f"c{EOS}",), silent=(eos,)) == ("ab", 2)
    assert run(TOKENIZER, output, (f"c{EOS}",), min_tokens=2, silent=(eos,)) == ("abc", 2)


def test_special_tokens_after_an_incomplete_character():
    for output, stop, text in [
        (["b", "<0xC3>", "<|turn|>", "a"], "<|turn|>", f"b{REPLACEMENT}"),
        (["b", "<0xC3>", "<|turn|>", "a"], "<|turn|>a", f"b{REPLACEMENT}"),
        (["b", "<0xC3>", "<|turn|>", "a"], f"{REPLACEMENT}<|turn|>", "b"),
        (["b", "<0xC3>", "<|turn|>", "a"], "b<|turn|>", f"b{REPLACEMENT}a"),
        # The special token is between the bytes of a character.
        (["b", "<0xC3>", "<|turn|>", "<0xA9>"], "x<|turn|>", "bé"),
    ]:
        assert run(FALLBACK, FALLBACK.convert_tokens_to_ids(output), (stop,))[0] == text


def test_many_special_tokens_do_not_add_up():
    """Only those that a stop string may contain are kept."""
    builder = TextBuilder(TOKENIZER, [], (f"a{MARK}{MARK}b",))
    for token in encode(MARK * 50 + "a" + MARK * 50):
        assert not builder.add(token)
        assert len(builder._specials) <= len(f"a{MARK}{MARK}b") // len(MARK) + 1


# No token occurs twice, so a chain of tokens can spell them.
PARTS = ["h", "g", "f", MARK, "€", "e", "d", EOS, BOS, ".", "ñ", "c", ":", "a"]
CHAIN = encode("".join(PARTS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target that repeats the parts forever, a draft equal to it, and a worse draft."""
    return chain_folders(tmp_path_factory.mktemp("specials"), CHAIN)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_stop_string_with_special_tokens(folders, draft):
    """They occur inside an accepted block and across blocks."""
    llm = build(folders, draft)
    count = len(PARTS)
    stops = [
        "".join((PARTS * 2)[i:j])
        for i in range(count)
        for j in range(i + 1, i + 6)
        if {MARK, EOS, BOS} & {*(PARTS * 2)[i:j]}
    ]
    params = [SamplingParams(temperature=0, max_tokens=40, stop=stop, logprobs=0) for stop in stops]
    prompts = [CHAIN[-1:]] * len(stops)
    outputs = llm.generate(prompts, params)
    for stop, output in zip(stops, outputs, strict=True):
        text, num_tokens = expected(TOKENIZER, CHAIN * 2, (stop,), SPECIALS)
        assert output.text == text
        assert output.finish_reason is FinishReason.STOP
        # The tokens end with the one that completed the stop string.
        assert output.token_ids == (CHAIN * 2)[:num_tokens]
        assert len(output.token_texts) == len(output.logprobs) == num_tokens
        assert output.speculation.num_tokens == num_tokens
    texts, tokens, _ = streamed(llm, prompts, params)
    assert texts == [output.text for output in outputs]
    assert tokens == [output.token_ids for output in outputs]


@pytest.mark.slow
def test_the_earliest_stop_string_wins_after_the_minimum_length(folders):
    llm = build(folders, "perfect")
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        stop=(f"d{EOS}{BOS}", f"ed{EOS}{BOS}", f"f{MARK}"),
        min_tokens=4,
    )
    (output,) = llm.generate([CHAIN[-1:]], params)
    assert output.text == "hgf€"
    assert output.token_ids == encode(f"hgf{MARK}€ed{EOS}{BOS}")
