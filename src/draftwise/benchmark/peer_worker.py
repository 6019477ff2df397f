"""Worker process that runs another engine for a benchmark; see :mod:`draftwise.benchmark.peers`.

It is started as ``PYTHON peer_worker.py MODULE`` by the interpreter of that engine's environment,
so it does not import Draftwise. ``MODULE`` is a module of ``peer_engines``. The protocol is one
JSON object per line. The first request has the settings, and its reply has versions. Each further
request is a batch, and its reply has tokens and seconds. The output of engines goes to standard
error.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from importlib import import_module
from typing import Any


def serve(engine: Any) -> None:
    """Answer requests until the end of the input."""
    replies = sys.stdout

    def reply(values: dict[str, Any]) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    with contextlib.redirect_stdout(sys.stderr):
        try:
            generate, versions = engine.start(json.loads(sys.stdin.readline()))
            reply(versions)
            for line in sys.stdin:
                wanted = json.loads(line)
                begin = time.perf_counter()
                answers, counts = generate(wanted["prompts"], wanted)
                seconds = time.perf_counter() - begin
                reply({"answers": answers, "seconds": seconds, "counts": counts})
        except Exception as error:  # replied to the parent; the traceback goes to the log
            reply({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    # The folder of this script is the first on the path of modules.
    module = import_module(f"peer_engines.{sys.argv[1]}")
    if hasattr(module, "prepare"):
        module.prepare()
    serve(module)
