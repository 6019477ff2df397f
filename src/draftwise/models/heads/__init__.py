"""Drafting heads: small models that read hidden states of the target.

This package reads a head's folder. It knows two layouts, which users never have to tell apart: the
one of EAGLE's authors (SafeAILab) and the one of ``speculators``.
"""

from draftwise.models.heads.config import HeadConfig, HeadLayout, is_head_config, parse_head_config
from draftwise.models.heads.files import find_head, read_head
from draftwise.models.heads.origin import public_name
from draftwise.models.heads.weights import HeadWeights, check_head_weights

__all__ = [
    "HeadConfig",
    "HeadLayout",
    "HeadWeights",
    "check_head_weights",
    "find_head",
    "is_head_config",
    "parse_head_config",
    "public_name",
    "read_head",
]
