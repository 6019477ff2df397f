"""Honest measurement: the same prompts, interleaved runs, ratios."""
