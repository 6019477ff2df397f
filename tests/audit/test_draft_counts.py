"""Counts of drafted tokens are read from the metrics of vLLM, Draftwise and llama.cpp."""

from draftwise.audit.draft_counts import DraftCounts

# As vLLM 0.32 writes them, with two engines.
VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7567367989e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 11.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="1"} 1.7567e+09
"""
OURS = """\
vllm:spec_decode_num_draft_tokens_total 7.0
vllm:spec_decode_num_accepted_tokens_total 3.0
vllm:spec_decode_num_drafts_total 5.0
draftwise:verified_tokens_total 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1.0
draftwise:verified_tokens_per_pos_total{position="0"} 5.0
draftwise:verified_tokens_per_pos_total{position="1"} 2.0
draftwise:verified_tokens_per_pos_total{position="2"} 0.0
"""
# As llama.cpp's server writes them with --metrics.
LLAMA_CPP = """\
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 9
llamacpp:spec_decode_num_accepted_tokens_total 4
llamacpp:spec_decode_num_drafts_total 3
llamacpp:n_busy_slots_per_decode 1.04167
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
"""


def test_llama_cpps_counts():
    assert DraftCounts.read(LLAMA_CPP) == DraftCounts(3, 9, 4, {0: 2, 1: 2}, {})


def test_vllms_counts():
    counts = DraftCounts.read(VLLM)
    assert counts == DraftCounts(10, 30, 11, {0: 7, 1: 4}, {})
    assert counts.acceptance_by_position() == {0: 0.7, 1: 0.4}


def test_ours():
    counts = DraftCounts.read(OURS)
    assert counts == DraftCounts(5, 7, 3, {0: 2, 1: 1}, {0: 5, 1: 2, 2: 0})
    # Of those that were verified at a position, as drafts differ in length.
    assert counts.acceptance_by_position() == {0: 0.4, 1: 0.5}


def test_counts_of_a_time_and_of_several():
    earlier = DraftCounts(2, 3, 1, {0: 1}, {0: 2, 1: 1})
    later = DraftCounts.read(OURS).since(earlier)
    assert later == DraftCounts(3, 4, 2, {0: 1, 1: 1}, {0: 3, 1: 1, 2: 0})
    assert (later + earlier) == DraftCounts.read(OURS)


def test_metrics_without_drafts():
    assert DraftCounts.read("") is None
    assert DraftCounts.read("vllm:num_requests_running 1.0\n") is None
