"""The lock around steps: order of arrival, but threads that need no step go first."""

import threading
import time

import pytest

from draftwise.engine.turns import Turns

SOON = 20.0  # a guard against hanging, not a measure


def wait_until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Crowd:
    """Threads that take a turn each, started one after the other while the turn is held."""

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


def test_in_order_of_arrival():
    turns = Turns()
    crowd = Crowd(turns)
    turns.acquire()
    for name in "abcdef":
        crowd.join_in(name)
    turns.release()
    assert crowd.finish() == list("abcdef")


def test_those_who_need_no_step_go_first():
    turns, engine = Turns(), object()
    crowd = Crowd(turns)
    turns.acquire()
    crowd.join_in("steps", engine, never)
    crowd.join_in("has news", engine, lambda: True)
    crowd.join_in("short")
    turns.release()
    assert crowd.finish() == ["has news", "short", "steps"]


def test_a_thread_goes_on_stepping_for_all():
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
    turns.pass_on(mine, never)  # the other engine's, then that of who waits longest
    turns.release()
    assert crowd.finish() == ["other engine", "same engine"]


def test_it_is_re_entrant():
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


class TestSoon:
    def test_at_once_if_nobody_has_the_turn(self):
        turns, done = Turns(), []
        turns.do_soon(lambda: done.append(turns.is_mine))
        assert done == [True]
        assert not turns.is_mine

    def test_within_a_turn_it_waits_for_a_step_to_end(self):
        turns, done = Turns(), []
        with turns:
            turns.do_soon(lambda: done.append(1))
            assert done == []
            turns.pass_on(object(), never)
            assert done == [1]
            turns.do_soon(lambda: done.append(2))
            assert done == [1]
        assert done == [1, 2]

    def test_from_another_thread_without_waiting(self):
        turns, done = Turns(), []
        with turns:
            other = threading.Thread(target=turns.do_soon, args=(lambda: done.append(1),))
            other.start()
            other.join(SOON)
            assert not other.is_alive()
            assert done == []
        assert done == [1]

    def test_in_the_middle_of_the_lock_itself(self):
        """Run work as a finaliser at this point would."""
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
    def test_a_turn_is_wound_back(self):
        turns = Turns()
        crowd = Crowd(turns)
        turns.acquire()
        depth = turns.depth
        turns.acquire()
        turns.acquire()
        crowd.join_in("other")
        turns.unwind(depth)
        assert turns.depth == 1
        turns.unwind(0)
        assert crowd.finish() == ["other"]

    def test_who_does_not_wait_any_more_gets_no_turn(self, monkeypatch):
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

    @pytest.mark.parametrize("owner", ["nobody", "the one that waits"])
    def test_a_turn_that_nobody_was_woken_for_is_found(self, owner):
        """An exception in the middle of handing over."""
        turns = Turns()
        crowd = Crowd(turns)
        turns.acquire()
        crowd.join_in("other")
        if owner == "nobody":
            turns._owner, turns._depth = None, 0
        else:
            waiter = turns._waiting.popleft()
            turns._depth, turns._owner = 1, waiter.thread
        assert crowd.finish() == ["other"]
