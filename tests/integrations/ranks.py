"""A clock, and the ranks of one model, imitated one after another in one process."""

from draftwise.policies.base import Policy


class Clock:
    """Advances by a millisecond whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


class Leader:
    """Records the decisions of the first rank.

    Attributes:
        decisions: what the other ranks receive.
    """

    leads = True

    def __init__(self):
        self.decisions = []

    def __call__(self, decide):
        self.decisions.append(decide())
        return self.decisions[-1]


class Follower:
    """Receives the decisions of the first rank in their order."""

    leads = False

    def __init__(self, decisions):
        self.received = iter(decisions)

    def __call__(self, decide):
        return next(self.received)


class Unasked(Policy):
    """The policy of a rank that follows, which must not be used."""

    name = "unasked"
    summary = source = "of this test"

    def plan_drafts(self, requests):
        raise AssertionError("asked for draft lengths")

    def __getattribute__(self, name):
        used = {"num_speculative_tokens", "plan_drafts"}
        if not name.startswith("__") and name not in used:
            raise AssertionError(f"the policy of a rank that follows is used: {name}")
        return super().__getattribute__(name)
