"""The server's handle of a request in the engine."""

from __future__ import annotations

import asyncio

from draftwise.errors import DraftwiseError
from draftwise.serving.link import serialize
from draftwise.serving.messages import Add, Piece

# Index of an answer, and its new piece or its error.
RequestUpdate = tuple[int, Piece | DraftwiseError]


class ServedRequest:
    """One request of the engine, which generates one answer to one prompt.

    Attributes:
        key: key of the request, unique within the server.
        payload: serialised command that adds the request to the engine.
        is_done: whether the request has ended.
    """

    def __init__(self, command: Add, number: int, updates: asyncio.Queue[RequestUpdate]) -> None:
        """Create the handle; nothing is sent yet.

        Args:
            command: command that adds the request to the engine.
            number: index of the answer among those to the same body.
            updates: queue for pieces and errors of the request.

        Raises:
            InvalidParameterError: the command cannot be serialised.
        """
        self.key = command.key
        self.payload = serialize(command)
        self.is_done = False
        self._number, self._updates = number, updates
        self._added: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def added(self) -> None:
        """Wait until the engine has accepted the request.

        Raises:
            DraftwiseError: the engine rejected the request.
        """
        await asyncio.shield(self._added)

    def mark_added(self) -> None:
        """Record that the engine has accepted the request."""
        if not self._added.done():
            self._added.set_result(None)

    def add_piece(self, piece: Piece) -> None:
        """Forward a piece of the answer."""
        self.is_done = piece.finish_reason is not None
        self._updates.put_nowait((self._number, piece if piece.error is None else piece.error))

    def fail(self, error: DraftwiseError) -> None:
        """End the request with an error."""
        self.is_done = True
        if not self._added.done():
            self._added.set_exception(error)
            # Mark the exception as retrieved, as nobody may be waiting any more.
            self._added.exception()
        self._updates.put_nowait((self._number, error))
