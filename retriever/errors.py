"""Errors between a decoder and a drafter, in one class hierarchy."""

from typing import ClassVar


class RetrieverError(Exception):
    """Base of every error that this package raises.

    Attributes:
        reason: name of the error for programs, sent in the details of a gRPC status; empty for
            internal errors.
    """

    reason: ClassVar[str] = ""


class InvalidRequestError(RetrieverError):
    """A request violates the contract: the caller must change it."""

    reason = "INVALID_REQUEST"


class OutOfSequenceError(InvalidRequestError):
    """The stated length is not the session's length plus the new tokens: a step was lost."""

    reason = "OUT_OF_SEQUENCE"


class InvalidConstraintError(InvalidRequestError):
    """A constraint cannot be read or is too large, or its library is missing."""

    reason = "INVALID_CONSTRAINT"


class VocabularyMismatchError(InvalidRequestError):
    """The caller's token ids come from another tokenizer than the drafter's."""

    reason = "VOCABULARY_MISMATCH"


class LimitExceededError(InvalidRequestError):
    """A count or size exceeds a limit.

    Args:
        message: text that names the limit.

    Attributes:
        limit: name of the setting with the limit; empty if there is no such setting.
        retry_after_s: wait before another attempt, in seconds; None if the wait is unknown or does
            not help.
    """

    reason = "LIMIT_EXCEEDED"

    def __init__(
        self, message: str, *, limit: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class UnknownSessionError(RetrieverError):
    """No such session is open: it was never opened, was closed, or ended because it was idle."""

    reason = "UNKNOWN_SESSION"


class SessionExistsError(RetrieverError):
    """A session of this name is open already."""

    reason = "SESSION_EXISTS"


class InvalidTreeError(RetrieverError):
    """Arrays violate a rule of draft trees."""


class DrafterUnavailableError(RetrieverError):
    """The drafter does not answer in time: continue without a draft."""

    reason = "UNAVAILABLE"


class DrainingError(DrafterUnavailableError):
    """The service is about to end and opens no more sessions: use another one, or wait."""

    reason = "DRAINING"


class AccessRefusedError(DrafterUnavailableError):
    """The service does not let the caller in: credentials are missing, wrong or expired."""

    reason = "ACCESS_REFUSED"


class NotPermittedError(AccessRefusedError):
    """The service knows the caller, but the caller may not do this."""

    reason = "NOT_PERMITTED"


class NotPossibleError(RetrieverError):
    """The drafter or service cannot do this in its current state: the message says what to do."""

    reason = "NOT_POSSIBLE"


class NotServedError(RetrieverError):
    """The contract has this operation, but the service does not support it yet."""

    reason = "NOT_SERVED"


class UnknownIndexError(RetrieverError):
    """No such index is attached."""

    reason = "UNKNOWN_INDEX"


class CredentialsError(RetrieverError):
    """A certificate, key or token cannot be used: the message says why, and what to do."""


class InsecureAddressError(RetrieverError):
    """Listening on this address would admit anyone who can reach it."""


class ProvenanceError(RetrieverError):
    """The provenance of a draft is not available: an index is damaged or closed."""


class AddressInUseError(RetrieverError):
    """The address to serve on is taken or cannot be bound."""


class StateError(RetrieverError):
    """A state directory cannot be used: the message says why, and what to do."""


class StorageError(StateError):
    """The disk refuses to delete data or to store findings: retry once there is room."""

    reason = "STORAGE"


class SettingsError(RetrieverError):
    """A setting is unknown or its value is invalid: the message names both."""


class ReplicationError(RetrieverError):
    """Replication cannot be set up: the message says why, and what to do."""


class TraceError(RetrieverError):
    """A file of recorded outputs cannot be read."""


class PhrasesError(RetrieverError):
    """A file of listed phrases cannot be read."""


class ExportError(RetrieverError):
    """An index cannot be exported to another format."""
