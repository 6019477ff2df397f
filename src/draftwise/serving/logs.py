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

# Attributes of every log record; other attributes come from the argument `extra`.
_STANDARD_ATTRIBUTES = set(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}

# Maximum number of lines in the queue; further lines are lost.
_MAX_QUEUED_LINES = 10_000
_CLOSE_SECONDS = 0.5


class JsonFormatter(logging.Formatter):
    """Formats log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Format time, level, logger, message and extra attributes of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            key: value for key, value in vars(record).items() if key not in _STANDARD_ATTRIBUTES
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class BackgroundHandler(logging.Handler):
    """Writes lines in a separate thread.

    If the disk is full, or the reader of a pipe has stopped, lines are lost, but no request is
    delayed.

    Attributes:
        num_lost: number of lines that could not be written.
    """

    def __init__(self, stream: TextIO) -> None:
        """Start the thread.

        Args:
            stream: stream for the lines, used only by this handler.
        """
        super().__init__()
        self.num_lost = 0
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_QUEUED_LINES)
        self._thread = threading.Thread(target=self._write, name="draftwise-logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; it is lost if the queue is full."""
        try:
            self._lines.put_nowait(self.format(record))
        except Exception:  # logging the failure would fail as well
            self.num_lost += 1

    def close(self) -> None:
        """Write the queued lines, and wait a short time until that is done."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            except Exception:
                self.num_lost += 1


def set_up_logs(path: Path | None, level: str = "info") -> BackgroundHandler:
    """Send the logs of Draftwise and uvicorn to a file, or to standard error.

    Args:
        path: file to append to; ``None`` for standard error.
        level: minimum level of the logged lines.

    Raises:
        InvalidParameterError: the file cannot be written, or the level is unknown.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise InvalidParameterError(
            "log_level", f"must be debug, info, warning or error, got {level!r}"
        )
    try:
        # Line-buffered, so that no lines are lost in a buffer when the machine crashes.
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
