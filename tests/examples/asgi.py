"""A client of ASGI applications in this process, and an application that says what it is given."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.nightly.request_log import App, Message, Receive, Send

CHAT = "/v1/chat/completions"


@dataclass
class Saying:
    """An application that answers every request with the same bytes, in pieces.

    Attributes:
        pieces: of the answer.
        status: of the answer.
        breaks_off: whether it ends, as at a client's leaving, before the answer does.
    """

    pieces: Sequence[bytes]
    status: int = 200
    breaks_off: bool = False
    asked: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": f"{scope['type']}.seen"})
            return
        self.asked.append(await body_of(receive))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for number, piece in enumerate(self.pieces, 1):
            is_last = number == len(self.pieces) and not self.breaks_off
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        if self.breaks_off:
            raise asyncio.CancelledError


async def body_of(receive: Receive) -> bytes:
    """Return the whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def asked(app: App, body: Any, path: str = CHAT) -> bytes:
    """Return the body of the answer to a request whose body is JSON, or bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    half = len(content) // 2
    incoming: list[Message] = [
        {"type": "http.request", "body": content[:half], "more_body": True},
        {"type": "http.request", "body": content[half:]},
    ]
    outgoing: list[Message] = []

    async def receive() -> Message:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        outgoing.append(message)

    headers = [(b"authorization", b"Bearer secret-of-a-user")]
    scope: Message = {"type": "http", "method": "POST", "path": path, "headers": headers}

    async def answer() -> None:
        await app(scope, receive, send)

    asyncio.run(answer())
    return b"".join(message.get("body", b"") for message in outgoing)


def events(*values: Any) -> bytes:
    """Return server-sent events as vLLM writes them, with their end."""
    return b"".join(b"data: %s\n\n" % json.dumps(value).encode() for value in values) + (
        b"data: [DONE]\n\n"
    )


def chat_chunks(*deltas: Any, index: int = 0) -> list[Message]:
    """Return the chunks of a streamed chat completion."""
    last: Message = {"index": index, "delta": {}, "finish_reason": "stop"}
    choices = [{"index": index, "delta": delta, "finish_reason": None} for delta in deltas]
    base = {"id": "c1", "object": "chat.completion.chunk", "model": "m"}
    return [{**base, "choices": [choice]} for choice in (*choices, last)]
