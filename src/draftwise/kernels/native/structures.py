"""Structures that Python and the C++ kernels share.

Each structure is also declared in ``source``, with the same name and the same fields in the same
order. :mod:`draftwise.kernels.native.library` compares the sizes of the two declarations when it
loads the kernels.
"""

from __future__ import annotations

import ctypes

import numpy as np


class Threads(ctypes.Structure):
    """``Threads`` of ``threads.h``."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("team_size", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class Sampling(ctypes.Structure):
    """``Sampling`` of ``sampling.h``."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("temperature", "top_k", "top_p", "min_p"))


class Penalties(ctypes.Structure):
    """``Penalties`` of ``penalties.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias_tokens", "bias_values", "repetition")),
        *((name, ctypes.c_void_p) for name in ("presence", "frequency")),
        *((name, ctypes.c_void_p) for name in ("tokens", "counts", "num_tokens")),
        *((name, ctypes.c_int64) for name in ("num_biases", "capacity")),
    )


class Softmax(ctypes.Structure):
    """``Softmax`` of ``sampling.h``."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("top", "scale", "factor", "least", "lowest")),
        ("last_least", ctypes.c_int32),
        ("token", ctypes.c_int64),
    )


class GreedyCall(ctypes.Structure):
    """``GreedyCall`` of ``sampling.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "tokens", "is_nan")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab")),
    )


class SuffixCorpus(ctypes.Structure):
    """``SuffixCorpus`` of ``suffix.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "lengths", "namespaces")),
        *((name, ctypes.c_void_p) for name in ("short_index", "long_index")),
        ("num_buckets", ctypes.c_int64),
    )


class ContinuationCall(ctypes.Structure):
    """``ContinuationCall`` of ``suffix.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("texts", "ends", "namespaces", "greedy")),
        *((name, ctypes.c_void_p) for name in ("slots", "limits", "corpus", "sums")),
        *((name, ctypes.c_void_p) for name in ("tokens", "votes", "shares", "acceptance")),
        *((name, ctypes.c_void_p) for name in ("lengths", "match_lengths", "chunks")),
        *((name, ctypes.c_int64) for name in ("num_requests", "stride", "width")),
    )
    # Objects that must exist as long as the structure.
    keep_alive: object


class MatchSums(ctypes.Structure):
    """``MatchSums`` of ``matches.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("length_accepted", "length_expected")),
        *((name, ctypes.c_void_p) for name in ("group_accepted", "group_expected")),
    )


class DistributionCall(ctypes.Structure):
    """``DistributionCall`` of ``sampling.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "requests", "p", "scratch")),
        ("sampling", Sampling),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab", "softens_greedy")),
    )


class ScoreCall(ctypes.Structure):
    """``ScoreCall`` of ``sampling.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "places", "tokens", "q", "c", "overlap")),
        *((name, ctypes.c_void_p) for name in ("agreement", "scratch")),
        ("sampling", Sampling),
        *((name, ctypes.c_int64) for name in ("num_rows", "own_vocab", "vocab", "width")),
        ("q_stride", ctypes.c_int64),
    )


class TreeAcceptanceCall(ctypes.Structure):
    """``TreeAcceptanceCall`` of ``trees.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "first_rows", "lengths", "tokens")),
        *((name, ctypes.c_void_p) for name in ("parents", "final_uniforms")),
        *((name, ctypes.c_void_p) for name in ("following_uniforms", "scratch", "nodes")),
        *((name, ctypes.c_void_p) for name in ("num_accepted", "next_tokens", "is_nan")),
        ("sampling", Sampling),
        *((name, ctypes.c_int64) for name in ("num_trees", "vocab", "width", "uniforms_width")),
    )


class NodeCall(ctypes.Structure):
    """``NodeCall`` of ``trees.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "requests", "tokens", "probs")),
        *((name, ctypes.c_void_p) for name in ("entropy", "scratch")),
        ("sampling", Sampling),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab", "width")),
    )


class AcceptanceCall(ctypes.Structure):
    """``AcceptanceCall`` of ``acceptance.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "first_rows", "lengths", "tokens")),
        *((name, ctypes.c_void_p) for name in ("proposals", "accept_uniforms", "final_uniforms")),
        *((name, ctypes.c_void_p) for name in ("lenience", "owners", "rows", "scratch")),
        *(
            (name, ctypes.c_void_p)
            for name in ("num_accepted", "next_tokens", "acceptance", "prefix_acceptance_prob")
        ),
        ("is_nan", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("following_uniforms", "drawn", "one_hot")),
        ("sampling", Sampling),
        *((name, ctypes.c_int64) for name in ("num_requests", "num_rows", "vocab", "width")),
        *((name, ctypes.c_int64) for name in ("token_stride", "proposal_stride")),
        *((name, ctypes.c_int64) for name in ("uniforms_width", "following_width", "by_block")),
    )


class AttentionCall(ctypes.Structure):
    """``AttentionCall`` of ``attention.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "new_keys", "new_values")),
        *((name, ctypes.c_void_p) for name in ("sinks", "keys", "values", "out", "scratch")),
        *((name, ctypes.c_void_p) for name in ("segments", "tree")),
        *((f"{name}_strides", ctypes.c_int64 * 2) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("num_segments", "capacity", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("key_size", "value_size", "heads_per_task")),
        *((name, ctypes.c_int64) for name in ("scratch_size", "is_bfloat16", "window", "chunk")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("sees_segment", "shares_window")),
    )


class DecoderLayer(ctypes.Structure):
    """``DecoderLayer`` of ``decoder.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("attention_out_norm", "mlp_out_norm")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("experts", "qkv_bias", "out_bias", "sinks")),
        ("recurrent", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("q_norm_size", "k_norm_size", "rotary")),
        *((name, ctypes.c_int64) for name in ("intermediate", "sees_segment", "shares_window")),
    )


class Experts(ctypes.Structure):
    """``Experts`` of ``experts.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("router", "correction", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("router_bias", "gate_bias", "up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("count", "chosen", "inner", "scoring")),
        *((name, ctypes.c_int64) for name in ("normalises", "has_shared_gate")),
        *((name, ctypes.c_double) for name in ("scale", "limit", "slope")),
    )


class StateInput(ctypes.Structure):
    """``StateInput`` of ``decoder.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("projection", "embedding_norm", "joint_norm")),
        *((name, ctypes.c_void_p) for name in ("norms", "state_norm")),
        *((name, ctypes.c_int64) for name in ("num_states", "size")),
        *((name, ctypes.c_int64) for name in ("norm_before_residual", "norm_output")),
        ("is_context", ctypes.c_int64),
    )


class DecoderModel(ctypes.Structure):
    """``DecoderModel`` of ``decoder.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "layers")),
        ("rotary_sizes", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_size", "vocab", "packs_experts")),
        *((name, ctypes.c_int64) for name in ("is_bfloat16", "bits", "activation", "has_gates")),
        *((name, ctypes.c_double) for name in ("epsilon", "scale", "softcap", "embedding_scale")),
        *((name, ctypes.c_double) for name in ("residual_scale", "logit_scale", "logit_softcap")),
        *((name, ctypes.c_void_p) for name in ("state_input", "output_ids", "projector")),
        *((name, ctypes.c_void_p) for name in ("adapter_norm", "adapter_down", "adapter_up")),
        ("adapter_rank", ctypes.c_int64),
        ("embedding_kind", ctypes.c_void_p),
        ("embedding_row_bytes", ctypes.c_int64),
    )


class DecoderCache(ctypes.Structure):
    """``DecoderCache`` of ``decoder.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "capacities", "windows")),
        *((name, ctypes.c_void_p) for name in ("chunks", "cosines", "sines", "recurrent", "rows")),
    )


class DecoderCall(ctypes.Structure):
    """``DecoderCall`` of ``decoder.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("model", "cache", "threads", "ids", "segments")),
        *((name, ctypes.c_void_p) for name in ("logit_tokens", "logits", "memory")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_segments", "num_logits")),
        ("largest_segment", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tapped_layers", "tapped")),
        ("num_tapped", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("states", "carried", "carried_rows", "entering")),
        ("tree", ctypes.c_void_p),
    )
    # Objects that must exist until the kernel has run.
    keep_alive: object


class DraftCall(ctypes.Structure):
    """``DraftCall`` of ``drafting.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "next", "next_ids", "next_segments")),
        *((name, ctypes.c_void_p) for name in ("requests", "limits", "lengths")),
        *((name, ctypes.c_void_p) for name in ("uniforms", "tokens", "probs")),
        *((name, ctypes.c_void_p) for name in ("draft_probs", "entropy", "token_probs", "is_nan")),
        ("scratch", ctypes.c_void_p),
        ("sampling", Sampling),
        ("penalties", Penalties),
        *((name, ctypes.c_int64) for name in ("num_rows", "position", "num_positions", "width")),
        *((name, ctypes.c_int64) for name in ("uniforms_width", "vocab", "carried_stride")),
        ("drawing_s", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("block_logits", "block_rows")),
    )


class PackCall(ctypes.Structure):
    """``PackCall`` of ``blocks.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "order", "blocks", "kind", "to")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "num_rows", "depth", "tile_stride")),
    )


class PackIntegersCall(ctypes.Structure):
    """``PackIntegersCall`` of ``blocks.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "scales", "minimums", "kind", "to")),
        *((name, ctypes.c_int64) for name in ("num_rows", "depth", "group", "tile_stride")),
        ("smallest", ctypes.c_int64),
    )


class ExpandCall(ctypes.Structure):
    """``ExpandCall`` of ``blocks.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "kind", "to")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "num_rows", "depth")),
    )


class ConvolutionCall(ctypes.Structure):
    """``ConvolutionCall`` of ``recurrence.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ring", "inputs", "weight", "bias", "out")),
        ("segments", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_segments", "width", "size", "channels")),
        ("is_bfloat16", ctypes.c_int64),
    )


class RecurrenceCall(ctypes.Structure):
    """``RecurrenceCall`` of ``recurrence.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("states", "decays", "keys", "updates", "bases")),
        *((name, ctypes.c_void_p) for name in ("segments", "decay", "key", "query", "value")),
        *((name, ctypes.c_void_p) for name in ("beta", "out")),
        *((name, ctypes.c_int64) for name in ("num_segments", "heads", "num_keys", "num_values")),
        *((name, ctypes.c_int64) for name in ("decay_size", "max_rows")),
    )


class RecurrentLayer(ctypes.Structure):
    """``RecurrentLayer`` of ``recurrent_layer.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("taps", "tap_bias", "step_bias", "rate", "skip")),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "width", "channels", "heads", "groups")),
        *((name, ctypes.c_int64) for name in ("keys", "values", "norm_size")),
        *((name, ctypes.c_double) for name in ("least_step", "most_step")),
    )


class RecurrentMemory(ctypes.Structure):
    """``RecurrentMemory`` of ``recurrent_layer.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("states", "decays", "keys", "updates", "bases")),
        ("ring", ctypes.c_void_p),
        ("ring_size", ctypes.c_int64),
    )


class RecurrentRows(ctypes.Structure):
    """``RecurrentRows`` of ``recurrent_layer.h``."""

    _fields_ = (
        ("final_lengths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("most", "kept")),
    )


# ``NarrowHeader`` of ``narrow.h``: the start of a weight that is stored in fewer bits.
NARROW_HEADER = np.dtype(
    [
        *((name, np.int64) for name in ("panels", "scales", "exceptions", "num_exceptions")),
        ("exponents", np.uint16, 32),
    ]
)
# ``PackedKind``, ``MAX_PACKED_SECTIONS``, ``PackedSection`` and ``PackedHeader`` of ``packed.h``.
MAX_PACKED_SECTIONS = 4
PACKED_KIND = np.dtype(
    [
        *((name, np.int64) for name in ("bits", "zero", "groups", "has_halves")),
        *((name, np.int64) for name in ("has_minimums", "form", "has_table")),
        ("unit", np.float64),
        ("table", np.uint8, 16),
    ]
)
# ``BlockKind`` of ``blocks.h``.
BLOCK_KIND = np.dtype([("packed", PACKED_KIND), ("type", np.int64), ("grid", np.uintp)])
PACKED_SECTION = np.dtype(
    [("first_unit", np.int64), ("offset", np.int64), ("kinds", PACKED_KIND, 2)]
)
PACKED_HEADER = np.dtype(
    [
        *((name, np.int64) for name in ("is_paired", "num_sections")),
        ("sections", PACKED_SECTION, MAX_PACKED_SECTIONS),
    ]
)
# ``RecurrenceSegment`` of ``recurrence.h``: cache slot, start, number of tokens, new base.
RECURRENCE_SEGMENT = np.dtype((np.int64, 4))
# ``Segment`` of ``attention.h``: cache slot, start, number of tokens, first packed token.
SEGMENT = np.dtype((np.int64, 4))
# ``TreeToken`` of ``attention.h``; ``ancestors`` is 0 for a token in no tree.
TREE_TOKEN = np.dtype([("root", np.int64), ("position", np.int64), ("ancestors", np.uint64)])

_CALLS = (
    *(AcceptanceCall, AttentionCall, ContinuationCall, ConvolutionCall, DecoderCache),
    DecoderCall,
    *(DecoderLayer, DecoderModel, DistributionCall, DraftCall, ExpandCall, Experts, GreedyCall),
    *(
        MatchSums,
        NodeCall,
        PackCall,
        PackIntegersCall,
        Penalties,
        RecurrenceCall,
        RecurrentLayer,
        RecurrentMemory,
        RecurrentRows,
        Sampling,
        ScoreCall,
        Softmax,
        StateInput,
        SuffixCorpus,
        Threads,
    ),
    TreeAcceptanceCall,
)


def structure_sizes() -> dict[str, int]:
    """Size in bytes of each structure in Python, by its name in C++."""
    return {
        **{each.__name__: ctypes.sizeof(each) for each in _CALLS},
        "NarrowHeader": NARROW_HEADER.itemsize,
        "PackedHeader": PACKED_HEADER.itemsize,
        "PackedKind": PACKED_KIND.itemsize,
        "BlockKind": BLOCK_KIND.itemsize,
        "PackedSection": PACKED_SECTION.itemsize,
        "RecurrenceSegment": RECURRENCE_SEGMENT.itemsize,
        "Segment": SEGMENT.itemsize,
        "TreeToken": TREE_TOKEN.itemsize,
    }
