"""The folder of a drafting head, a small model that reads hidden states of the target.

There are heads of EAGLE-1 and EAGLE-2, which share one format, and heads of EAGLE-3. Two layouts
are known, which users never have to tell apart: the one of EAGLE's authors (SafeAILab) and the one
of ``speculators``.
"""

from draftwise.checkpoints.heads.config import HeadConfig, HeadKind, HeadLayout
from draftwise.checkpoints.heads.files import find_head, read_head
from draftwise.checkpoints.heads.origin import public_name
from draftwise.checkpoints.heads.parsing import is_head_config, parse_head_config
from draftwise.checkpoints.heads.weights import HeadWeights, check_head_weights

__all__ = [
    "HeadConfig",
    "HeadKind",
    "HeadLayout",
    "HeadWeights",
    "check_head_weights",
    "find_head",
    "is_head_config",
    "parse_head_config",
    "public_name",
    "read_head",
]
