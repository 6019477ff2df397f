"""Benchmarks: all contenders on the same prompts, in interleaved runs, compared by ratios."""
