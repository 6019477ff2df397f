"""Draftwise's policies inside vLLM: drafts end, and are verified, where it pays.

A worker class of ours puts a proposer of ours in the place of vLLM's for ``draft_model``; nothing
of vLLM is changed. ``draftwise vllm-serve`` prints and runs the command. See ``docs/vllm.md``.
"""
