"""For vLLM's V2 model runner."""
