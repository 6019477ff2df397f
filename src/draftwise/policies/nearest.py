"""What is known at one batch size as the beginning of another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

Record = TypeVar("Record")


def batch_bucket(num_requests: int) -> int:
    """Batch sizes that share a record: two groups per doubling."""
    return round(2 * math.log2(num_requests))


def nearest(keys: Iterable[int], key: int) -> int | None:
    """The nearest of some keys of batch sizes, the first of equally near ones; ``None`` if none."""
    return min(keys, key=lambda other: abs(other - key), default=None)


def record_of(
    records: dict[int, Record],
    num_requests: int,
    is_known: Callable[[Record], bool],
    begin: Callable[[Record | None], Record],
) -> Record:
    """The record of a batch size. A new one is added, and begins with the nearest known one.

    Args:
        records: the records by :func:`batch_bucket`.
        num_requests: the batch size.
        is_known: whether another record may be the beginning.
        begin: makes a record from the nearest known one, or from ``None``.
    """
    key = batch_bucket(num_requests)
    if key not in records:
        known = nearest((other for other, record in records.items() if is_known(record)), key)
        records[key] = begin(None if known is None else records[known])
    return records[key]
