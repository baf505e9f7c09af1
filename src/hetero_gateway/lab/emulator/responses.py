"""What /v1/responses keeps, where that is turned on, so that others continue it.

As in vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1: in the server's memory, by id, and to be had
under /v1/responses/ID. Not as there: the oldest go when there are many.
"""

from __future__ import annotations

from typing import Any

from hetero_gateway.lab.emulator.errors import ApiError
from hetero_gateway.lab.emulator.other_apis import ResponsesReply

_MOST = 4096

Messages = list[tuple[str, str]]


class ResponseStore:
    """Responses by id. ``keeps``: False: it forgets all of them at once, as vLLM by default."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: dict[str, tuple[Messages, ResponsesReply]] = {}

    def keep(self, messages: Messages, reply: ResponsesReply) -> None:
        """A response begins; ``messages``: all that it answers."""
        if self._keeps:
            self._kept[reply.id] = (messages, reply)
            if len(self._kept) > _MOST:
                del self._kept[next(iter(self._kept))]

    def before(self, previous_id: str) -> Messages:
        """What is in front of a response that continues this one, its answer included.

        Instructions are not: each response has its own. Raises ApiError: 404.
        """
        messages, reply = self._found(previous_id)
        said = [message for message in messages if message[0] != "system"]
        return [*said, ("assistant", reply.text)]

    def document(self, response_id: str) -> dict[str, Any]:
        """A response as it was answered. Raises ApiError: 404."""
        return self._found(response_id)[1].response(complete=True)

    def cancel(self, response_id: str) -> dict[str, Any]:
        """Raises ApiError: none of them runs in the background."""
        self._found(response_id)
        raise ApiError(
            "Cannot cancel a synchronous response.",
            kind="invalid_request_error",
            param="response_id",
        )

    def _found(self, response_id: str) -> tuple[Messages, ResponsesReply]:
        kept = self._kept.get(response_id)
        if kept is None or kept[1].unfinished:
            raise ApiError(
                f"Response with id '{response_id}' not found.",
                status=404,
                kind="invalid_request_error",
                param="response_id",
            )
        return kept
