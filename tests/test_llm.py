"""``LLM``: prompts of every kind, parameters per prompt, and speculation settings."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwise import LLM, RequestOutput, SamplingParams
from draftwise.engine.memory import cache_bytes
from draftwise.errors import InvalidParameterError, ModelNotFoundError, PromptError
from draftwise.outputs import FinishReason, TokenSource

from .refusals import error_of
from .stand_ins import unguarded
from .tiny_models import Recipe, byte_tokenizer, save

RECIPE = Recipe(vocab=32, seed=11, tokenizer=True)
TOKENIZER = byte_tokenizer()
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def build(models, speculation="default", **options):
    if speculation == "default":
        speculation = unguarded(
            models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed"
        )
    return LLM(models.folder(RECIPE), speculation, dtype="float32", **options)


@pytest.fixture(scope="module")
def llm(models):
    return build(models)


def encode(text):
    return TOKENIZER(text)["input_ids"]


class TestPrompts:
    def test_text(self, llm):
        (output,) = llm.generate("abc d", GREEDY)
        assert isinstance(output, RequestOutput)
        assert output.prompt == "abc d"
        assert output.prompt_token_ids == encode("abc d")
        assert len(output.token_ids) == 12
        assert output.finish_reason is FinishReason.LENGTH
        assert output.error is None

    def test_token_ids(self, llm):
        (output,) = llm.generate(encode("abc d"), GREEDY)
        assert output.prompt is None
        assert output.token_ids == llm.generate("abc d", GREEDY)[0].token_ids
        assert output.text == llm.generate("abc d", GREEDY)[0].text

    def test_one_or_several(self, llm):
        for kind in [list, tuple]:
            ids = encode("abc d")
            expected = llm.generate("abc d", GREEDY)[0].token_ids
            assert [o.token_ids for o in llm.generate(kind(ids), GREEDY)] == [expected]
            assert [o.token_ids for o in llm.generate(kind([ids]), GREEDY)] == [expected]
            assert [o.token_ids for o in llm.generate([kind(ids), "abc d"], GREEDY)] == [
                expected
            ] * 2

    def test_messages(self, llm):
        messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
        (output,) = llm.generate(messages, GREEDY)
        assert output.prompt == "u:ab\na:c\na:"
        assert output.token_ids == llm.generate(encode("u:ab\na:c\na:"), GREEDY)[0].token_ids
        outputs = llm.generate([messages, "abc d"], GREEDY)
        assert outputs[0].prompt == output.prompt
        assert outputs[1].prompt == "abc d"

    def test_mixed_prompts_keep_their_order(self, llm):
        prompts = ["h", [3, 4], [{"role": "user", "content": "g"}], (5,), "é€😀"]
        outputs = llm.generate(prompts, GREEDY)
        assert [o.prompt for o in outputs] == ["h", None, "u:g\na:", None, "é€😀"]
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == llm.generate([prompt], GREEDY)[0].token_ids

    def test_no_prompts(self, llm):
        assert llm.generate([], GREEDY) == []
        assert list(llm.stream([], GREEDY)) == []

    def test_special_tokens_are_added_only_to_text(self, models, tmp_path):
        """A template writes its own."""
        save(RECIPE.build(), tmp_path)
        tokenizer = byte_tokenizer("{{ bos_token }}{{ messages[0]['content'] }}", "<s> $A")
        bos = tokenizer.bos_token_id
        tokenizer.save_pretrained(tmp_path)
        llm = LLM(str(tmp_path), dtype="float32")
        text, chat = llm.generate(["ab", [{"role": "user", "content": "ab"}]], GREEDY)
        assert text.prompt_token_ids == [bos, *encode("ab")]
        assert chat.prompt_token_ids == [bos, *encode("ab")]

    @pytest.mark.parametrize("prompt", ["ab", [{"role": "user", "content": "ab"}]])
    def test_text_needs_a_tokenizer(self, models, prompt):
        llm = LLM(models.folder(Recipe()), dtype="float32")
        with pytest.raises(PromptError, match="no tokenizer; give token ids"):
            llm.generate(prompt)

    def test_messages_need_a_template(self, tmp_path):
        save(RECIPE.build(), tmp_path)
        byte_tokenizer(chat_template=None).save_pretrained(tmp_path)
        llm = LLM(str(tmp_path), dtype="float32")
        with pytest.raises(PromptError, match="no chat template; give text"):
            llm.generate([{"role": "user", "content": "ab"}])

    def test_a_template_that_raises(self, llm):
        with pytest.raises(PromptError, match="no bad words"):
            llm.generate([{"role": "user", "content": "bad"}])

    def test_longest(self, llm):
        (output,) = llm.generate([1] * 63, GREEDY)
        assert len(output.token_ids) == 1
        with pytest.raises(PromptError, match="has 64 tokens and the context holds 64"):
            llm.generate([1] * 64, GREEDY)


class TestSampling:
    def test_default(self, llm):
        (output,) = llm.generate([1, 2])
        assert len(output.token_ids) == 62  # the context ends before 128 tokens

    def test_one_per_prompt(self, llm):
        params = [SamplingParams(max_tokens=n, seed=n) for n in (3, 1, 5)]
        outputs = llm.generate(["a", "b", "c"], params)
        assert [len(output.token_ids) for output in outputs] == [3, 1, 5]
        outputs = llm.generate(["a", "b", "c"], tuple(params))
        assert [len(output.token_ids) for output in outputs] == [3, 1, 5]

    def test_wrong_number_of_parameters(self, llm):
        for count in [0, 1, 3]:
            for call in (llm.generate, lambda *a: list(llm.stream(*a))):
                caught = error_of(call, ["a", "b"], [GREEDY] * count, error=InvalidParameterError)
                assert caught.field == "sampling"
                assert f"got {count} for 2 prompts" in caught.message
            assert llm.engine.num_unfinished == 0

    def test_wrong_type_of_parameters(self, llm):
        for sampling in [5, "greedy", {"top_k": 1}, [GREEDY, None]]:
            caught = error_of(llm.generate, ["a", "b"], sampling, error=InvalidParameterError)
            assert caught.field == "sampling"
            assert llm.engine.num_unfinished == 0


class TestOutputs:
    def test_counts_are_consistent(self, llm):
        outputs = llm.generate(["a"] * 8, [SamplingParams(max_tokens=n) for n in range(20, 28)])
        for output in outputs:
            stats = output.speculation
            sources = output.token_sources
            assert stats.num_tokens == len(output.token_ids) == len(sources)
            assert stats.num_drafted == stats.num_verified >= stats.num_accepted > 0
            assert sources.count(TokenSource.DRAFT) == stats.num_accepted
            assert len(sources) - sources.count(TokenSource.DRAFT) == stats.num_steps
            assert sources[0] is TokenSource.TARGET
            assert stats.mean_accepted_length == stats.num_tokens / stats.num_steps
            assert stats.lossless

    def test_lenience_is_reported_as_not_lossless(self, models):
        config = unguarded(models.folder(RECIPE.draft()), lenience=0.5, policy="fixed")
        llm = build(models, config)
        assert not llm.generate("a", GREEDY)[0].speculation.lossless

    def test_text_matches_the_tokens(self, llm):
        (output,) = llm.generate("ab", SamplingParams(max_tokens=40, seed=3))
        text = TOKENIZER.decode(encode("ab") + output.token_ids, skip_special_tokens=True)
        assert output.text == text.removeprefix("ab")
        assert "".join(output.token_texts) == output.text

    def test_stream_gives_the_same_text(self, llm):
        prompts = ["ab", [4, 5], "é"]
        params = [SamplingParams(max_tokens=30, seed=seed) for seed in range(3)]
        expected = llm.generate(prompts, params)
        pieces = list(llm.stream(prompts, params))
        for index, output in enumerate(expected):
            own = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in own) == output.text
            assert [token for piece in own for token in piece.token_ids] == output.token_ids
            assert [p.finish_reason for p in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason is output.finish_reason


class TestSpeculation:
    def test_none(self, models, llm):
        plain = build(models, None)
        (output,) = plain.generate("ab", GREEDY)
        assert plain.draft is None
        assert output.token_ids == llm.generate("ab", GREEDY)[0].token_ids
        assert output.speculation.num_drafted == 0
        assert set(output.token_sources) == {TokenSource.TARGET}

    def test_no_tokens(self, models):
        config = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=0, policy="fixed")
        sampled = SamplingParams(max_tokens=20, seed=1)
        for params in (GREEDY, sampled):
            (output,) = build(models, config).generate("ab", params)
            assert set(output.token_sources) == {TokenSource.TARGET}
            assert output.token_ids == build(models, None).generate("ab", params)[0].token_ids

    def test_a_mapping_with_vllms_names(self, models, llm):
        other = build(
            models,
            {
                "method": "draft_model",
                "model": models.folder(RECIPE.draft()),
                "num_speculative_tokens": 3,
                "policy": "fixed",
                "guard": False,
            },
        )
        params = SamplingParams(max_tokens=20, seed=1)
        assert other.generate("ab", params) == llm.generate("ab", params)

    def test_with_speculation_shares_the_target(self, models, llm):
        params = SamplingParams(max_tokens=20, seed=1)
        expected = llm.generate("ab", params)
        plain = llm.with_speculation(None)
        longer = llm.with_speculation(
            unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=5, policy="fixed")
        )
        assert plain.target is longer.target is llm.target
        assert longer.draft is llm.draft
        assert plain.draft is None
        assert plain.generate("ab", params)[0].speculation.num_drafted == 0
        assert longer.generate("ab", GREEDY)[0].token_ids == llm.generate("ab", GREEDY)[0].token_ids
        assert llm.generate("ab", params) == expected
        named = llm.with_speculation({"method": "suffix", "num_speculative_tokens": 3})
        assert named.generate("ab", GREEDY)[0].text == llm.generate("ab", GREEDY)[0].text
        with pytest.raises(InvalidParameterError, match="speculation: must be a Spec"):
            llm.with_speculation("suffix")

    def test_suffix_and_a_model_together(self, models, llm):
        both = unguarded(
            ["suffix", models.folder(RECIPE.draft())], num_speculative_tokens=3, policy="fixed"
        )
        other = build(models, both)
        assert other.draft is not None
        assert other.generate("abab", GREEDY)[0].text == llm.generate("abab", GREEDY)[0].text

    def test_a_saved_corpus_is_continued(self, models, tmp_path):
        expected = build(models, None).generate("ab", GREEDY)
        settings = {"policy": "fixed", "num_speculative_tokens": 4}
        first = build(models, unguarded("suffix", remember_outputs=True, **settings))
        assert first.generate("ab", GREEDY)[0].text == expected[0].text
        first.save_corpus(tmp_path / "corpus.safetensors")
        config = unguarded("suffix", corpus=tmp_path / "corpus.safetensors", **settings)
        output = build(models, config).generate("ab", GREEDY)[0]
        assert output.text == expected[0].text
        assert TokenSource.COPY in output.token_sources
        with pytest.raises(InvalidParameterError, match="must end with"):
            first.save_corpus(tmp_path / "corpus.bin")
        with pytest.raises(InvalidParameterError, match="cannot be written"):
            first.save_corpus(tmp_path / "missing" / "corpus.safetensors")
        with pytest.raises(InvalidParameterError, match="path"):
            first.save_corpus(None)
        with pytest.raises(InvalidParameterError, match="there is none"):
            build(models).save_corpus(tmp_path / "corpus.safetensors")

    def test_unknown_policy(self, models):
        config = unguarded(models.folder(RECIPE.draft()), policy="fixd")
        with pytest.raises(InvalidParameterError, match="did you mean 'fixed'") as caught:
            build(models, config)
        assert caught.value.field == "policy"

    def test_unknown_option_of_a_policy(self, models):
        config = unguarded(
            models.folder(RECIPE.draft()), policy_options={"gamma": 3}, policy="fixed"
        )
        with pytest.raises(InvalidParameterError) as caught:
            build(models, config)
        assert caught.value.field == "policy_options.gamma"

    def test_missing_draft(self, models):
        with pytest.raises(ModelNotFoundError) as caught:
            build(models, unguarded("/no/such/draft", policy="fixed"))
        assert caught.value.field == "draft"


def test_paths_types_and_devices_as_objects(models):
    folder = Path(models.folder(RECIPE))
    llm = LLM(
        folder,
        {"draft": Path(models.folder(RECIPE.draft())), "policy": "fixed"},
        torch.float32,
        torch.device("cpu"),
        np.int64(4),
        np.int32(40),
        max_chunk_tokens=np.int64(16),
        cache_gib=np.float32(0.5),
    )
    assert llm.target.name == str(folder)
    assert llm.target.model.dtype is torch.float32
    assert (llm.target.max_model_len, llm.max_chunk_tokens) == (40, 16)
    assert {type(llm.target.max_model_len), type(llm.max_chunk_tokens)} == {int}
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in ("ab", encode("ab"))]
    as_array = llm.generate(np.array([encode("ab")] * 2), GREEDY)
    assert [each.token_ids for each in as_array] == expected


NOT_POSITIVE = [0, -1, 1.5, "1", True, np.bool_(True)]


def test_errors_name_the_argument(models):
    for name, value in [
        *(("max_batch_size", value) for value in [*NOT_POSITIVE, None]),
        *(("max_chunk_tokens", value) for value in [*NOT_POSITIVE, None]),
        *(("max_model_len", value) for value in NOT_POSITIVE),
        *(("cache_gib", value) for value in [0, -1, math.nan, math.inf, "1", True]),
        *(("dtype", value) for value in ["int8", None, 5]),
        *(("device", value) for value in ["gpu", "cuda:99", None, 5]),
        *(("dtype", value) for value in [torch.int8, torch.float64, ["float32"], True]),
        *(("device", value) for value in [True, ["cpu"], torch.device("cuda:99")]),
        *(("overlap", value) for value in [0, 1, "yes", np.array([1, 2])]),
        *(("trust_remote_code", value) for value in [1, "no", None]),
        ("on_status", "print"),
        *(("target", value) for value in ["", None, 5, b"zoo:target"]),
        *(("speculation", value) for value in [5, "fixed", True]),
    ]:
        arguments = {"target": models.folder(RECIPE), name: value}
        caught = error_of(LLM, **arguments, error=InvalidParameterError)
        assert caught.field == name


class TestMemory:
    """The cache takes half of the available memory if the system reports it."""

    def test_page_cache_counts_as_available(self, monkeypatch):
        monkeypatch.setattr(Path, "read_text", lambda self: "MemFree: 10 kB\nMemAvailable: 80 kB")
        assert cache_bytes(None, torch.device("cpu")) == 40 * 1024

    def test_other_systems(self, monkeypatch):
        monkeypatch.setattr(Path, "read_text", lambda self: "MemFree: 10 kB")
        assert cache_bytes(None, torch.device("cpu")) > 10**8

    def test_explicit_size_takes_precedence(self):
        assert cache_bytes(0.5, torch.device("cpu")) == 2**29


def test_a_mapping_with_unknown_keys(models):
    with pytest.raises(InvalidParameterError) as caught:
        build(models, {"model": "d", "draft_tensor_parallel_size": 2})
    assert caught.value.field == "speculation.draft_tensor_parallel_size"


def test_an_int8_target(models):
    """It differs from the original model, and speculation on it is lossless."""
    config = unguarded(models.folder(RECIPE.draft()), policy="fixed")
    name = models.folder(RECIPE) + ":int8"
    alone, together = (LLM(name, each, dtype="float32") for each in (None, config))
    assert alone.target.name == name
    plain = LLM(models.folder(RECIPE), dtype="float32")
    assert alone.target.fingerprint != plain.target.fingerprint
    prompts = ["ab", "cd", "é"]
    texts = [
        [each.token_ids for each in llm.generate(prompts, GREEDY)] for llm in (alone, together)
    ]
    assert texts[0] == texts[1]


def test_a_context_of_one_token_is_rejected(models):
    llm = build(models, max_model_len=1)
    with pytest.raises(PromptError, match="the context holds 1"):
        llm.generate([1])


def test_other_dtypes(models):
    """Within one dtype, speculation does not change greedy output."""
    for dtype in ["bfloat16", "float16", "auto"]:
        config = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
        llm = LLM(models.folder(RECIPE), config, dtype=dtype, max_batch_size=1)
        outputs = llm.generate(["ab", "cd", "é"], GREEDY)
        for output in outputs:
            assert len(output.token_ids) == 12, dtype
            assert output.error is None, dtype
