"""Pure mathematics on tensors: probabilities, the acceptance law, random numbers.

This package imports torch and numpy but no other package of Draftwise, so any engine can use it.
"""
