"""A fair lock for threads that use engines with shared models."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock, get_ident

# A waiting thread is woken by the thread before it. It also checks periodically, because an
# exception such as KeyboardInterrupt can end another thread's turn at any instruction.
_LOOK_SECONDS = 1.0


class _Waiter:
    """A thread that waits for its turn.

    Attributes:
        thread: its identifier.
        steps: the engine that it wants to step; ``None`` for a short task.
        is_ready: whether it can proceed without a step.
        alarm: a lock that is held until its turn comes.
    """

    __slots__ = ("alarm", "is_ready", "steps", "thread")

    def __init__(self, steps: object | None, is_ready: Callable[[], bool]) -> None:
        self.thread = get_ident()
        self.steps, self.is_ready = steps, is_ready
        self.alarm = Lock()
        self.alarm.acquire()


class Turns:
    """A re-entrant lock that threads get in the order of their requests.

    One step of an engine advances the requests of all threads. So one thread can keep stepping for
    all while the others wait, which keeps the work on one team of cores. Between its steps it calls
    :meth:`pass_on`. That call lets threads go first that can proceed without a step or that step
    another engine. A thread waits for at most one step of each engine.

    Finalisers may run at any instruction, also during a step or inside this lock. They must not
    wait for a turn. They schedule their work with :meth:`do_soon`.
    """

    def __init__(self) -> None:
        """Create a lock that no thread holds."""
        self._mutex = Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[_Waiter] = deque()
        self._soon: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Wait for a turn for a short task."""
        self.acquire()

    def __exit__(self, *_: object) -> None:
        """See :meth:`release`."""
        self.release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._owner == get_ident()

    @property
    def depth(self) -> int:
        """How often the calling thread has acquired the turn without releasing it."""
        return self._depth if self.is_mine else 0

    def acquire(
        self, steps: object | None = None, is_ready: Callable[[], bool] | None = None
    ) -> None:
        """Wait for a turn. A thread that already has it does not wait.

        Args:
            steps: the engine that the thread will step; ``None`` for a short task.
            is_ready: whether the thread can proceed without a step. It is called between steps of
                other threads. ``None`` if the thread always can.
        """
        if self.is_mine:
            self._depth += 1
            return
        waiter = _Waiter(steps, is_ready or _always)
        try:
            with self._mutex:
                if self._owner is None:
                    self._owner, self._depth = waiter.thread, 1
                    return
                self._waiting.append(waiter)
            self._wait(waiter)
        except BaseException:
            self._leave(waiter)
            raise

    def release(self) -> None:
        """End the turn. Does nothing if an exception has ended it already."""
        if not self.is_mine:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            self._work_off()
        finally:
            with self._mutex:
                self._hand_over()
        self._try_to_work_off()

    def unwind(self, depth: int) -> None:
        """Return to an earlier depth after an exception at any instruction.

        Args:
            depth: the earlier value of :attr:`depth`.
        """
        if self.depth > depth:
            self._depth = depth + 1
            self.release()

    def pass_on(self, steps: object, is_ready: Callable[[], bool]) -> None:
        """Between two steps, let threads go first that can proceed without a step.

        Args:
            steps: the engine that the calling thread will step next.
            is_ready: as in :meth:`acquire`.
        """
        if self._depth > 1:
            return
        self._work_off()
        if not self._waiting:
            return
        me = _Waiter(steps, is_ready)
        try:
            with self._mutex:
                chosen = next((w for w in self._waiting if _goes_first(w, steps)), None)
                if chosen is None:
                    return
                # Queue after threads that step another engine and before those that step the same
                # one.
                if chosen.steps is None or chosen.steps is steps:
                    self._waiting.appendleft(me)
                else:
                    self._waiting.append(me)
                self._give(chosen)
            self._wait(me)
        except BaseException:
            self._leave(me)
            raise

    def do_soon(self, work: Callable[[], None]) -> None:
        """Schedule work for a turn without waiting for the turn.

        The work runs at once if no thread has the turn. Otherwise the thread that has it runs the
        work before its next step or at the end of its turn.
        """
        self._soon.append(work)
        self._try_to_work_off()

    def _try_to_work_off(self) -> None:
        while self._soon and self._try_acquire():
            self.release()

    def _work_off(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def _try_acquire(self) -> bool:
        # The calling thread itself may hold the mutex, if this is a finaliser.
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner, self._depth = get_ident(), 1
            return True
        finally:
            self._mutex.release()

    def _wait(self, waiter: _Waiter) -> None:
        while self._owner != waiter.thread:
            if not waiter.alarm.acquire(timeout=_LOOK_SECONDS):
                with self._mutex:
                    if self._owner is None:
                        self._give(waiter)

    def _leave(self, waiter: _Waiter) -> None:
        """Stop waiting. If the turn has come meanwhile, pass it to the next thread."""
        with self._mutex:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif self._owner == waiter.thread:
                self._hand_over()

    def _hand_over(self) -> None:
        """Give the turn to the next thread. The caller holds the mutex."""
        self._owner, self._depth = None, 0
        if self._waiting:
            ready = (waiter for waiter in self._waiting if waiter.is_ready())
            self._give(next(ready, self._waiting[0]))

    def _give(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        self._owner, self._depth = waiter.thread, 1
        waiter.alarm.release()


def _goes_first(waiter: _Waiter, steps: object) -> bool:
    return waiter.steps not in (None, steps) or waiter.is_ready()


def _always() -> bool:
    return True
