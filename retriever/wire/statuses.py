"""Conversion of errors to gRPC statuses, and back to the errors of the embedded drafter.

A status carries `google.rpc` details. Programs read the reason, the limit and the wait from them,
never from the text of a message. If a server sends no details, only the status code counts.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from retriever.errors import (
    AccessRefusedError,
    DrafterUnavailableError,
    DrainingError,
    InvalidConstraintError,
    InvalidRequestError,
    LimitExceededError,
    NotPermittedError,
    NotPossibleError,
    NotServedError,
    OutOfSequenceError,
    RetrieverError,
    SessionExistsError,
    StorageError,
    UnknownIndexError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.v1 import retriever_pb2 as pb

DOMAIN: Final = "foredraft"
"""Domain of the reasons in the details."""

INTERNAL: Final = "INTERNAL"
"""Reason of an internal failure of the service."""

LATE: Final = "TIMED_OUT"
"""Reason for drafts that were skipped because the caller's timeout had expired."""

_LIMIT: Final = "limit"
_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata that holds a `google.rpc.Status`; source: gRPC's richer error model."""

# Subclasses first: the first matching class gives the status. If a server sends no details, a
# client takes the first of the classes that share a status, but the general one for a bad request.
_STATUS_OF_ERROR: Final[tuple[tuple[type[RetrieverError], grpc.StatusCode], ...]] = (
    (OutOfSequenceError, grpc.StatusCode.ABORTED),
    (VocabularyMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (NotPossibleError, grpc.StatusCode.FAILED_PRECONDITION),
    (NotServedError, grpc.StatusCode.UNIMPLEMENTED),
    (LimitExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidConstraintError, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownSessionError, grpc.StatusCode.NOT_FOUND),
    (UnknownIndexError, grpc.StatusCode.NOT_FOUND),
    (SessionExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (StorageError, grpc.StatusCode.UNAVAILABLE),
    (NotPermittedError, grpc.StatusCode.PERMISSION_DENIED),
    (AccessRefusedError, grpc.StatusCode.UNAUTHENTICATED),
    (DrainingError, grpc.StatusCode.UNAVAILABLE),
    (DrafterUnavailableError, grpc.StatusCode.UNAVAILABLE),
)

_UNREACHED: Final = re.compile(
    r"(?:failed to connect .*(?:ipv[46]:|(?=unix:))|errors resolving )(?P<place>\S+): "
    r".*: (?P<reason>[^:\]]+)\]?$",
    re.DOTALL,
)
"""gRPC's message if no service listens at an address, or the name does not resolve."""

_ERROR_OF_REASON: Final = {error.reason: error for error, _ in _STATUS_OF_ERROR}
_ERROR_OF_STATUS: Final = {
    # For UNAVAILABLE the text says more: gRPC itself may have raised it.
    status: error
    for error, status in reversed(_STATUS_OF_ERROR)
    if status is not grpc.StatusCode.UNAVAILABLE
} | {grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError}
_ERROR_OF_CODE: Final = {status.value[0]: error for status, error in _ERROR_OF_STATUS.items()}
_LONGEST_S: Final = 86_400.0 * 365  # longest wait to send: a Duration is bounded


# Advice by a substring of gRPC's details; the first match counts.
_ADVICE: Final = {
    "certificate has expired": "the service's certificate has expired: have it renewed, or look at "
    "this machine's clock",
    "certificate is not yet valid": "the service's certificate is not valid yet: look at both "
    "machines' clocks",
    "CERTIFICATE_VERIFY_FAILED": "the service's certificate is not signed by an authority that is "
    "trusted here: give the right one as `ca`",
    "Hostname Verification Check failed": "the service's certificate is for another host name: "
    "connect by a name in it, or give that name as `server_name`",
    "WRONG_VERSION_NUMBER": "the service does not encrypt: connect without TLS, or start it with "
    "--certificate",
    "Socket closed": "the service closed the connection: it may want TLS (give `ca`), or a client "
    "certificate that its authority signed and that has not expired (give `certificate` and `key`)",
    "Permission denied": "this user may not open the service's socket: run as the same user, or "
    "in the socket's group",
}
_NEVER_CONNECTED: Final = "failed to connect"


def advice(details: str) -> str:
    """Return why a connection failed and what to do about it; empty if unknown.

    Args:
        details: details of the status that gRPC gave.
    """
    if _NEVER_CONNECTED not in details:
        return ""
    return next((text for sign, text in _ADVICE.items() if sign in details), "")


class Refusal(NamedTuple):
    """The machine-readable part of a refusal.

    Attributes:
        reason: one of `RetrieverError.reason`, or another; empty if the server sent no details.
        limit: name of the setting whose limit was reached; empty for other reasons.
        retry_after_s: wait before the next attempt, in seconds; None if unknown.
    """

    reason: str = ""
    limit: str = ""
    retry_after_s: float | None = None


_NO_DETAILS: Final = Refusal()


def status_of(error: RetrieverError) -> grpc.StatusCode:
    """Return the status of an error."""
    for kind, status in _STATUS_OF_ERROR:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL


async def abort(context: Any, error: RetrieverError) -> NoReturn:
    """End a call with the status of an error and its details.

    Args:
        context: context of the call, from gRPC for asyncio.
        error: error whose message is sent.
    """
    status: Any = status_of(error)
    details = Status(code=status.value[0], message=str(error), details=_details_of(error))
    await context.abort(status, str(error), ((_DETAILS, details.SerializeToString()),))
    raise AssertionError  # a context's abort always raises


def session_status(name: str, error: RetrieverError) -> pb.SessionStatus:
    """Return the status of a refused session; an empty name means the whole message."""
    code: int = status_of(error).value[0]
    return pb.SessionStatus(
        session_id=name, code=code, message=str(error), details=_details_of(error)
    )


def late_status(text: str) -> pb.SessionStatus:
    """Return the status of a message for which some drafts came too late."""
    code: int = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    return pb.SessionStatus(code=code, message=text, details=[_packed(_info(LATE))])


def is_late(status: pb.SessionStatus) -> bool:
    """Return whether a status only says that drafts came too late; see `late_status`."""
    return not status.session_id and refusal_in(status.details).reason == LATE


def refusal_in(details: Iterable[AnyMessage]) -> Refusal:
    """Return what the details of a status say; details of other domains are skipped."""
    reason = limit = ""
    retry_after_s: float | None = None
    for each in details:
        try:
            if each.Is(ErrorInfo.DESCRIPTOR):
                info = ErrorInfo.FromString(each.value)
                if info.domain == DOMAIN:
                    reason, limit = info.reason, info.metadata.get(_LIMIT, "")
            elif each.Is(RetryInfo.DESCRIPTOR):
                delay = RetryInfo.FromString(each.value).retry_delay
                retry_after_s = max(0.0, delay.seconds + delay.nanos / 1e9)
        except DecodeError:  # not from our server
            continue
    return Refusal(reason, limit, retry_after_s)


def refusal_of(metadata: Iterable[Any] | None) -> Refusal:
    """Return the refusal in the trailing metadata of a failed call."""
    for key, value in metadata or ():
        if key == _DETAILS:
            try:
                return refusal_in(Status.FromString(bytes(value)).details)
            except DecodeError:
                break
    return _NO_DETAILS


def error_of(error: grpc.RpcError, address: str = "") -> RetrieverError:
    """Return the error of a failed call; unknown statuses become `DrafterUnavailableError`.

    Args:
        error: as gRPC raised it.
        address: address that was called; gRPC itself names a proxy, or the address a name resolves
            to.
    """
    code: Any = error.code()
    details = error.details() or ""
    refusal = refusal_of(error.trailing_metadata())
    kind = _ERROR_OF_REASON.get(refusal.reason) or _ERROR_OF_STATUS.get(code)
    if kind is not None:
        return _rebuilt(kind, details, refusal)
    if reason := advice(details):
        return DrafterUnavailableError(reason)
    if code is grpc.StatusCode.UNAVAILABLE and (refused := _UNREACHED.search(details)):
        return DrafterUnavailableError(
            f"no draft service answers at {address or unquote(refused['place'])} "
            f"({refused['reason']}): is `foredraft serve` running there?"
        )
    asked = f"the draft service {address}".rstrip()
    if code is grpc.StatusCode.UNAVAILABLE:
        return DrafterUnavailableError(f"{asked} cannot be reached: {details}")
    return DrafterUnavailableError(f"{asked} answered {code.name}: {details}")


def error_of_status(status: pb.SessionStatus) -> RetrieverError:
    """Return the error of a refusal in a response."""
    refusal = refusal_in(status.details)
    kind = _ERROR_OF_REASON.get(refusal.reason) or _ERROR_OF_CODE.get(status.code)
    return _rebuilt(kind or DrafterUnavailableError, status.message, refusal)


def _rebuilt(kind: type[RetrieverError], text: str, refusal: Refusal) -> RetrieverError:
    if issubclass(kind, LimitExceededError):
        return kind(text, limit=refusal.limit, retry_after_s=refusal.retry_after_s)
    return kind(text)


def _details_of(error: RetrieverError) -> Sequence[AnyMessage]:
    info = _info(error.reason or INTERNAL)
    if not isinstance(error, LimitExceededError):
        return [_packed(info)]
    if error.limit:
        info.metadata[_LIMIT] = error.limit
    if error.retry_after_s is None:
        return [_packed(info)]
    return [_packed(info), _packed(RetryInfo(retry_delay=_duration(error.retry_after_s)))]


def _info(reason: str) -> ErrorInfo:
    return ErrorInfo(reason=reason, domain=DOMAIN)


def _duration(seconds: float) -> Duration:
    whole, nanos = divmod(round(min(seconds, _LONGEST_S) * 1e9), 10**9)
    return Duration(seconds=whole, nanos=nanos)


def _packed(message: ErrorInfo | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
