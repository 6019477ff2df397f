import pytest
import torch

from draftwise.errors import CacheExhaustedError
from draftwise.models.blocked_linear import BlockedLinear, block_linear_layers, can_block
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape

from ..tiny_models import Recipe

CPU = torch.device("cpu")
LAYERS = [LayerShape(2, 4, 6), LayerShape(1, 8, 8)]


def new_cache(num_cache_slots=3, capacity=5, dtype=torch.float32):
    return KVCache(LAYERS, num_cache_slots, capacity, dtype, CPU)


def numbers(count, shape, start=1.0):
    """Keys and values ``[count, heads, size]`` with distinct elements."""
    keys = torch.arange(count * shape.num_heads * shape.key_size).float() + start
    values = -torch.arange(count * shape.num_heads * shape.value_size).float() - start
    return (
        keys.view(count, shape.num_heads, shape.key_size),
        values.view(count, shape.num_heads, shape.value_size),
    )


def test_bytes_per_token():
    for dtype in [torch.float32, torch.bfloat16]:
        cache = new_cache(dtype=dtype)
        assert cache.bytes_per_token == dtype.itemsize * (2 * (4 + 6) + 1 * (8 + 8))


def test_written_values_are_read_back():
    for layer in [0, 1]:
        cache = new_cache()
        keys, values = numbers(3, LAYERS[layer])
        token_slots = torch.tensor([1 * 5 + 0, 1 * 5 + 1, 2 * 5 + 0])
        cache.write(layer, token_slots, keys, values)
        read_keys, read_values = cache.read(layer, 1, 3, 2)
        assert torch.equal(read_keys[0].transpose(0, 1), keys[:2]), layer
        assert torch.equal(read_values[0].transpose(0, 1), values[:2]), layer
        assert torch.equal(read_keys[1, :, 0], keys[2]), layer
        assert not read_keys[1, :, 1].any(), layer


def test_writing_does_not_change_other_cache_slots():
    cache = new_cache()
    keys, values = numbers(5, LAYERS[0])
    cache.write(0, torch.arange(5, 10), keys, values)
    for slot in (0, 2):
        assert not any(part.any() for part in cache.read(0, slot, slot + 1, 5))


def test_truncating_changes_the_length():
    cache = new_cache()
    cache.advance(1, 4)
    cache.truncate(1, 6)
    assert cache.lengths == [0, 4, 0]
    cache.truncate(1, 2)
    assert cache.lengths == [0, 2, 0]


def test_clearing_also_zeroes_rolled_back_tokens():
    cache = new_cache()
    for layer, shape in enumerate(LAYERS):
        keys, values = numbers(15, shape)
        cache.write(layer, torch.arange(15), keys, values)
    for slot in range(3):
        cache.advance(slot, 5)
    cache.truncate(1, 2)
    cache.advance(1, 3)
    cache.clear(1)
    assert cache.lengths == [5, 0, 5]
    for layer in range(2):
        assert not any(part.any() for part in cache.read(layer, 1, 2, 5))
        for slot in (0, 2):
            assert all(part.all() for part in cache.read(layer, slot, slot + 1, 5))


def test_a_cache_larger_than_memory_is_refused():
    with pytest.raises(CacheExhaustedError) as caught:
        new_cache(capacity=10**15)
    assert caught.value.field == "max_model_len"
    assert "lower max_model_len or max_batch_size" in caught.value.message


@pytest.mark.skipif(not can_block(torch.float32, CPU), reason="this PyTorch packs no weights")
class TestPackedWeights:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("tokens", [1, 7, 40])
    def test_equals_the_plain_layer(self, dtype, bias, tokens):
        if not can_block(dtype, CPU):
            pytest.skip("this processor multiplies float32 only")
        torch.manual_seed(0)
        plain = torch.nn.Linear(24, 10, bias=bias, dtype=dtype)
        packed = BlockedLinear(plain.weight, plain.bias)
        inputs = torch.randn(1, tokens, 24, dtype=dtype)
        with torch.inference_mode():
            torch.testing.assert_close(packed(inputs), plain(inputs))

    @pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
    def test_every_linear_layer_of_a_model_is_packed(self, family):
        model = Recipe(family).build()
        ids = torch.tensor([[1, 2, 3, 4]])
        with torch.inference_mode():
            expected = model(input_ids=ids).logits
            count = block_linear_layers(model)
            assert count == sum(isinstance(m, BlockedLinear) for m in model.modules())
            assert count > 4
            assert not any(type(m) is torch.nn.Linear for m in model.modules())
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
