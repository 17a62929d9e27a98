"""Draft trees for language models: the value, the protocol, the errors and the client.

Importing this package loads numpy and gRPC only, so that an inference server which needs the
client does not pay for the rest. The embedded drafter is `EmbeddedDrafter` in
`retriever.sessions.embedded`.
"""

from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.conversation import FailOpen
from retriever.client.credentials import Credentials
from retriever.client.local import LocalDrafter
from retriever.client.resilient import ResilientDrafter
from retriever.client.sharded import ShardedDrafter, ShardState
from retriever.client.strict import IndexInfo, RemoteDrafter
from retriever.drafter import (
    AheadDrafter,
    Drafter,
    DraftRequest,
    GroupDrafter,
    Kin,
    Prediction,
    PredictionDrafter,
    TokenIds,
    predictions_of,
)
from retriever.errors import (
    AccessRefusedError,
    AddressInUseError,
    CredentialsError,
    DrafterUnavailableError,
    DrainingError,
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
    StaleClientError,
    StateError,
    TraceError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.tree import (
    ROOT,
    DocumentOccurrence,
    DraftTree,
    Explanation,
    NodeProvenance,
    PredictedPlace,
    Source,
)
from retriever.wire.server_info import ServerInfo

__distribution__ = "foredraft"

__all__ = [
    "ROOT",
    "AccessRefusedError",
    "AddressInUseError",
    "AheadDrafter",
    "AsyncResilientDrafter",
    "Credentials",
    "CredentialsError",
    "DocumentOccurrence",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "DrafterUnavailableError",
    "DrainingError",
    "Explanation",
    "FailOpen",
    "GroupDrafter",
    "IndexInfo",
    "InsecureAddressError",
    "InvalidRequestError",
    "InvalidTreeError",
    "Kin",
    "LimitExceededError",
    "LocalDrafter",
    "NodeProvenance",
    "NotPermittedError",
    "OutOfSequenceError",
    "PhrasesError",
    "PredictedPlace",
    "Prediction",
    "PredictionDrafter",
    "ProvenanceError",
    "RemoteDrafter",
    "ResilientDrafter",
    "RetrieverError",
    "ServerInfo",
    "SessionExistsError",
    "SettingsError",
    "ShardState",
    "ShardedDrafter",
    "Source",
    "StaleClientError",
    "StateError",
    "TokenIds",
    "TraceError",
    "UnknownSessionError",
    "VocabularyMismatchError",
    "predictions_of",
]
