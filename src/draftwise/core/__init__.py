"""Pure mathematics on tensors: probabilities, the acceptance law, random numbers.

Imports torch and numpy and nothing else of Draftwise, so that any engine can use it.
"""
