"""Structured logs: one JSON object per line."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from draftwise.errors import InvalidParameterError

# What every record has of itself; the rest was given by whoever wrote it.
_OWN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

# Lines that wait to be written; more are lost.
_MOST_LINES = 10_000
_PATIENCE_SECONDS = 0.5


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, who, what, and whatever was given beside."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class BackgroundHandler(logging.Handler):
    """Writes lines in a thread of its own.

    A full disk, or a pipe whose reader has stopped, costs lines and never delays a request.

    Attributes:
        num_lost: lines that could not be written.
    """

    def __init__(self, stream: TextIO) -> None:
        """Start the thread.

        Args:
            stream: written to by nobody else.
        """
        super().__init__()
        self.num_lost = 0
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._thread = threading.Thread(target=self._write, name="draftwise-logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or lose it if too many wait."""
        try:
            self._lines.put_nowait(self.format(record))
        except Exception:  # a report of the failure could not be written either
            self.num_lost += 1

    def close(self) -> None:
        """Write what waits, as far as that is possible at once."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_PATIENCE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            except Exception:
                self.num_lost += 1


def set_up_logs(path: Path | None, level: str = "info") -> BackgroundHandler:
    """Send the logs of server and HTTP library to a file, or to standard error.

    Args:
        path: appended to; ``None`` for standard error.
        level: of the least important lines that are written.

    Raises:
        InvalidParameterError: the file cannot be written, or there is no such level.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise InvalidParameterError("log_level", f"there is no level {level!r}")
    try:
        # Line by line, so that nothing waits in a buffer when the machine stops.
        stream = sys.stderr if path is None else path.open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise InvalidParameterError("log_file", f"cannot write {str(path)!r}: {error}") from error
    handler = BackgroundHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name in ("draftwise", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    return handler
