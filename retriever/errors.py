"""What can go wrong between a decoder and a drafter, as one tree of errors."""


class RetrieverError(Exception):
    """Base of every error that this package raises."""


class InvalidRequestError(RetrieverError):
    """A request breaks the contract: the caller is at fault and must change it."""


class OutOfSequenceError(InvalidRequestError):
    """The stated length is not the session's length plus the new tokens: a step was lost."""


class VocabularyMismatchError(InvalidRequestError):
    """Token ids at hand belong to another tokenizer than the one that is drafted for."""


class LimitExceededError(InvalidRequestError):
    """A count or size is beyond the limit that the message names."""


class UnknownSessionError(RetrieverError):
    """No such session is open: it was never opened, was closed, or has ended."""


class SessionExistsError(RetrieverError):
    """A session of this name is open already."""


class InvalidTreeError(RetrieverError):
    """Arrays that claim to be a draft tree are not one."""


class DrafterUnavailableError(RetrieverError):
    """The drafter cannot be reached in time: go on without a draft."""


class AccessRefusedError(DrafterUnavailableError):
    """The service does not let the caller in: credentials are missing, wrong, or over."""


class NotPermittedError(AccessRefusedError):
    """The service knows the caller, who may not do this."""


class CredentialsError(RetrieverError):
    """A certificate, key or token cannot be used: the message says why, and what to do."""


class InsecureAddressError(RetrieverError):
    """Listening on this address would let in whoever can reach it."""


class ProvenanceError(RetrieverError):
    """Where a draft came from cannot be told: an index is damaged or closed."""


class AddressInUseError(RetrieverError):
    """The address to serve on is taken or cannot be bound."""


class StateError(RetrieverError):
    """A state directory cannot be used: the message says why, and what to do."""


class SettingsError(RetrieverError):
    """A setting is unknown, or cannot have the value: the message names both."""


class ReplicationError(RetrieverError):
    """Outputs cannot be shared as asked for: the message says why, and what to do."""


class TraceError(RetrieverError):
    """A file of recorded outputs cannot be read."""


class PhrasesError(RetrieverError):
    """A file of listed phrases cannot be read."""


class ExportError(RetrieverError):
    """An index cannot be written in another form."""
