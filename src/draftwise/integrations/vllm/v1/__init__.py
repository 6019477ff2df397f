"""Draft proposer and companion for vLLM's V1 model runner."""
