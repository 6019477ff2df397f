"""How processes that Draftwise starts come to their end."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time

_LOOK_SECONDS = 1.0


def end_quickly() -> None:
    """Skip the search for reference cycles at the end of this process.

    The search walks through every object of PyTorch and transformers and takes over a second. The
    operating system takes the memory back anyway.
    """
    atexit.register(gc.freeze)


def end_with_parent() -> None:
    """End this process soon after the process that started it, even while it computes.

    A process that waits for its parent's messages notices a closed connection by itself; one that
    hangs in a computation does not.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="draftwise-parent", daemon=True).start()
