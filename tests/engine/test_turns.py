"""The lock around steps is first come, first served. Threads that need no step go first."""

import threading
import time

import pytest

from draftwise.engine.turns import Turns

SOON = 20.0  # a limit against hanging, not a measurement


def wait_until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Crowd:
    """Threads that take one turn each. They start in order while the turn is held."""

    def __init__(self, turns):
        self.turns, self.order, self.threads = turns, [], []

    def join_in(self, name, steps=None, is_ready=None):
        waiting = len(self.turns._waiting)

        def run():
            self.turns.acquire(steps, is_ready)
            self.order.append(name)
            self.turns.release()

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        wait_until(lambda: len(self.turns._waiting) == waiting + 1)

    def finish(self):
        for thread in self.threads:
            thread.join(SOON)
            assert not thread.is_alive()
        return self.order


def never():
    return False


def test_threads_get_the_turn_in_order_of_arrival():
    turns = Turns()
    crowd = Crowd(turns)
    turns.acquire()
    for name in "abcdef":
        crowd.join_in(name)
    turns.release()
    assert crowd.finish() == list("abcdef")


def test_threads_that_need_no_step_go_first():
    turns, engine = Turns(), object()
    crowd = Crowd(turns)
    turns.acquire()
    crowd.join_in("steps", engine, never)
    crowd.join_in("has news", engine, lambda: True)
    crowd.join_in("short")
    turns.release()
    assert crowd.finish() == ["has news", "short", "steps"]


def test_a_stepping_thread_keeps_the_turn_for_all():
    turns, engine = Turns(), object()
    crowd = Crowd(turns)
    turns.acquire(engine, never)
    crowd.join_in("steps", engine, never)
    crowd.join_in("short")
    turns.pass_on(engine, never)
    assert turns.is_mine
    assert crowd.order == ["short"]
    turns.pass_on(engine, never)
    assert crowd.order == ["short"]
    turns.release()
    assert crowd.finish() == ["short", "steps"]


def test_engines_alternate():
    turns, mine, other = Turns(), object(), object()
    crowd = Crowd(turns)
    turns.acquire(mine, never)
    crowd.join_in("same engine", mine, never)
    crowd.join_in("other engine", other, never)
    turns.pass_on(mine, never)  # the other engine goes first, then the thread that waits longest
    turns.release()
    assert crowd.finish() == ["other engine", "same engine"]


def test_the_lock_is_reentrant():
    turns = Turns()
    crowd = Crowd(turns)
    with turns:
        with turns:
            assert turns.depth == 2
            crowd.join_in("other")
            turns.pass_on(object(), never)  # the outer turn is kept
        assert turns.is_mine
        assert crowd.order == []
    assert turns.depth == 0
    assert crowd.finish() == ["other"]


class TestDoSoon:
    def test_within_a_turn_runs_at_the_end_of_the_step(self):
        turns, done = Turns(), []
        with turns:
            turns.do_soon(lambda: done.append(1))
            assert done == []
            turns.pass_on(object(), never)
            assert done == [1]
            turns.do_soon(lambda: done.append(2))
            assert done == [1]
        assert done == [1, 2]

    def test_another_thread_does_not_wait(self):
        turns, done = Turns(), []
        with turns:
            other = threading.Thread(target=turns.do_soon, args=(lambda: done.append(1),))
            other.start()
            other.join(SOON)
            assert not other.is_alive()
            assert done == []
        assert done == [1]

    def test_runs_during_the_handover_of_the_lock(self):
        """A finaliser may run at this point."""
        turns, done = Turns(), []
        crowd = Crowd(turns)

        def ready_with_garbage():
            turns.do_soon(lambda: done.append(1))
            return True

        turns.acquire()
        crowd.join_in("other", None, ready_with_garbage)
        turns.release()
        assert crowd.finish() == ["other"]
        assert done == [1]


class TestExceptions:
    def test_an_interrupted_thread_gets_no_turn(self, monkeypatch):
        turns = Turns()
        crowd = Crowd(turns)
        raised = []

        def interrupted(waiter):
            raise KeyboardInterrupt

        def run():
            try:
                turns.acquire()
            except KeyboardInterrupt:
                raised.append(turns.is_mine)

        turns.acquire()
        with monkeypatch.context() as patch:
            patch.setattr(turns, "_wait", interrupted)
            other = threading.Thread(target=run)
            other.start()
            other.join(SOON)
        assert raised == [False]
        crowd.join_in("other")
        turns.release()
        assert crowd.finish() == ["other"]

    @pytest.mark.parametrize("owner", ["none", "the waiting thread"])
    def test_a_waiting_thread_finds_a_lost_turn(self, owner):
        """An exception interrupted the handover."""
        turns = Turns()
        crowd = Crowd(turns)
        turns.acquire()
        crowd.join_in("other")
        if owner == "none":
            turns._owner, turns._depth = None, 0
        else:
            waiter = turns._waiting.popleft()
            turns._depth, turns._owner = 1, waiter.thread
        assert crowd.finish() == ["other"]
