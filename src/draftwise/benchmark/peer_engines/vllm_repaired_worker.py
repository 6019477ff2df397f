"""Extension of vLLM's worker that repairs vLLM in the worker's process; see ``vllm_repair``."""

from __future__ import annotations

from .vllm_repair import repair


class Repaired:
    """Has no methods; vLLM imports this module to find it."""


# vLLM imports the extension in every worker process, and has no hook that it calls there.
repair()
