"""Which architectures of the installed ``transformers`` load, and whether they compute the same."""
