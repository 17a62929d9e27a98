"""Drafts that make large language models decode faster, with the same output.

What programs import: building and opening an index, the drafter in the process and the clients of a
service, the draft tree and the protocol, and the decoder. Errors are in `foredraft.errors`; the
adapters of engines are modules of their own: `foredraft.vllm`, `foredraft.transformers` and others.

A name is loaded when it is first used, so that a program pays for what it uses alone: `import
foredraft` by itself loads nothing but the check that the packages behind it are the ones that came
with it.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from foredraft.installation import (
    EXTRAS,
    ForeignPackageError,
    check_packages,
    needing,
    starts_the_command,
)

if TYPE_CHECKING:
    from decoder.assembly import assemble
    from decoder.budget.budget import FixedBudget, MeasuredBudget
    from decoder.budget.pass_timing import measure_costs
    from decoder.drafters.draft_model import DraftModel, ModelReader
    from decoder.drafters.following import NoDrafter
    from decoder.drafters.fusion import FusedDrafter
    from decoder.drafters.keeping import KeptLogits, kept_logits
    from decoder.drafters.recycling import RecycledLogits
    from decoder.engines.transformers.custom_generate import Foredraft
    from decoder.loop import Decoder, Generation, Request
    from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
    from decoder.model.stamp import model_changed
    from decoder.model.target import Target
    from decoder.sampling.rule import accept_rule
    from decoder.sampling.sampling_settings import SamplingSettings
    from decoder.sampling.verification import AcceptRule, PassContext, accept_greedy
    from decoder.sampling.walk import follow
    from decoder.speculators.online import LearningSpeculator
    from decoder.speculators.speculator import load_speculator
    from decoder.stopping import StoppableText, StopStrings
    from foredraft import errors
    from indexer.build import BuildOptions, build_from_texts, build_from_tokens, build_index
    from indexer.change.changes import add_documents, compact, remove_documents
    from indexer.change.choosing import Choice, list_documents
    from indexer.change.rebuilding import build_from_index
    from indexer.change.verifying import verify_index
    from indexer.reader import Index
    from indexer.sources import SourceOptions
    from indexer.tokenizer import Vocabulary, load_tokenizer, vocabulary_of
    from retriever.client.asynchronous import AsyncResilientDrafter
    from retriever.client.conversation import FailOpen
    from retriever.client.credentials import Credentials
    from retriever.client.local import LocalDrafter
    from retriever.client.resilient import ResilientDrafter
    from retriever.client.sharded import ShardedDrafter, ShardState, connect
    from retriever.client.shared_findings import SharedFindings
    from retriever.client.strict import IndexInfo, RemoteDrafter
    from retriever.drafter import (
        AheadDrafter,
        Drafter,
        DraftRequest,
        Findings,
        FindingsStore,
        GroupDrafter,
        Kin,
        Prediction,
        PredictionDrafter,
        TokenIds,
        predictions_of,
    )
    from retriever.follower import DraftLimits
    from retriever.limits import Limits
    from retriever.predict.phrases import ListedPhrases
    from retriever.replication.options import ReplicationOptions
    from retriever.sessions.embedded import EmbeddedDrafter
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

try:
    check_packages()
except ForeignPackageError as _error:
    if starts_the_command():
        sys.exit(f"error: {_error}")
    raise

__all__ = [
    "ROOT",
    "AcceptRule",
    "AheadDrafter",
    "AsyncResilientDrafter",
    "BuildOptions",
    "Choice",
    "Credentials",
    "Decoder",
    "DocumentOccurrence",
    "DraftLimits",
    "DraftModel",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "EmbeddedDrafter",
    "Explanation",
    "FailOpen",
    "Findings",
    "FindingsStore",
    "FixedBudget",
    "Foredraft",
    "FusedDrafter",
    "Generation",
    "GroupDrafter",
    "Index",
    "IndexInfo",
    "KeptLogits",
    "Kin",
    "LanguageModel",
    "LearningSpeculator",
    "Limits",
    "ListedPhrases",
    "LocalDrafter",
    "MeasuredBudget",
    "ModelOptions",
    "ModelReader",
    "NoDrafter",
    "NodeProvenance",
    "PassContext",
    "PredictedPlace",
    "Prediction",
    "PredictionDrafter",
    "RecycledLogits",
    "RemoteDrafter",
    "ReplicationOptions",
    "Request",
    "ResilientDrafter",
    "SamplingSettings",
    "ServerInfo",
    "ShardState",
    "ShardedDrafter",
    "SharedFindings",
    "Source",
    "SourceOptions",
    "StopStrings",
    "StoppableText",
    "Target",
    "TokenIds",
    "Vocabulary",
    "accept_greedy",
    "accept_rule",
    "add_documents",
    "assemble",
    "build_from_index",
    "build_from_texts",
    "build_from_tokens",
    "build_index",
    "compact",
    "connect",
    "errors",
    "follow",
    "kept_logits",
    "list_documents",
    "load_model",
    "load_speculator",
    "load_tokenizer",
    "measure_costs",
    "model_changed",
    "predictions_of",
    "remove_documents",
    "verify_index",
    "vocabulary_of",
]

_HOMES: Final = {
    "decoder.assembly": ("assemble",),
    "decoder.budget.budget": ("FixedBudget", "MeasuredBudget"),
    "decoder.budget.pass_timing": ("measure_costs",),
    "decoder.drafters.draft_model": ("DraftModel", "ModelReader"),
    "decoder.drafters.following": ("NoDrafter",),
    "decoder.drafters.fusion": ("FusedDrafter",),
    "decoder.drafters.keeping": ("KeptLogits", "kept_logits"),
    "decoder.drafters.recycling": ("RecycledLogits",),
    "decoder.engines.transformers.custom_generate": ("Foredraft",),
    "decoder.loop": ("Decoder", "Generation", "Request"),
    "decoder.model.pretrained": ("LanguageModel", "ModelOptions", "load_model"),
    "decoder.model.stamp": ("model_changed",),
    "decoder.model.target": ("Target",),
    "decoder.sampling.rule": ("accept_rule",),
    "decoder.sampling.sampling_settings": ("SamplingSettings",),
    "decoder.sampling.verification": ("AcceptRule", "PassContext", "accept_greedy"),
    "decoder.sampling.walk": ("follow",),
    "decoder.speculators.speculator": ("load_speculator",),
    "decoder.stopping": ("StoppableText", "StopStrings"),
    "decoder.speculators.online": ("LearningSpeculator",),
    "indexer.build": ("BuildOptions", "build_from_texts", "build_from_tokens", "build_index"),
    "indexer.change.changes": ("add_documents", "compact", "remove_documents"),
    "indexer.change.choosing": ("Choice", "list_documents"),
    "indexer.change.rebuilding": ("build_from_index",),
    "indexer.change.verifying": ("verify_index",),
    "indexer.reader": ("Index",),
    "indexer.sources": ("SourceOptions",),
    "indexer.tokenizer": ("Vocabulary", "load_tokenizer", "vocabulary_of"),
    "retriever.client.asynchronous": ("AsyncResilientDrafter",),
    "retriever.client.conversation": ("FailOpen",),
    "retriever.client.credentials": ("Credentials",),
    "retriever.client.local": ("LocalDrafter",),
    "retriever.client.resilient": ("ResilientDrafter",),
    "retriever.client.sharded": ("ShardedDrafter", "ShardState", "connect"),
    "retriever.client.shared_findings": ("SharedFindings",),
    "retriever.client.strict": ("IndexInfo", "RemoteDrafter"),
    "retriever.drafter": (
        "AheadDrafter",
        "Drafter",
        "DraftRequest",
        "Findings",
        "FindingsStore",
        "GroupDrafter",
        "Kin",
        "Prediction",
        "PredictionDrafter",
        "TokenIds",
        "predictions_of",
    ),
    "retriever.follower": ("DraftLimits",),
    "retriever.limits": ("Limits",),
    "retriever.predict.phrases": ("ListedPhrases",),
    "retriever.replication.options": ("ReplicationOptions",),
    "retriever.sessions.embedded": ("EmbeddedDrafter",),
    "retriever.tree": (
        "ROOT",
        "DocumentOccurrence",
        "DraftTree",
        "Explanation",
        "NodeProvenance",
        "PredictedPlace",
        "Source",
    ),
    "retriever.wire.server_info": ("ServerInfo",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # type checkers would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Load a name from where it is defined, once.

        Raises:
            ModuleNotFoundError: a library is missing; the message says what to install.
        """
        if name == "errors":
            return import_module("foredraft.errors")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _HOME_OF[name]
        with needing(EXTRAS[home.partition(".")[0]]):
            value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
