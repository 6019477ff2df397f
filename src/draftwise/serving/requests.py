"""A request as the server knows it: what the engine says of it, handed to whoever waits."""

from __future__ import annotations

import asyncio
import time

from draftwise.errors import DraftwiseError
from draftwise.serving.link import serialize
from draftwise.serving.messages import Add, Piece

# Number of the answer, and what became of it.
News = tuple[int, Piece | DraftwiseError]


class ServedRequest:
    """One request of the engine: one answer to one prompt.

    Attributes:
        key: the server's number of it.
        payload: the serialised command that adds it.
        arrived: monotonic time of its arrival, in seconds.
        is_done: nothing more comes.
    """

    def __init__(self, command: Add, number: int, news: asyncio.Queue[News]) -> None:
        """Set up.

        Args:
            command: that adds it to the engine.
            number: of the answer among those of the same body.
            news: where all that becomes of it is put.

        Raises:
            InvalidParameterError: the command cannot be serialised.
        """
        self.key = command.key
        self.payload = serialize(command)
        self.arrived = time.monotonic()
        self.is_done = False
        self._number, self._news = number, news
        self._added: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def added(self) -> None:
        """Wait until the engine has taken it.

        Raises:
            DraftwiseError: it has not; says why.
        """
        await asyncio.shield(self._added)

    def was_added(self) -> None:
        """The engine has taken it."""
        if not self._added.done():
            self._added.set_result(None)

    def gained(self, piece: Piece) -> None:
        """It went on."""
        self.is_done = piece.finish_reason is not None
        self._news.put_nowait((self._number, piece if piece.error is None else piece.error))

    def failed(self, error: DraftwiseError) -> None:
        """It will not go on."""
        self.is_done = True
        if not self._added.done():
            self._added.set_exception(error)
            # Whoever gave up waiting does not ask any more.
            self._added.exception()
        self._news.put_nowait((self._number, error))
