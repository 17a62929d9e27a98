"""What a service asks of a call, without a network; and what a call may tell."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

import grpc
from google.protobuf.message import Message
from grpc import aio

from tests.oracles.fuzz.fuzzing import SECRETS, CrashError, LeakError, check

DOCUMENT: Final = "victim-document"
"""In an index that the victim alone drafts from."""

FAULTS: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
"""What a call may not end with: it tells of a mistake that is ours."""

_LONGEST_DETAILS: Final = 2000  # gRPC drops more than 8 KiB of metadata


class Details(NamedTuple):
    """What an interceptor is told of a call before its context is there."""

    method: str
    invocation_metadata: tuple[()] = ()


class Registered:
    """Takes a service's handlers in the place of a server.

    Args:
        handlers: where to.
    """

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Take nothing: they are the same."""

    def add_registered_method_handlers(self, _service: str, handlers: dict[str, Any]) -> None:
        """Take the handlers of a service."""
        self._handlers.update(handlers)


class CallContext:
    """What the service asks of a call."""

    def __init__(self, headers: list[tuple[str, Any]]) -> None:
        self._headers = headers
        self.status = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Sequence[tuple[str, Any]] = ()

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        """Return what came with the call."""
        return self._headers

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return that the connection was made without a certificate."""
        return {}

    def peer(self) -> str:
        """Return where the call is from."""
        return "nowhere"

    def code(self) -> grpc.StatusCode:
        """Return the status that it was ended with."""
        return self.status

    def details(self) -> str:
        """Return the text of that status."""
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, Any]]:
        """Return what the call was ended with besides its status."""
        return self._trailing

    def time_remaining(self) -> float | None:
        """Return None: it has no deadline."""
        return None

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, Any]] = (),
    ) -> NoReturn:
        """End the call."""
        self.status, self._details, self._trailing = code, details, trailing_metadata
        raise aio.AbortError

    def check(self, method: str, error: BaseException) -> None:
        """See that a call ended with a status that can be sent, and tells nothing."""
        if self.status in FAULTS or self.status is grpc.StatusCode.OK:
            raise CrashError(f"{method} ended with {self.status}") from error.__context__
        check_text(method, self._details)


def check_text(method: str, text: str) -> None:
    """See that a text can be sent and shown, and holds nothing of the victim's."""
    if len(text.encode()) > _LONGEST_DETAILS or not text.isprintable():
        raise CrashError(f"{method} ended with what cannot be sent: {text[:200]!r}")
    if DOCUMENT in text or any(str(secret) in text for secret in SECRETS[:40]):
        raise LeakError(text)


def check_response(method: str, response: Message) -> None:
    """See that a response holds nothing of the victim's, and that its texts can be shown.

    Raises:
        LeakError, CrashError: it does, or they cannot.
    """
    check(response)
    for status in getattr(response, "statuses", ()):
        check_text(method, status.message)
    if DOCUMENT.encode() in response.SerializeToString():
        raise LeakError(f"another tenant's document in {response}")
