"""Texts end at the right position, also if the draft continues after it."""

import json

import pytest

from draftwise import LLM, SamplingParams
from draftwise.outputs import FinishReason, TokenSource

from ..stand_ins import SOURCES_WITH_A_MODEL, unguarded
from ..tiny_models import Recipe, bigram_model, byte_tokenizer, chain_logits, save

TOKENIZER = byte_tokenizer()
# No two of these characters share a byte, so a chain of tokens can spell them.
TEXT = "hgf€ed.ñc,😀:a\n"
CHAIN = [
    token
    for character in TEXT
    for token in TOKENIZER(character, add_special_tokens=False)["input_ids"]
]
PROMPT = CHAIN[-1:]
CONTEXT = 64
DRAFTS = ["none", "perfect", "broken"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target that repeats ``TEXT`` forever, a draft equal to it, and a worse draft."""
    return chain_folders(tmp_path_factory.mktemp("chains"), CHAIN)


def chain_folders(root, chain):
    """A target that repeats a chain of tokens forever, a draft equal to it, and a worse draft."""
    right = chain_logits(len(TOKENIZER), chain)
    wrong = right.clone()
    for token in chain[::4]:
        wrong[token] = wrong[token].roll(1)
    return {
        name: save(bigram_model(logits, CONTEXT), root / name, tokenizer=True)
        for name, logits in (("target", right), ("perfect", right), ("broken", wrong))
    }


@pytest.fixture(params=DRAFTS, scope="module")
def llm(folders, request):
    return build(folders, request.param)


def build(folders, draft, **options):
    speculation = None
    if draft != "none":
        speculation = unguarded(folders[draft], num_speculative_tokens=5, policy="fixed")
    return LLM(folders["target"], speculation, dtype="float32", **options)


def greedy(**options):
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, **options})


def endless(num_tokens):
    return (CHAIN * 4)[:num_tokens]


def text_of(num_tokens):
    return TOKENIZER.decode(endless(num_tokens))


def streamed(llm, prompts, sampling):
    """Text, tokens and last piece of each prompt, from its stream."""
    texts, tokens, last = [""] * len(prompts), [[] for _ in prompts], [None] * len(prompts)
    for piece in llm.stream(prompts, sampling):
        assert last[piece.index] is None or last[piece.index].finish_reason is None
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        last[piece.index] = piece
    return texts, tokens, last


def test_the_drafts_of_this_module_are_accepted_and_rejected(folders):
    output = build(folders, "perfect").generate(PROMPT, greedy())[0]
    assert output.speculation.acceptance_rate == 1
    assert TokenSource.BONUS in output.token_sources
    output = build(folders, "broken").generate(PROMPT, greedy())[0]
    assert set(output.token_sources) == SOURCES_WITH_A_MODEL


def test_every_stop_string(llm):
    """They occur inside an accepted block, across blocks, and across bytes of a character."""
    whole = text_of(40)
    stops = sorted({whole[i:j] for i in range(len(TEXT)) for j in range(i + 1, i + 5)})
    params = [greedy(stop=stop) for stop in stops]
    prompts = [PROMPT] * len(stops)
    outputs = llm.generate(prompts, params)
    for stop, output in zip(stops, outputs, strict=True):
        assert output.text == whole[: whole.index(stop)]
        assert "".join(output.token_texts) == output.text
        assert output.finish_reason is FinishReason.STOP
        # The tokens end with the one that completed the stop string.
        assert TOKENIZER.decode(output.token_ids) == output.text + stop
        assert len(output.token_ids) == len(output.token_texts) == len(output.token_sources)
    texts, tokens, last = streamed(llm, prompts, params)
    assert texts == [output.text for output in outputs]
    assert tokens == [output.token_ids for output in outputs]
    assert {piece.finish_reason for piece in last} == {FinishReason.STOP}


def test_partial_stop_strings_do_not_end_a_text(llm):
    params = greedy(stop=("gf€x", "hgfe", "ñc,😀a", "a\nhh"), max_tokens=30)
    outputs = llm.generate([PROMPT], params)
    assert outputs[0].text == text_of(30)
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert streamed(llm, [PROMPT], params)[0] == [outputs[0].text]


def test_the_first_of_several_stop_strings_ends_a_text(llm):
    (output,) = llm.generate(PROMPT, greedy(stop=("a", "d.ñ", "ed")))
    assert output.text == "hgf€"


def test_every_max_tokens(llm):
    lengths = range(1, 30)
    outputs = llm.generate([PROMPT] * len(lengths), [greedy(max_tokens=n) for n in lengths])
    for length, output in zip(lengths, outputs, strict=True):
        assert output.token_ids == endless(length)
        assert output.text == text_of(length)
        assert output.finish_reason is FinishReason.LENGTH
        assert output.speculation.num_tokens == length
    texts, _, _ = streamed(llm, [PROMPT] * len(lengths), [greedy(max_tokens=n) for n in lengths])
    assert texts == [output.text for output in outputs]


def test_every_stop_token(llm):
    outputs = llm.generate(
        [PROMPT] * len(CHAIN), [greedy(stop_token_ids=(token,)) for token in CHAIN]
    )
    for index, output in enumerate(outputs):
        assert output.token_ids == CHAIN[: index + 1]
        assert output.finish_reason is FinishReason.STOP
        # The text of the stop token is omitted. Bytes before it may stay incomplete.
        assert output.text == TOKENIZER.decode(CHAIN[:index])
        assert "".join(output.token_texts) == output.text


@pytest.mark.covering("position", "draft", "where")
@pytest.mark.parametrize("position", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_end_of_sequence_tokens_end_a_text(folders, tmp_path, position, draft, where):
    """They may occur inside a draft. With ``ignore_eos`` generation continues."""
    eos = CHAIN[position]
    save(bigram_model(chain_logits(len(TOKENIZER), CHAIN), CONTEXT), tmp_path, tokenizer=True)
    generation = tmp_path / "generation_config.json"
    if where == "config.json":
        generation.unlink()
    file = tmp_path / where
    # A model may have several end-of-sequence tokens.
    settings = json.loads(file.read_text()) | {"eos_token_id": [0, eos]}
    file.write_text(json.dumps(settings))
    llm = build({**folders, "target": str(tmp_path)}, draft)
    ended, ignored, stopped = llm.generate(
        [PROMPT] * 3,
        [
            greedy(max_tokens=20),
            greedy(max_tokens=20, ignore_eos=True),
            greedy(max_tokens=20, ignore_eos=True, stop_token_ids=(eos,)),
        ],
    )
    assert ended.token_ids == stopped.token_ids == CHAIN[: position + 1]
    assert ended.finish_reason is stopped.finish_reason is FinishReason.STOP
    assert ended.text == stopped.text == TOKENIZER.decode(CHAIN[:position])
    assert ignored.token_ids == endless(20)
    assert ignored.finish_reason is FinishReason.LENGTH


def test_the_context_ends_a_text(llm):
    prompts = [(PROMPT + CHAIN * 4)[:length] for length in (1, 10, 58, 62, 63)]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(max_tokens=1000)), strict=True):
        assert output.token_ids == (PROMPT + CHAIN * 4)[len(prompt) : CONTEXT]
        assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_lowered_context_ends_a_text_earlier(folders, draft):
    llm = build(folders, draft, max_model_len=12)
    (output,) = llm.generate(PROMPT, greedy(max_tokens=1000))
    assert output.token_ids == endless(11)
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("context", [6, 21, 200])
def test_drafts_end_at_the_context_of_the_draft(folders, tmp_path, context):
    """Beyond a shorter context nothing is drafted. The texts do not change."""
    draft = save(
        bigram_model(chain_logits(len(TOKENIZER), CHAIN), context), tmp_path, tokenizer=True
    )
    llm = LLM(
        folders["target"],
        unguarded(draft, num_speculative_tokens=4, policy="fixed"),
        dtype="float32",
        max_chunk_tokens=5,
    )
    prompts = [(PROMPT + CHAIN * 4)[:length] for length in (1, 5, 6, 7, 19, 30)]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(max_tokens=1000)), strict=True):
        assert output.token_ids == (PROMPT + CHAIN * 4)[len(prompt) : CONTEXT]
        drafted = [
            index
            for index, source in enumerate(output.token_sources, start=len(prompt))
            if source is TokenSource.DRAFT
        ]
        assert max(drafted, default=-1) < context
        if context > len(prompt) + 4:
            assert output.speculation.num_accepted > 0


def test_stop_strings_do_not_change_sampled_texts(models):
    """With a stop string, the same seed gives the same text up to the stop string."""
    recipe = Recipe(vocab=len(TOKENIZER), tokenizer=True, seed=4)
    llm = LLM(
        models.folder(recipe),
        unguarded(models.folder(recipe.draft()), policy="fixed"),
        dtype="float32",
    )
    seeds = range(24)
    free = llm.generate(["abc"] * 24, [SamplingParams(max_tokens=40, seed=s) for s in seeds])
    stops = [output.text[15 + seed % 7 :][:2] for seed, output in zip(seeds, free, strict=True)]
    params = [
        SamplingParams(max_tokens=40, seed=seed, stop=stop)
        for seed, stop in zip(seeds, stops, strict=True)
    ]
    outputs = llm.generate(["abc"] * 24, params)
    for with_stop, without, stop in zip(outputs, free, stops, strict=True):
        assert with_stop.text == without.text[: without.text.index(stop)]
        assert with_stop.token_ids == without.token_ids[: len(with_stop.token_ids)]
    assert streamed(llm, ["abc"] * 24, params)[0] == [output.text for output in outputs]


def test_without_a_tokenizer_texts_are_empty(models):
    recipe = Recipe()
    llm = LLM(models.folder(recipe), dtype="float32")
    (output,) = llm.generate([1, 2], greedy(max_tokens=5))
    assert output.text == ""
    assert output.token_texts == [""] * 5
    assert output.prompt is None
