"""How the parts of an embedded drafter are put together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

from indexer.reader import Index, Vocabulary
from retriever.bare_contexts import BareContexts
from retriever.bindings import NO_PHRASES, Bindings
from retriever.corpora import shared_vocabulary
from retriever.deletion import Deletion
from retriever.drafter_options import DEFAULT_LIMITS, DrafterOptions
from retriever.limits import Limits
from retriever.live import LiveCorpora
from retriever.pools import Pools
from retriever.predictor import Predictor
from retriever.sequences import Sequences
from retriever.sessions import Sessions
from retriever.sources import Sources
from retriever.steps import Steps
from retriever.tally import Tally
from retriever.vocabulary_guard import VocabularyGuard, check_phrases
from retriever.warmth.sharing import NoWarmth, SharedWarmth, check_warmth


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter consists of; each part says what it is for."""

    limits: Limits
    vocabulary: Vocabulary | None
    lock: Lock
    tally: Tally
    sessions: Sessions
    live: Bindings
    predictor: Predictor
    steps: Steps
    pools: Pools
    warmth: NoWarmth
    vocabularies: VocabularyGuard
    sources: Sources
    sequences: Sequences
    bare: BareContexts
    deletion: Deletion


def assemble(indexes: Sequence[Index], options: DrafterOptions) -> Parts:
    """Make the parts of a drafter, open its state, and load what everybody drafts from.

    Raises:
        RetrieverError: as for `EmbeddedDrafter`.
    """
    check_warmth(options.get("warmth"))
    vocabulary = _checked_vocabulary(indexes, options)
    limits = options.get("limits", DEFAULT_LIMITS)
    lock, tally, sessions = Lock(), Tally(), Sessions(limits)
    predictor = options.get("predictor") or Predictor(limits.max_budget_nodes)
    live_corpora = partial(LiveCorpora, sessions=sessions, lock=lock)
    live = Bindings(
        live_corpora(indexes),
        options.get("phrases") or NO_PHRASES,
        options.get("bound") or {},
        live_corpora,
    )
    size = vocabulary.size if vocabulary else None
    steps = Steps(
        *(sessions, predictor, live, lock), limits=limits, tally=tally, vocabulary_size=size
    )
    fingerprint = vocabulary.fingerprint if vocabulary else ""
    durability = options.get("durability", "process")
    pools = Pools.open(limits, options.get("state"), fingerprint, durability, live.has_corpus)
    deletion = Deletion(sessions, pools, lock)
    warmth = SharedWarmth.join(options.get("warmth"), pools, lock, limits, deletion.forget)
    deletion.warmth = warmth
    sources = Sources(pools, live, vocabulary, limits)
    parts = Parts(
        *(limits, vocabulary, lock, tally, sessions, live, predictor, steps, pools, warmth),
        vocabularies=VocabularyGuard(vocabulary, pools, warmth, lock),
        sources=sources,
        sequences=Sequences(*(sessions, steps, sources, pools, warmth), lock=lock, limits=limits),
        bare=BareContexts(sources, live, predictor, tally, lock=lock, limits=limits),
        deletion=deletion,
    )
    pools.get("")  # whoever names no tenant does not wait for the log
    return parts


def _checked_vocabulary(indexes: Sequence[Index], options: DrafterOptions) -> Vocabulary | None:
    """Return the one vocabulary of all indexes, having checked the listed phrases against it."""
    vocabulary = shared_vocabulary(indexes, options.get("vocabulary"))
    for each in (options.get("bound") or {}).values():
        vocabulary = shared_vocabulary(each.indexes or (), vocabulary)
        check_phrases(each.phrases or NO_PHRASES, vocabulary)
    check_phrases(options.get("phrases") or NO_PHRASES, vocabulary)
    return vocabulary
