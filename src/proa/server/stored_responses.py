"""Responses that clients may continue by previous_response_id: in memory, the latest ones only."""

from __future__ import annotations

from typing import Any

from proa.server.errors import ApiError

Items = list[dict[str, Any]]


class StoredResponses:
    """The items of the latest `most` conversations, by response id: input and output, earlier responses included."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: dict[str, Items] = {}

    def refuse_if_off(self, param: str) -> None:
        """Raise ApiError 400 if nothing is stored here."""
        if not self._most:
            message = f"{param} needs stored responses, but the server runs with --stored-responses 0; send all items."
            raise ApiError(400, "unsupported_parameter", message, param=param)

    def items(self, response_id: str) -> Items:
        """Return a conversation's items. Raises ApiError 400 if it is not stored (any more)."""
        self.refuse_if_off("previous_response_id")
        if response_id not in self._items:
            message = f"The response {response_id!r} is not stored; the latest {self._most} are. Send all items."
            raise ApiError(400, "previous_response_not_found", message, param="previous_response_id")
        return self._items[response_id]

    def add(self, response_id: str, items: Items) -> None:
        if self._most:
            self._items[response_id] = items
        while len(self._items) > self._most:
            del self._items[next(iter(self._items))]
