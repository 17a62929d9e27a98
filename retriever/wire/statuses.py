"""Conversion of errors to gRPC statuses, and back to the errors of the embedded drafter."""

import re
from typing import Final
from urllib.parse import unquote

import grpc

from retriever.errors import (
    AccessRefusedError,
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    NotPermittedError,
    OutOfSequenceError,
    RetrieverError,
    SessionExistsError,
    StaleClientError,
    StorageError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.v1 import retriever_pb2 as pb

# Subclasses first: the first matching class gives the status.
_STATUS_OF_ERROR: Final[tuple[tuple[type[RetrieverError], grpc.StatusCode], ...]] = (
    (OutOfSequenceError, grpc.StatusCode.ABORTED),
    (StaleClientError, grpc.StatusCode.FAILED_PRECONDITION),
    (VocabularyMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (LimitExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownSessionError, grpc.StatusCode.NOT_FOUND),
    (SessionExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (StorageError, grpc.StatusCode.UNAVAILABLE),
    (NotPermittedError, grpc.StatusCode.PERMISSION_DENIED),
    (AccessRefusedError, grpc.StatusCode.UNAUTHENTICATED),
)
_UNREACHED: Final = re.compile(
    r"(?:failed to connect .*(?:ipv[46]:|(?=unix:))|errors resolving )(?P<place>\S+): "
    r".*: (?P<reason>[^:\]]+)\]?$",
    re.DOTALL,
)
"""gRPC's message where no service listens at an address, or the name does not resolve."""

# UNAVAILABLE has many causes, of which a client knows one at most by its message.
_ERROR_OF_STATUS: Final[dict[grpc.StatusCode, type[RetrieverError]]] = {
    status: error for error, status in _STATUS_OF_ERROR if status is not grpc.StatusCode.UNAVAILABLE
}
_ERROR_OF_CODE: Final = {status.value[0]: error for status, error in _ERROR_OF_STATUS.items()}


# Advice by a part of gRPC's details; the first match counts.
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
    "Permission denied": "this user may not open the service's socket: run as the same user",
}
_NEVER_CONNECTED: Final = "failed to connect"


def advice(details: str) -> str:
    """Return why a connection failed and what to do; empty if unknown.

    Args:
        details: of the status that gRPC gave.
    """
    if _NEVER_CONNECTED not in details:
        return ""
    return next((text for sign, text in _ADVICE.items() if sign in details), "")


def status_of(error: RetrieverError) -> grpc.StatusCode:
    """Return the status of an error."""
    for kind, status in _STATUS_OF_ERROR:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL


def error_of(error: grpc.RpcError) -> RetrieverError:
    """Return the error of a failed call; unknown statuses are `DrafterUnavailableError`."""
    code, details = error.code(), error.details() or ""
    kind = _ERROR_OF_STATUS.get(code)
    if kind is not None:
        return kind(details)
    if reason := advice(details):
        return DrafterUnavailableError(reason)
    if code is grpc.StatusCode.UNAVAILABLE and (refused := _UNREACHED.search(details)):
        return DrafterUnavailableError(
            f"no draft service answers at {unquote(refused['place'])} ({refused['reason']}): "
            "is `foredraft serve` running there?"
        )
    return DrafterUnavailableError(f"the draft service answered {code.name}: {details}")


def error_of_status(status: pb.SessionStatus) -> RetrieverError:
    """Return the error of a refusal in a response."""
    kind = _ERROR_OF_CODE.get(status.code, DrafterUnavailableError)
    return kind(status.message)
