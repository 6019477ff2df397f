"""Requests with offers, and the costs of a machine on which few tokens more are cheap."""

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.policies import RequestState

TARGET = StageCost((1, 8, 16, 64), (0.010, 0.012, 0.020, 0.080))


def latency(draft=0.001):
    return LatencyModel(TARGET, StageCost((1, 64), (draft, 2 * draft)))


def offering(*offers, **values):
    return [RequestState(50, 5, 8, row, offer=offer, **values) for row, offer in enumerate(offers)]
