"""For vLLM's V1 model runner."""
