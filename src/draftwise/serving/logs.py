"""Structured logs: one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

from draftwise.errors import InvalidParameterError

# What every record has of itself; the rest was given by whoever wrote it.
_OWN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


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


class TolerantHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes while it can; a full disk costs lines, not requests.

    Attributes:
        num_lost: lines that could not be written.
    """

    num_lost = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Count it; a report of the failure could not be written either."""
        self.num_lost += 1


def set_up_logs(path: Path | None, level: str = "info") -> TolerantHandler:
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
    handler = TolerantHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name in ("draftwise", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    return handler
