"""Draft trees for language models: the value, the protocol, the errors and the client.

Importing this package loads numpy and gRPC only, so that an inference server which needs the
client does not pay for the rest. The embedded drafter is `retriever.embedded.EmbeddedDrafter`.
"""

from retriever.client import IndexInfo, RemoteDrafter
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import (
    AccessRefusedError,
    AddressInUseError,
    CredentialsError,
    DrafterUnavailableError,
    InsecureAddressError,
    InvalidRequestError,
    InvalidTreeError,
    LimitExceededError,
    NotPermittedError,
    OutOfSequenceError,
    PhrasesError,
    ProvenanceError,
    RetrieverError,
    SessionExistsError,
    SettingsError,
    StateError,
    TraceError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.explanation import DocumentOccurrence, Explanation, NodeProvenance
from retriever.remote.async_resilient import AsyncResilientDrafter
from retriever.remote.credentials import Credentials
from retriever.remote.fail_opens import FailOpen
from retriever.remote.local import LocalDrafter
from retriever.remote.resilient import ResilientDrafter
from retriever.sharding import ShardedDrafter
from retriever.shards import ShardState
from retriever.tree import ROOT, DraftTree, Source

__all__ = [
    "ROOT",
    "AccessRefusedError",
    "AddressInUseError",
    "AsyncResilientDrafter",
    "Credentials",
    "CredentialsError",
    "DocumentOccurrence",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "DrafterUnavailableError",
    "Explanation",
    "FailOpen",
    "IndexInfo",
    "InsecureAddressError",
    "InvalidRequestError",
    "InvalidTreeError",
    "LimitExceededError",
    "LocalDrafter",
    "NodeProvenance",
    "NotPermittedError",
    "OutOfSequenceError",
    "PhrasesError",
    "ProvenanceError",
    "RemoteDrafter",
    "ResilientDrafter",
    "RetrieverError",
    "SessionExistsError",
    "SettingsError",
    "ShardState",
    "ShardedDrafter",
    "Source",
    "StateError",
    "TokenIds",
    "TraceError",
    "UnknownSessionError",
    "VocabularyMismatchError",
]
