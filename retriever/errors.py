"""Errors between a decoder and a drafter, as one tree."""


class RetrieverError(Exception):
    """Base of every error that this package raises."""


class InvalidRequestError(RetrieverError):
    """A request breaks the contract: the caller must change it."""


class OutOfSequenceError(InvalidRequestError):
    """The stated length is not the session's length plus the new tokens: a step was lost."""


class VocabularyMismatchError(InvalidRequestError):
    """The caller's token ids are of another tokenizer than the drafter's."""


class LimitExceededError(InvalidRequestError):
    """A count or size is beyond the limit that the message names."""


class UnknownSessionError(RetrieverError):
    """No such session is open: it was never opened, was closed, or was ended as idle."""


class SessionExistsError(RetrieverError):
    """A session of this name is open already."""


class InvalidTreeError(RetrieverError):
    """Arrays break a rule of draft trees."""


class DrafterUnavailableError(RetrieverError):
    """The drafter does not answer in time: continue without a draft."""


class AccessRefusedError(DrafterUnavailableError):
    """The service does not let the caller in: credentials are missing, wrong or expired."""


class NotPermittedError(AccessRefusedError):
    """The service knows the caller, which may not do this."""


class CredentialsError(RetrieverError):
    """A certificate, key or token cannot be used: the message says why, and what to do."""


class InsecureAddressError(RetrieverError):
    """Listening on this address would admit everyone who reaches it."""


class ProvenanceError(RetrieverError):
    """The provenance of a draft is not available: an index is damaged or closed."""


class AddressInUseError(RetrieverError):
    """The address to serve on is taken or cannot be bound."""


class StateError(RetrieverError):
    """A state directory cannot be used: the message says why, and what to do."""


class SettingsError(RetrieverError):
    """A setting is unknown or its value is invalid: the message names both."""


class ReplicationError(RetrieverError):
    """Replication cannot be set up: the message says why, and what to do."""


class TraceError(RetrieverError):
    """A file of recorded outputs cannot be read."""


class PhrasesError(RetrieverError):
    """A file of listed phrases cannot be read."""


class ExportError(RetrieverError):
    """An index cannot be written in another form."""
