"""Attention by the native kernel. One plan serves all layers of a forward pass."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.kernels.native.library import NativeLibrary, native_library
from draftwise.kernels.native.structures import AttentionCall
from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache

_DTYPES = (torch.bfloat16, torch.float32)
# Minimum number of products of a query and a key for more than one thread. Below it, waking the
# threads takes longer than the time that they save.
_MIN_SHARED_WORK = 2048
# Minimum number of tasks per thread: enough for threads that claim tasks one by one to finish
# together.
_MIN_TASKS_PER_THREAD = 8


class NativeAttention:
    """The segments of one forward pass that the kernel computes."""

    def __init__(
        self,
        library: NativeLibrary,
        cache: KVCache,
        segments: list[tuple[int, int, int, int]],
        tree: NDArray[np.void] | None = None,
    ) -> None:
        """Plan the kernel's calls.

        Segments with the most work come first, so that threads that claim tasks one by one finish
        together.

        Args:
            library: the compiled kernels.
            cache: the model's cache.
            segments: cache slot, start, number of tokens and index of the first packed token of
                each segment.
            tree: ``[tokens]`` of ``TREE_TOKEN``, all packed tokens of the pass; ``None`` if no
                segment is part of a token tree.

        Raises:
            ValueError: a token is outside the cache.
        """
        for cache_slot, start, count, _ in segments:
            if not (
                0 <= cache_slot < cache.num_cache_slots
                and 0 <= start < start + count <= cache.capacity
            ):
                raise ValueError(
                    f"tokens {start} to {start + count} of cache slot {cache_slot} have no place"
                )
        segments = sorted(segments, key=lambda s: (s[1] + s[2]) * s[2], reverse=True)
        self._library = library
        self._cache = cache
        self._segments = torch.tensor(segments, dtype=torch.int64)
        self._largest = max(count for _, _, count, _ in segments)
        self._end = max(first + count for _, _, count, first in segments)
        self._work = sum((start + count) * count for _, start, count, _ in segments)
        self._num_threads = torch.get_num_threads()
        self._scratch = torch.empty(0)
        self._tree = tree

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores, writes: bool
    ) -> Tensor:
        """Compute causal attention of one layer.

        Args:
            layer: layer index.
            q: ``[tokens, heads, key_size]``.
            k: ``[tokens, kv_heads, key_size]``.
            v: ``[tokens, kv_heads, value_size]``.
            scores: how scores are computed.
            writes: whether the kernel stores the new keys and values in the cache. If false, the
                cache already contains them.

        Returns:
            ``[tokens, heads, value_size]``, contiguous. Only the tokens of the segments are
            written.

        Raises:
            ValueError: shapes or types differ from those of the cache.
        """
        keys, values = self._cache.token_slots(layer)
        shape = self._cache.layers[layer]
        kv_heads, key_size, value_size = shape.num_heads, shape.key_size, shape.value_size
        heads = q.shape[1]
        fits = (
            q.dtype == k.dtype == v.dtype == keys.dtype
            and min(len(q), len(k), len(v)) >= self._end
            and k.shape[1:] == (kv_heads, key_size)
            and v.shape[1:] == (kv_heads, value_size)
            and q.shape[2] == key_size
            and heads % kv_heads == 0
        )
        if not fits:
            raise ValueError(f"layer {layer} computes other shapes or types than its cache holds")
        q, k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k, v))
        sinks = None if scores.sinks is None else scores.sinks.detach().float().contiguous()
        out = q.new_empty(len(q), heads, value_size)
        num_threads = self._num_threads if self._work * heads >= _MIN_SHARED_WORK else 1
        num_tasks = _MIN_TASKS_PER_THREAD * num_threads if num_threads > 1 else 1
        heads_per_task = max(1, kv_heads * len(self._segments) // num_tasks)
        heads_per_task = min(heads_per_task, kv_heads)
        size = self._library.attention_scratch(
            self._largest, heads, kv_heads, heads_per_task, key_size, value_size
        )
        if self._scratch.numel() < size * num_threads:
            self._scratch = torch.empty(size * num_threads)
        call = AttentionCall(
            q.data_ptr(),
            k.data_ptr() if writes else None,
            v.data_ptr() if writes else None,
            None if sinks is None else sinks.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            self._scratch.data_ptr(),
            self._segments.data_ptr(),
            None if self._tree is None else self._tree.ctypes.data,
            q.stride()[:2],
            k.stride()[:2],
            v.stride()[:2],
            len(self._segments),
            self._cache.sizes[layer],
            heads,
            kv_heads,
            key_size,
            value_size,
            heads_per_task,
            size,
            keys.dtype == torch.bfloat16,
            shape.window or 0,
            shape.chunk or 0,
            1 / math.sqrt(key_size) if scores.scaling is None else scores.scaling,
            scores.softcap or 0.0,
        )
        threads = self._library.threads(num_threads)
        self._library.attention(ctypes.byref(call), ctypes.byref(threads))
        return out


def native_attention(
    cache: KVCache,
    segments: Sequence[tuple[int, int, int]],
    largest: int,
    dtype: torch.dtype,
    device: torch.device,
    tree: NDArray[np.void] | None = None,
) -> NativeAttention | None:
    """Plan the kernel's calls for the segments of up to ``largest`` tokens.

    Args:
        cache: the model's cache.
        segments: cache slot, start and number of tokens of each request, in the order of the
            packed tokens.
        largest: maximum number of tokens of a segment that the kernel computes.
        dtype: dtype of the model.
        device: device of the model.
        tree: see :class:`NativeAttention`.

    Returns:
        The plan; ``None`` if no kernel is available or no segment is small enough.
    """
    if device.type != "cpu" or dtype not in _DTYPES:
        return None
    library = native_library()
    if library is None:
        return None
    first_tokens = accumulate((count for _, _, count in segments), initial=0)
    covered = [
        (cache_slot, start, count, first)
        for (cache_slot, start, count), first in zip(segments, first_tokens, strict=False)
        if 0 < count <= largest
    ]
    return NativeAttention(library, cache, covered, tree) if covered else None
