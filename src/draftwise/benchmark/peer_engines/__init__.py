"""Other engines, as the worker process of a benchmark runs them.

These modules run in the environments of the other engines, so they do not import Draftwise. Each
has a function ``start``, which loads the models and returns a function that answers batches.
"""
