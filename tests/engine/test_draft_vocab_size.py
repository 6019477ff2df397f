"""A draft that proposes the first tokens of its vocabulary only, and reads all."""

import pytest
import torch
import transformers
from torch import nn

from draftwise import LLM, SamplingParams
from draftwise.checkpoints.first_tokens import first_rows, keep_first_tokens
from draftwise.checkpoints.quantization import QuantizedMatrix
from draftwise.errors import InvalidParameterError
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment
from draftwise.outputs import TokenSource

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .exact import exact_distribution
from .test_lossless import NOT_UNLIKELY

TARGET = Recipe(vocab=48, seed=5)
# Its weights are the target's, so that its proposals are rejected for their vocabulary alone.
SAME, OTHER = TARGET.draft(noise=0.0), TARGET.draft()
NUM_TOKENS = 32
PROMPTS = [[1, 40, 3], [47], [2, 3, 4], [31, 32, 33, 45]]


def build(models, draft, num_tokens=NUM_TOKENS, dtype="float32", suffix="", **settings):
    config = unguarded(
        models.folder(draft) + suffix,
        num_speculative_tokens=3,
        policy="fixed",
        draft_vocab_size=num_tokens,
        **settings,
    )
    return LLM(models.folder(TARGET), config, dtype=dtype, max_batch_size=256)


@pytest.mark.parametrize("suffix", ["", ":int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_texts_are_those_of_the_target(models, dtype, suffix):
    params = SamplingParams(max_tokens=40, temperature=0)
    expected = LLM(models.folder(TARGET), dtype=dtype).generate(PROMPTS, params)
    outputs = build(models, OTHER, dtype=dtype, suffix=suffix).generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert sum(o.speculation.num_accepted for o in outputs) > 10


def test_only_the_first_tokens_are_drafted_and_all_are_read(models):
    """With the target's weights, a draft is right unless the target's token is not its own."""
    outputs = build(models, SAME).generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0))
    sources = [each for o in outputs for each in zip(o.token_ids, o.token_sources, strict=True)]
    assert max(token for token, _ in sources) >= NUM_TOKENS
    for token, source in sources:
        if token >= NUM_TOKENS:
            assert source is not TokenSource.DRAFT
        elif source is TokenSource.CORRECTION:
            pytest.fail(f"token {token} was not drafted")


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["block", "token"])
def test_sampled_texts_follow_the_target(models, verification):
    llm = build(models, OTHER, verification=verification)
    prompt, num_tokens = [1, 40, 3], 2
    params = [SamplingParams(max_tokens=num_tokens + 1, seed=seed) for seed in range(8_000)]
    requests = [llm.engine.add(None, prompt, each) for each in params]
    while llm.engine.num_unfinished:
        llm.engine.step()
    said = [request.output().token_ids[:num_tokens] for request in requests]
    expected = exact_distribution(models.reference(TARGET), prompt, params[0], num_tokens)
    counts = sequence_counts(torch.tensor(said), TARGET.vocab)
    assert chi_square_p_value(counts, expected.joint()) > NOT_UNLIKELY
    assert sum(request.stats.num_accepted for request in requests) > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_logits_are_the_first_of_the_whole_model(models, family):
    folder = models.folder(Recipe(family, vocab=48))
    tokens = [1, 40, 3]

    def logits(num_tokens):
        model = load_model(
            folder, "draft", torch.float32, torch.device("cpu"), num_tokens=num_tokens
        ).model
        cache = model.new_cache(1, len(tokens))
        return model.forward(cache, tokens, [Segment(0, 0, len(tokens))], range(len(tokens)))

    got = logits(NUM_TOKENS)
    assert got.shape == (len(tokens), NUM_TOKENS)
    torch.testing.assert_close(got, logits(None)[:, :NUM_TOKENS], rtol=1e-5, atol=1e-5)


def test_another_number_of_tokens_is_another_model(models):
    folder = models.folder(OTHER)
    found = [
        load_model(folder, "draft", torch.float32, torch.device("cpu"), num_tokens=count)
        for count in (None, 32, 31)
    ]
    assert len({each.fingerprint for each in found}) == 3
    assert len({each.num_parameters for each in found}) == 1


def test_a_bias_is_cut_as_well():
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.PhiConfig(vocab_size=48, num_hidden_layers=1, **settings)
    model = transformers.PhiForCausalLM(config).eval()
    nn.init.normal_(model.lm_head.bias)
    ids = torch.tensor([[1, 40, 3]])
    expected = model(ids).logits[..., :NUM_TOKENS]
    keep_first_tokens(model, NUM_TOKENS, "draft")
    assert torch.equal(model(ids).logits, expected)


def test_rows_of_several_parts():
    numbers = torch.arange(20, dtype=torch.int8).view(5, 4)
    parts = [QuantizedMatrix(each, torch.ones(len(each), 1)) for each in (numbers[:2], numbers[2:])]
    for count in range(1, 5):
        rows = first_rows(parts, count)
        assert torch.equal(torch.cat([each.numbers for each in rows]), numbers[:count])


@pytest.mark.parametrize(
    ("draft", "num_tokens", "message"),
    [
        (OTHER, 48, "must be less than the 48 tokens of the draft"),
        (Recipe(vocab=60, pieces=("ab", "cd"), config={}), 9, "has another vocabulary"),
        ("suffix", 9, "needs a draft model"),
    ],
)
def test_what_is_refused(models, draft, num_tokens, message):
    target = Recipe(vocab=60, tokenizer=True) if getattr(draft, "pieces", ()) else TARGET
    name = draft if isinstance(draft, str) else models.folder(draft)
    config = unguarded(name, policy="fixed", draft_vocab_size=num_tokens)
    with pytest.raises(InvalidParameterError, match=message) as caught:
        LLM(models.folder(target), config, dtype="float32")
    assert caught.value.field == "draft_vocab_size"
