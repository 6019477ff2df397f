"""Formats of numbers that can be asked for by name."""

# Behind the name of a model: weights of so many bits.
QUANTIZATIONS = ("int8", "int4")
