from decoder.assembly import assemble as assemble
from decoder.budget.budget import (
    FixedBudget as FixedBudget,
    MeasuredBudget as MeasuredBudget,
)
from decoder.budget.pass_timing import measure_costs as measure_costs
from decoder.drafters.draft_model import (
    DraftModel as DraftModel,
    ModelReader as ModelReader,
)
from decoder.drafters.following import NoDrafter as NoDrafter
from decoder.drafters.fusion import FusedDrafter as FusedDrafter
from decoder.drafters.keeping import (
    KeptLogits as KeptLogits,
    kept_logits as kept_logits,
)
from decoder.drafters.recycling import RecycledLogits as RecycledLogits
from decoder.engines.transformers.custom_generate import Foredraft as Foredraft
from decoder.loop import (
    Decoder as Decoder,
    Generation as Generation,
    Request as Request,
)
from decoder.model.pretrained import (
    LanguageModel as LanguageModel,
    ModelOptions as ModelOptions,
    load_model as load_model,
)
from decoder.model.stamp import model_changed as model_changed
from decoder.model.target import Target as Target
from decoder.plugins.speculators.speculator import load_speculator as load_speculator
from decoder.plugins.training.online import LearningSpeculator as LearningSpeculator
from decoder.sampling.rule import accept_rule as accept_rule
from decoder.sampling.sampling_settings import SamplingSettings as SamplingSettings
from decoder.sampling.verification import (
    AcceptRule as AcceptRule,
    PassContext as PassContext,
    accept_greedy as accept_greedy,
)
from decoder.sampling.walk import follow as follow
from decoder.stopping import (
    StoppableText as StoppableText,
    StopStrings as StopStrings,
)
from foredraft import errors as errors
from indexer.build import (
    BuildOptions as BuildOptions,
    build_from_index as build_from_index,
    build_from_texts as build_from_texts,
    build_from_tokens as build_from_tokens,
    build_index as build_index,
)
from indexer.change.changes import (
    add_documents as add_documents,
    compact as compact,
    remove_documents as remove_documents,
)
from indexer.change.choosing import (
    Choice as Choice,
    list_documents as list_documents,
)
from indexer.change.verifying import verify_index as verify_index
from indexer.reader import Index as Index
from indexer.sources import SourceOptions as SourceOptions
from indexer.tokenizer import (
    Vocabulary as Vocabulary,
    load_tokenizer as load_tokenizer,
    vocabulary_of as vocabulary_of,
)
from retriever.client.asynchronous import AsyncResilientDrafter as AsyncResilientDrafter
from retriever.client.connecting import connect as connect
from retriever.client.conversation import FailOpen as FailOpen
from retriever.client.credentials import Credentials as Credentials
from retriever.client.local import LocalDrafter as LocalDrafter
from retriever.client.resilient import ResilientDrafter as ResilientDrafter
from retriever.client.shared_findings import SharedFindings as SharedFindings
from retriever.client.strict import (
    IndexInfo as IndexInfo,
    RemoteDrafter as RemoteDrafter,
)
from retriever.drafter import (
    AheadDrafter as AheadDrafter,
    Drafter as Drafter,
    DraftRequest as DraftRequest,
    Findings as Findings,
    FindingsStore as FindingsStore,
    Prediction as Prediction,
    SequenceOptions as SequenceOptions,
    TokenIds as TokenIds,
    predictions_of as predictions_of,
)
from retriever.follower import DraftLimits as DraftLimits
from retriever.limits import Limits as Limits
from retriever.plugins.replication.options import ReplicationOptions as ReplicationOptions
from retriever.predict.databases import (
    DatabaseKind as DatabaseKind,
    register_database as register_database,
)
from retriever.predict.phrases import ListedPhrases as ListedPhrases
from retriever.predict.question import (
    Occurrence as Occurrence,
    Question as Question,
    write_row as write_row,
)
from retriever.sessions.embedded import EmbeddedDrafter as EmbeddedDrafter
from retriever.sessions.explaining import explain as explain
from retriever.tree import (
    ROOT as ROOT,
    DocumentOccurrence as DocumentOccurrence,
    DraftTree as DraftTree,
    Explanation as Explanation,
    NodeProvenance as NodeProvenance,
    PredictedPlace as PredictedPlace,
    Source as Source,
)
from retriever.wire.server_info import ServerInfo as ServerInfo
