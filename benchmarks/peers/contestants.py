"""Which drafters are measured: ours, other systems' programs, and our readings of rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.papers import DRAFTERS
from benchmarks.papers.suffix_decoding import BEST_TREE, SuffixDecoding, documents_of
from benchmarks.peers.peer import Contender, DrafterPeer, Kind, Made
from benchmarks.peers.programs import Programs, in_words
from benchmarks.workloads import Workload
from decoder.plugins.contenders.drafting_rules import warm
from decoder.plugins.contenders.prompt_lookup import MAX_MATCHING_NGRAM_SIZE, PromptLookup
from retriever.commands.factories import OWN, own_drafter
from retriever.traces.traces import Trace

OUTPUTS_ALONE: Final = "foredraft-outputs"
SLOW: Final[Mapping[str, str]] = {
    "suffix-gpu": "milliseconds a step without a GPU: measured where it is named, on few traces",
    "sglang-documents": "hundreds of bytes of memory for each token of the documents: measured "
    "where it is named",
}
"""Contenders that take so long that they are left out unless they are named, and why."""

_OUTPUTS: Final = "earlier outputs"
_ALL: Final = "earlier outputs, documents"
_NOTHING: Final = "the sequence alone"


@dataclass(frozen=True, slots=True)
class Absent:
    """A drafter that has no row of its own.

    Attributes:
        name: of the system or contender.
        reason: why it cannot be had here.
    """

    name: str
    reason: str


NOT_TO_BE_HAD: Final = (
    Absent(
        "REST",
        "its look-up is in its repository alone; `draftretriever` as a package is ADED's, which "
        "drafts by another rule: reading only",
    ),
    Absent("Hierarchy Drafting", "in its repository alone, bound to its model code: reading only"),
    Absent("SAM-Decoding", "in its repository alone, bound to its model code: reading only"),
    Absent("ADED", "its compiled package is for few versions of Python: not run"),
    Absent("TensorRT-LLM's suffix automaton", "its kernels need a GPU"),
    Absent("suffix-gpu with documents", "sorts all of its corpus again for every 32,768 tokens"),
)
"""Systems without a program that runs here."""


def contenders(folder: Path) -> list[Contender]:
    """Return all contenders; the programs are those in a folder."""
    programs = Programs(folder)
    ours, program, reading = Kind.OURS, Kind.PROGRAM, Kind.READING
    arctic = partial(programs.arctic, of_corpus=False)
    with_documents = partial(programs.arctic, of_corpus=True)
    return [
        Contender(OWN, ours, _ALL, partial(_ours, of_corpus=True)),
        Contender(OUTPUTS_ALONE, ours, _OUTPUTS, partial(_ours, of_corpus=False), needs_index=True),
        Contender("arctic", program, _OUTPUTS, arctic),
        Contender("arctic-defaults", program, _OUTPUTS, programs.arctic_at_defaults),
        Contender("arctic-documents", program, _ALL, with_documents, needs_index=True),
        Contender("suffix-gpu", program, _OUTPUTS, programs.suffix_gpu),
        Contender("sglang", program, _OUTPUTS, programs.sglang),
        Contender(
            "sglang-documents", program, _ALL, programs.sglang_with_documents, needs_index=True
        ),
        Contender("llama-cpp", program, _ALL, programs.llama_cpp),
        Contender("llama-cpp-python", program, _NOTHING, programs.llama_cpp_python),
        Contender("transformers", program, _NOTHING, programs.transformers),
        Contender("transformers-defaults", program, _NOTHING, programs.transformers_at_defaults),
        Contender(
            "suffix-reading",
            reading,
            _OUTPUTS,
            partial(_suffix_reading, programs=programs, read="arctic"),
            reads="arctic",
        ),
        Contender(
            "suffix-documents-reading",
            reading,
            _ALL,
            partial(_suffix_reading, programs=programs, read="arctic-documents"),
            needs_index=True,
            reads="arctic-documents",
        ),
        Contender(
            "lookup-reading",
            reading,
            _NOTHING,
            partial(_lookup_reading, programs=programs),
            reads="transformers",
        ),
        *(
            Contender(f"{rule}-reading", reading, _ALL, partial(_reading, rule=rule))
            for rule in ("rest", "hd", "sam")
        ),
    ]


def _ours(workload: Workload, budget: int, _search: Sequence[Trace], *, of_corpus: bool) -> Made:
    indexes = workload.indexes if of_corpus else []
    return Made(DrafterPeer(own_drafter(indexes, workload.outputs, budget)))


def _suffix_reading(
    workload: Workload, budget: int, _search: Sequence[Trace], *, programs: Programs, read: str
) -> Made:
    """Our reading of SuffixDecoding with the settings that its program was found best with."""
    settings = programs.found.get(read, BEST_TREE)
    warm(SuffixDecoding((), budget, settings))
    documents = documents_of(workload.indexes) if read == "arctic-documents" else ()
    drafter = SuffixDecoding([*documents, *workload.outputs], budget, settings)
    return Made(DrafterPeer(drafter), in_words(settings))


def _lookup_reading(
    _workload: Workload, _budget: int, _search: Sequence[Trace], *, programs: Programs
) -> Made:
    """Our reading of prompt lookup with the n-grams that its program was found best with."""
    longest = programs.found.get("transformers", MAX_MATCHING_NGRAM_SIZE)
    warm(PromptLookup(longest))
    return Made(DrafterPeer(PromptLookup(longest)), f"n-grams of {longest} at most")


def _reading(workload: Workload, budget: int, _search: Sequence[Trace], *, rule: str) -> Made:
    make = DRAFTERS[rule]
    warm(make((), (), budget))
    return Made(DrafterPeer(make(workload.indexes, workload.outputs, budget)))
