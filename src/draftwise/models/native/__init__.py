"""What is computed by our own C++ on the CPU, and what it is called with.

The sources lie in ``source``; :mod:`draftwise.models.native.library` compiles them at first use.
"""
