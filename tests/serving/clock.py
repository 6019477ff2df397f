"""A fake clock."""


class Clock:
    """Replacement of the module `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now
