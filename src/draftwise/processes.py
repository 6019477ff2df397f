"""Termination of the processes that Draftwise starts."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time

_POLL_SECONDS = 1.0


def end_quickly() -> None:
    """Skip the garbage collection at the exit of this process.

    The collector traverses all objects of PyTorch and transformers, which takes over a second. The
    operating system frees the memory anyway.
    """
    atexit.register(gc.freeze)


def end_with_parent() -> None:
    """Exit this process soon after its parent process has exited, even during a computation.

    A process that waits for messages of its parent notices a closed connection, but a process that
    hangs in a computation does not.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="draftwise-parent", daemon=True).start()
