"""Speculator and companion for vLLM's V2 model runner."""
