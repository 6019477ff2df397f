"""Draftwise's policies inside vLLM: they control draft lengths and what is verified.

A worker class replaces vLLM's proposer for ``draft_model`` by a subclass that calls a policy. vLLM
itself is not modified. ``draftwise vllm-serve`` prints and runs the command. See ``docs/vllm.md``.
"""
