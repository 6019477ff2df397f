"""Recorded steps, drafting in a row, kernels and ragged attention give what the plain way gives."""

import math

import pytest
import torch
import torch.nn.functional as F

from draftwise import SamplingParams
from draftwise.engine.drafting.recorded import RecordedBackend
from draftwise.errors import NumericalError
from draftwise.models.attention import Segment
from draftwise.models.kv_cache import KVCache, LayerShape
from draftwise.models.loading import load_model
from draftwise.models.ragged import (
    FlashAttention,
    FusedAttention,
    RaggedKernels,
    TokenwiseAttention,
)
from draftwise.models.static_steps import LARGEST_STEP, StepMode, step_size
from draftwise.models.transfer import fetch, upload

from ..engine.assembly import generate
from ..tiny_models import Recipe
from .placing import NEEDS_CUDA, PLACES, RECORDED, assemble

pytestmark = pytest.mark.slow

VOCAB = 32
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
CUDA = torch.device("cuda")


def test_sizes():
    sizes = {step_size(count) for count in range(1, LARGEST_STEP + 1)}
    assert all(count <= step_size(count) <= 1.5 * count + 3 for count in range(1, LARGEST_STEP + 1))
    assert max(sizes) == LARGEST_STEP
    assert len(sizes) < 30


@pytest.mark.parametrize("device", DEVICES)
def test_up_and_down(device):
    numbers = [3, 1, 2]
    tensor = upload(numbers, torch.long, torch.device(device))
    assert tensor.device.type == device
    whole, parts, flags = fetch(tensor, torch.tensor([[0.5], [0.25]]).to(device), tensor > 1)
    assert (whole.tolist(), whole.dtype) == (numbers, torch.long)
    assert (parts.tolist(), parts.dtype) == ([[0.5], [0.25]], torch.float32)
    assert flags.tolist() == [True, False, True]
    assert upload([], torch.long, torch.device(device)).shape == (0,)


@torch.inference_mode()
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_of_all_sorts_of_steps(models, family, place):
    """Rows with holes, one token and several, lengths that go back: as a fresh forward."""
    recipe = Recipe(family, VOCAB)
    device = torch.device(place.device)
    model = load_model(models.folder(recipe), "target", torch.float32, device).model
    model.step_mode = place.mode
    reference = models.reference(recipe)
    cache = model.new_cache(6, 48)
    texts = [[] for _ in range(6)]
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        rows = sorted(torch.randperm(6, generator=generator)[: 1 + step % 4].tolist())
        new = {
            row: torch.randint(0, VOCAB, (1 + (step * row) % 4,), generator=generator).tolist()
            for row in rows
        }
        for row in rows:
            if len(texts[row]) > 30:
                del texts[row][5:]
                cache.truncate(row, 5)
        segments = [Segment(row, len(texts[row]), len(new[row])) for row in rows]
        tokens = [token for row in rows for token in new[row]]
        logits = model.forward(cache, tokens, segments, range(len(tokens)))
        first = 0
        for row in rows:
            texts[row] += new[row]
            count = len(new[row])
            expected = reference(input_ids=torch.tensor([texts[row]])).logits[0, -count:]
            actual = logits[first : first + count].cpu()
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
            first += count


SAMPLED = SamplingParams(max_tokens=12, temperature=1.1)


def said(engine, count=24):
    prompts = [[index % 7, 1 + index % 5, 3] for index in range(count)]
    params = [
        SamplingParams(
            max_tokens=6 + index % 12,
            seed=index,
            temperature=(0.0, 0.7, 1.3)[index % 3],
            top_k=(0, 7)[index % 2],
            min_p=(0.0, 0.02)[index % 2],
        )
        for index in range(count)
    ]
    return [output.token_ids for output in generate(engine, prompts, params)]


@pytest.mark.parametrize("policy", ["fixed", "svip", "disco", "dyspec", "tetris", "staged"])
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_drafting_in_a_row_says_what_drafting_one_by_one_says(models, monkeypatch, place, policy):
    recipe = Recipe(vocab=VOCAB, seed=3)

    def run():
        engine = assemble(place, models, recipe, 7, policy=policy, num_speculative_tokens=11)
        return said(engine)

    in_a_row = run()
    monkeypatch.setattr(RecordedBackend, "serves", lambda *_: False)
    one_by_one = run()
    assert sum(a != b for a, b in zip(in_a_row, one_by_one, strict=True)) <= 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_draft_that_is_not_a_number_proposes_nothing(models, place, temperature):
    recipe = Recipe(vocab=VOCAB, seed=8)
    engine = assemble(place, models, recipe, 5, policy="fixed", num_speculative_tokens=3)
    params = [SamplingParams(max_tokens=8, temperature=temperature, seed=1)] * 6
    prompts = [[1, 2, index] for index in range(6)]
    with torch.no_grad():
        cached_model = engine._pipeline.proposer.cached_model
        cached_model.model._model.get_input_embeddings().weight[5] = math.nan
    outputs = generate(engine, prompts, params)
    assert all(output.error is None and len(output.token_ids) == 8 for output in outputs)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_target_that_is_not_a_number_fails_one_request(models, place):
    recipe = Recipe(vocab=VOCAB, seed=8)
    params = [SamplingParams(max_tokens=8, temperature=0, logit_bias={17: -100.0})] * 5
    prompts = [[1, 2, index] for index in range(5)]

    def run(broken):
        engine = assemble(place, models, recipe, 3, policy="fixed", num_speculative_tokens=3)
        if broken:
            with torch.no_grad():
                model = engine._verifier._model._model
                model.get_input_embeddings().weight[17] = math.nan
            return generate(engine, [*prompts, [1, 17, 2]], [*params, params[0]])
        return generate(engine, prompts, params)

    *others, failed = run(True)
    assert isinstance(failed.error, NumericalError)
    assert [o.token_ids for o in others] == [o.token_ids for o in run(False)]


def filled_cache(device, dtype, shape, rows=4, capacity=40):
    cache = KVCache([shape], rows, capacity, dtype, device)
    for each in cache.token_slots(0):
        each.copy_(torch.randn(each.shape, device=device))
    return cache


def ragged(cache, segments, kind):
    """The attention of segments ``(row, start, count)`` as either kind."""
    device, capacity = cache.device, cache.capacity
    if kind is not TokenwiseAttention:
        ends = torch.tensor([0, *(s[2] for s in segments)]).cumsum(0)
        first = torch.tensor([*(s[0] * capacity for s in segments), 0])
        keys = torch.tensor([s[1] + s[2] for s in segments])
        numbers = (each.int().to(device) for each in (ends, first, keys))
        return kind(*numbers, max(s[2] for s in segments), capacity)
    tokens = [(row * capacity, start + i + 1) for row, start, n in segments for i in range(n)]
    first, keys = torch.tensor(tokens).T.to(device)
    return TokenwiseAttention(first, keys, capacity)


def by_hand(cache, segments, q):
    """The same, request by request and token by token, in float32."""
    keys, values = (each.float() for each in cache.token_slots(0))
    out = []
    for row, start, count in segments:
        for index in range(count):
            slots = slice(row * cache.capacity, row * cache.capacity + start + index + 1)
            repeat = q.shape[1] // keys.shape[1]
            k = keys[slots].repeat_interleave(repeat, 1).transpose(0, 1)
            v = values[slots].repeat_interleave(repeat, 1).transpose(0, 1)
            one = q[len(out)].float().unsqueeze(1)
            out.append(F.scaled_dot_product_attention(one, k, v).squeeze(1))
    return torch.stack(out)


CASES = {
    "one each": [(0, 3, 1), (2, 0, 1), (3, 39, 1)],
    "several": [(0, 3, 5), (1, 0, 17), (3, 36, 4)],
    "one and several": [(1, 30, 1), (2, 0, 9), (3, 0, 1)],
}


@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_tokenwise_attention(device, segments):
    cache = filled_cache(torch.device(device), torch.float32, LayerShape(2, 16, 16))
    q = torch.randn(sum(s[2] for s in segments), 6, 16, device=device)
    out = ragged(cache, segments, TokenwiseAttention).attend(cache, 0, q, None)
    torch.testing.assert_close(out, by_hand(cache, segments, q), rtol=1e-4, atol=1e-4)


@NEEDS_CUDA
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("kind", [FlashAttention, FusedAttention])
def test_kernels_for_attention(kind, segments, heads):
    shape = LayerShape(2, 64, 64)
    assert RaggedKernels.of(CUDA, torch.bfloat16, [shape]) == RaggedKernels(True, True)
    cache = filled_cache(CUDA, torch.bfloat16, shape)
    q = torch.randn(sum(s[2] for s in segments), heads, 64, device=CUDA, dtype=torch.bfloat16)
    out = ragged(cache, segments, kind).attend(cache, 0, q, None)
    torch.testing.assert_close(out.float(), by_hand(cache, segments, q), rtol=3e-2, atol=3e-2)


# Many requests fill the device by themselves; the keys of a few are split.
@NEEDS_CUDA
@pytest.mark.parametrize(("rows", "capacity"), [(1, 2000), (3, 700), (40, 300)])
@pytest.mark.parametrize("size", [4, 10, 64, 128])
def test_the_own_kernel_in_float32(rows, capacity, size):
    cache = filled_cache(CUDA, torch.float32, LayerShape(2, size, size), rows, capacity)
    segments = [(row, (row * 97) % (capacity - 20), 1 + (row * 5) % 20) for row in range(rows)]
    segments[0] = (0, capacity - 7, 7)
    q = torch.randn(sum(s[2] for s in segments), 6, size, device=CUDA)
    out = ragged(cache, segments, FusedAttention).attend(cache, 0, q, 0.3)
    expected = by_hand(cache, segments, q * (0.3 * size**0.5))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels(dtype):
    from draftwise.models.kernels import add_norm, gated, rotate_and_store

    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    numbers = {"device": CUDA, "dtype": dtype}
    for size in (16, 100, 3840):
        hidden, delta = torch.randn(2, 3, size, **numbers)
        weight = torch.randn(size, **numbers)
        total, normed = add_norm(hidden, delta, weight, 1e-5)
        torch.testing.assert_close(total, hidden + delta, **near)
        torch.testing.assert_close(normed, F.rms_norm(total, (size,), weight, 1e-5), **near)
        same, normed = add_norm(hidden, None, weight, 1e-5)
        assert same is hidden
        torch.testing.assert_close(normed, F.rms_norm(hidden, (size,), weight, 1e-5), **near)
        both = torch.randn(3, 2 * size, **numbers)
        expected = F.silu(both[:, :size]) * both[:, size:]
        torch.testing.assert_close(gated(both), expected, **near)
    for heads, kv_heads, size in ((4, 2, 4), (3, 1, 10), (6, 2, 64)):
        qkv = torch.randn(5, (heads + 2 * kv_heads) * size, **numbers)
        angle = torch.randn(5, size // 2, **numbers).repeat(1, 2)
        cosine, sine = angle.cos(), angle.sin()
        keys, values = torch.zeros(2, 20, kv_heads, size, **numbers)
        slots = torch.tensor([3, 7, 1, 0, 19], device=CUDA)
        queries = rotate_and_store(qkv, cosine, sine, slots, keys, values, heads)
        x, half = qkv.view(5, -1, size), size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        rotated = x * cosine.unsqueeze(1) + turned * sine.unsqueeze(1)
        torch.testing.assert_close(queries, rotated[:, :heads], **near)
        torch.testing.assert_close(keys[slots], rotated[:, heads : heads + kv_heads], **near)
        assert torch.equal(values[slots], x[:, heads + kv_heads :])


@NEEDS_CUDA
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@torch.inference_mode()
def test_the_host_is_not_waited_for_while_steps_are_queued(models):
    """Recorded steps of a target and of a draft, once their memory is there."""
    recipe = Recipe(vocab=VOCAB, seed=3)
    model = load_model(models.folder(recipe), "target", torch.float32, CUDA).model
    assert model.step_mode is StepMode.GRAPHS
    cache = model.new_cache(4, 48)
    segments = [Segment(0, 5, 1), Segment(2, 0, 1)]
    for _ in range(3):
        model.forward(cache, [1, 2], segments, range(2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forward(cache, [1, 2], segments, range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
