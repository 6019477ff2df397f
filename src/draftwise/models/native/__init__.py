"""What is computed by our own C++ on the CPU, and what it is called with.

The sources lie in ``source``. :mod:`draftwise.models.native.compilation` compiles them at first
use, :mod:`draftwise.models.native.library` loads the result, and the structures that both languages
share stand in :mod:`draftwise.models.native.structures`.
"""
