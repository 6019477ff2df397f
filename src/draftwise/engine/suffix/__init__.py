"""Continuations of texts after earlier occurrences of their last tokens.

``search`` defines the search, ``matcher`` keeps the texts of a batch, and ``corpus`` stores other
texts that may be continued.
"""
