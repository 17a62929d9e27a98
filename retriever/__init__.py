"""Draft trees for language models: the value, the protocol, the errors and the client.

Importing this package loads numpy and gRPC only, so that an inference server which needs the
client does not pay for the rest. The embedded drafter is `retriever.embedded.EmbeddedDrafter`.
"""

from retriever.client import IndexInfo, RemoteDrafter
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import (
    AddressInUseError,
    DrafterUnavailableError,
    InvalidRequestError,
    InvalidTreeError,
    LimitExceededError,
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
from retriever.sharding import ShardedDrafter
from retriever.shards import ShardState
from retriever.tree import ROOT, DraftTree, Source

__all__ = [
    "ROOT",
    "AddressInUseError",
    "DocumentOccurrence",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "DrafterUnavailableError",
    "Explanation",
    "IndexInfo",
    "InvalidRequestError",
    "InvalidTreeError",
    "LimitExceededError",
    "NodeProvenance",
    "OutOfSequenceError",
    "PhrasesError",
    "ProvenanceError",
    "RemoteDrafter",
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
