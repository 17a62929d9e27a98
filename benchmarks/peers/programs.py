"""The programs of other systems as peers: their own code, called as their engines call it."""

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from benchmarks.papers.suffix_decoding import BEST_TREE, MAX_DEPTH, Settings, documents_of
from benchmarks.peers.build_programs import (
    ARCTIC_INFERENCE,
    LLAMA_LOOKUP,
    SGLANG_NGRAM,
    SUFFIX_ON_TORCH,
)
from benchmarks.peers.in_turns import Tally, Turns, replay_in_turns
from benchmarks.peers.peer import DrafterPeer, Made, Text, drafted, path_of
from benchmarks.workloads import Workload
from decoder.plugins.contenders.prompt_lookup import PromptLookup
from retriever.drafter import TokenIds
from retriever.traces.traces import Trace
from retriever.tree import DraftTree

ARCTIC_DEFAULTS: Final = Settings(1.0, 0.0, 0.1, use_tree_spec=False)
"""What `SuffixDecodingCache.speculate` takes where nothing is said."""

ARCTIC_SETTINGS: Final = tuple(
    Settings(factor, 0.0, probability, use_tree_spec=True)
    for factor, probability in ((1.0, 0.1), (1.0, 0.01), (2.0, 0.01), (4.0, 0.01))
) + tuple(
    Settings(0.0, float(1 << 20), probability, use_tree_spec=True)
    for probability in (0.1, 0.01, 0.0)
)
"""What its best settings are searched in: how a draft grows with the match, and where it ends.

Trees alone: at equal nodes a path was never better.
"""

LEVEL: Final = 0.99
"""Settings that reach this share of the most tokens per step are as good: the quickest is taken."""

LONGEST_NGRAMS: Final = (2, 3, 5, 10, 32)
"""What the best longest n-gram of prompt lookup is searched in; 2 is both programs' default."""

SGLANG_DEPTH: Final = 18
SGLANG_BREADTH: Final = 10
"""Depth of its trie and children that it drafts of a node at most, as its server has them."""

_NO_LIMIT: Final = 1 << 30

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs in a folder, each loaded when its peer is made.

    Attributes:
        folder: what `build_programs` filled.
        found: the best settings of each program, by its name, for readings of the same rule.

    The functions raise ProgramError where a program is not built.
    """

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)

    def arctic(
        self, workload: Workload, budget: int, search: Sequence[Trace], *, of_corpus: bool
    ) -> Made:
        """ArcticInference's suffix trees at the best settings found for them here."""
        peer = self._arctic(workload, of_corpus=of_corpus)
        peer.settings = peer.best(ARCTIC_SETTINGS, search, budget) if search else BEST_TREE
        self.found["arctic-documents" if of_corpus else "arctic"] = peer.settings
        return Made(peer, in_words(peer.settings))

    def arctic_at_defaults(
        self, workload: Workload, _budget: int, _search: Sequence[Trace]
    ) -> Made:
        """ArcticInference's suffix trees as they draft where nothing is said."""
        peer = self._arctic(workload, of_corpus=False)
        return Made(peer, in_words(peer.settings))

    def suffix_gpu(self, workload: Workload, budget: int, search: Sequence[Trace]) -> Made:
        """`suffix-gpu`, its PyTorch form on the processor, at its defaults."""
        del search
        _import_from(SUFFIX_ON_TORCH.require(self.folder))
        drafter = importlib.import_module("suffix_gpu").SuffixGPUDrafter
        sizes = [len(each) + 1 for each in workload.outputs]
        sizes += [len(each.output) + 1 for each in workload.traces]
        # Every look-up goes through its whole capacity, so it has no more than it needs.
        program = drafter(k=budget, enable_global=True, global_capacity=sum(sizes) + (1 << 12))
        for output in workload.outputs:
            program.global_index.append_documents([torch.from_numpy(np.array(output))])
        return Made(SuffixGpuPeer(program), "its defaults")

    def transformers(self, workload: Workload, budget: int, _search: Sequence[Trace]) -> Made:
        """Transformers' prompt lookup with the longest n-gram that is best here."""
        longest = _best_ngram(workload.traces, budget)
        self.found["transformers"] = longest
        return Made(TransformersPeer(longest), f"n-grams of {longest} at most")

    def transformers_at_defaults(
        self, _workload: Workload, _budget: int, _search: Sequence[Trace]
    ) -> Made:
        """Transformers' prompt lookup with its usual n-grams of two tokens."""
        return Made(TransformersPeer(2), "n-grams of 2 at most")

    def llama_cpp_python(self, workload: Workload, budget: int, _search: Sequence[Trace]) -> Made:
        """llama-cpp-python's prompt lookup with the longest n-gram that is best here."""
        path = LLAMA_LOOKUP.require(self.folder) / "llama_speculative.py"
        spec = importlib.util.spec_from_file_location("llama_speculative", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        longest = _best_ngram(workload.traces, budget)
        peer = LlamaCppPythonPeer(module.LlamaPromptLookupDecoding, longest)
        return Made(peer, f"n-grams of {longest} at most")

    def llama_cpp(self, workload: Workload, budget: int, search: Sequence[Trace]) -> Made:
        """llama.cpp's n-gram caches: of the sequence, of earlier ones and of the documents."""
        del budget, search
        library = LLAMA_LOOKUP.require(self.folder) / "llama_lookup.so"
        peer = LlamaCppPeer(library, documents_of(workload.indexes))
        for output in workload.outputs:
            peer.remember(output)
        return Made(peer, "n-grams of 1 to 4, of 2 in the corpus")

    def sglang_with_documents(
        self, workload: Workload, budget: int, _search: Sequence[Trace]
    ) -> Made:
        """SGLang's n-gram corpus with an external corpus, which has half of each draft."""
        library = SGLANG_NGRAM.require(self.folder) / "sglang_ngram.so"
        of_corpus = budget // 2
        peer = SglangPeer(library, _sglang_nodes(workload), budget, of_corpus, by_frequency=True)
        peer.add_documents(documents_of(workload.indexes))
        for output in workload.outputs:
            peer.insert(output)
        return Made(peer, f"{of_corpus} nodes of the corpus, the most frequent first")

    def sglang(self, workload: Workload, budget: int, search: Sequence[Trace]) -> Made:
        """SGLang's n-gram corpus, by recency or by frequency, whichever is better here."""
        library = SGLANG_NGRAM.require(self.folder) / "sglang_ngram.so"

        def peer(*, by_frequency: bool) -> SglangPeer:
            nodes = _sglang_nodes(workload)
            made = SglangPeer(library, nodes, budget, 0, by_frequency=by_frequency)
            for output in workload.outputs:
                made.insert(output)
            return made

        reached = {
            by_frequency: replay_in_turns(
                {"": peer(by_frequency=by_frequency)}, search, budget, Turns.TRACE
            )[""]
            for by_frequency in ((False, True) if search else ())
        }
        best = quickest_of_the_best(reached) if reached else True
        order = "the most frequent first" if best else "the latest first"
        return Made(peer(by_frequency=best), f"n-grams of {SGLANG_DEPTH} at most, {order}")

    def _arctic(self, workload: Workload, *, of_corpus: bool) -> "ArcticPeer":
        _import_from(ARCTIC_INFERENCE.require(self.folder))
        module: Any = importlib.import_module("arctic_inference.suffix_decoding")
        peer = ArcticPeer(module.SuffixDecodingCache(max_tree_depth=MAX_DEPTH))
        for document in documents_of(workload.indexes) if of_corpus else ():
            peer.remember(document)
        for output in workload.outputs:
            peer.remember(output)
        return peer


class ArcticPeer:
    """`SuffixDecodingCache` of ArcticInference, called as vLLM calls it, with arrays throughout.

    Args:
        cache: it keeps every finished output.

    Attributes:
        settings: what it is asked with.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._ids = count()
        self._id = -1
        self.settings = ARCTIC_DEFAULTS

    def remember(self, output: TokenIds) -> None:
        """Add int32[n] to the cached outputs."""
        self.open(output[:0], 0)
        self._cache.add_active_response(self._id, np.ascontiguousarray(output))
        self._cache.stop_request(self._id)

    def open(self, prompt: TokenIds, room: int) -> None:
        """Begin a sequence; see `Peer.open`."""
        self._id = next(self._ids)
        self._text = Text(prompt, room)
        self._cache.start_request(self._id, prompt)

    def propose(self, new_tokens: TokenIds, budget: int) -> Any:
        """Append and draft; see `Peer.propose`."""
        if len(new_tokens):
            self._cache.add_active_response(self._id, new_tokens)
            self._text.append(new_tokens)
        settings = self.settings
        return self._cache.speculate(
            self._id,
            self._text.last(MAX_DEPTH),
            max_spec_tokens=budget,
            max_spec_factor=settings.max_spec_factor,
            max_spec_offset=settings.max_spec_offset,
            min_token_prob=settings.min_token_prob,
            use_tree_spec=settings.use_tree_spec,
        )

    def tree(self, proposed: Any) -> DraftTree:
        """Return the program's draft as a tree."""
        return drafted(proposed.token_ids, proposed.parents, proposed.probs)

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence; see `Peer.close`."""
        if len(new_tokens):
            self._cache.add_active_response(self._id, new_tokens)
        self._cache.stop_request(self._id)

    def best(self, choices: Iterable[Settings], traces: Sequence[Trace], budget: int) -> Settings:
        """Return the settings that do best on traces, which are forgotten again."""
        reached = {}
        for settings in choices:
            self.settings = settings
            first = next(self._ids)
            reached[settings] = replay_in_turns({"": self}, traces, budget, Turns.TRACE)[""]
            for each in range(first + 1, self._id + 1):
                self._cache.evict_cached_response(each)
        return quickest_of_the_best(reached)


class SuffixGpuPeer:
    """`SuffixGPUDrafter`, which drafts a path for each row of a batch: here one.

    Args:
        program: with its memory of finished outputs.
    """

    def __init__(self, program: Any) -> None:
        self._program = program

    def open(self, prompt: TokenIds, room: int) -> None:
        """Begin a sequence; see `Peer.open`."""
        self._text = Text(prompt, room)
        self._prompt_length = len(prompt)
        self._rows = torch.from_numpy(self._text.tokens).unsqueeze(0)

    def propose(self, new_tokens: TokenIds, budget: int) -> Any:  # noqa: ARG002  it has its k
        """Append and draft; see `Peer.propose`."""
        self._text.append(new_tokens)
        lengths = torch.tensor([self._text.length], dtype=torch.int32)
        with torch.inference_mode():
            draft, sizes = self._program.propose(lengths, self._rows)
        return draft, sizes

    def tree(self, proposed: Any) -> DraftTree:
        """Return the program's draft as a tree."""
        draft, sizes = proposed
        return path_of(draft[0, : int(sizes[0])].numpy())

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence; see `Peer.close`."""
        self._text.append(new_tokens)
        output = self._rows[0, self._prompt_length : self._text.length]
        self._program.global_index.append_documents([output])


class TransformersPeer:
    """`PromptLookupCandidateGenerator` of the installed transformers.

    Args:
        longest: tokens of the longest n-gram that it looks for.
    """

    def __init__(self, longest: int) -> None:
        module = importlib.import_module("transformers.generation.candidate_generator")
        self._generator: Any = module.PromptLookupCandidateGenerator(
            max_matching_ngram_size=longest, max_length=_NO_LIMIT
        )

    def open(self, prompt: TokenIds, room: int) -> None:
        """Begin a sequence; see `Peer.open`."""
        self._text = Text(prompt, room)
        self._ids = torch.zeros((1, len(prompt) + room), dtype=torch.int64)
        self._ids[0, : len(prompt)] = torch.from_numpy(np.array(prompt))

    def propose(self, new_tokens: TokenIds, budget: int) -> Any:
        """Append and draft; see `Peer.propose`."""
        before = self._text.length
        self._text.append(new_tokens)
        end = self._text.length
        self._ids[0, before:end] = torch.from_numpy(self._text.tokens[before:end])
        self._generator.num_output_tokens = budget
        return self._generator.get_candidates(self._ids[:, :end])[0]

    def tree(self, proposed: Any) -> DraftTree:
        """Return the program's draft as a tree."""
        return path_of(proposed[0, self._text.length :].numpy())

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence: nothing is kept."""


class LlamaCppPythonPeer:
    """`LlamaPromptLookupDecoding` of llama-cpp-python.

    Args:
        program: the class.
        longest: tokens of the longest n-gram that it looks for.
    """

    def __init__(self, program: Any, longest: int) -> None:
        self._program = program(max_ngram_size=longest)

    def open(self, prompt: TokenIds, room: int) -> None:
        """Begin a sequence; see `Peer.open`."""
        self._text = Text(prompt, room)

    def propose(self, new_tokens: TokenIds, budget: int) -> Any:
        """Append and draft; see `Peer.propose`."""
        self._text.append(new_tokens)
        self._program.num_pred_tokens = budget
        return self._program(self._text.last(self._text.length))

    def tree(self, proposed: Any) -> DraftTree:
        """Return the program's draft as a tree."""
        return path_of(proposed)

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence: nothing is kept."""


class LlamaCppPeer:
    """llama.cpp's n-gram caches, through the functions of `llama_lookup.cpp`.

    Args:
        library: the compiled functions.
        documents: int32[n] each, a corpus.
    """

    def __init__(self, library: Path, documents: Iterator[TokenIds]) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.lookup_new.restype = ctypes.c_void_p
        self._lookup = ctypes.c_void_p(self._library.lookup_new())
        for document in documents:
            self._call("add_document", document)

    def __del__(self) -> None:
        if hasattr(self, "_lookup"):
            self._library.lookup_free(self._lookup)

    def remember(self, output: TokenIds) -> None:
        """Add int32[n] to the cache of earlier sequences."""
        self.open(output[:0], 0)
        self.close(output)

    def open(self, prompt: TokenIds, room: int) -> None:  # noqa: ARG002  it grows by itself
        """Begin a sequence; see `Peer.open`."""
        self._call("open", prompt)

    def propose(self, new_tokens: TokenIds, budget: int) -> TokenIds:
        """Append and draft; see `Peer.propose`."""
        draft = np.empty(budget, np.int32)
        size = self._call("propose", new_tokens, budget, _place(draft))
        return draft[:size]

    def tree(self, proposed: TokenIds) -> DraftTree:
        """Return the program's draft as a tree."""
        return path_of(proposed)

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence; see `Peer.close`."""
        self._call("close", new_tokens)

    def _call(self, name: str, tokens: TokenIds, *more: Any) -> int:
        contiguous = np.ascontiguousarray(tokens, np.int32)
        returned: int = getattr(self._library, f"lookup_{name}")(
            self._lookup, _place(contiguous), len(contiguous), *more
        )
        return returned


class SglangPeer:
    """SGLang's n-gram corpus, through the functions of `sglang_ngram.cpp`.

    Its worker inserts the end of a sequence while the target verifies a draft, so insertions are
    not timed, and nothing of a prompt but its end is ever inserted.

    Args:
        library: the compiled functions.
        capacity: nodes of its trie.
        budget: nodes of a draft, always so many.
        of_corpus: how many of them are for documents.
        by_frequency: draft the most frequent first, not the latest.
    """

    def __init__(
        self, library: Path, capacity: int, budget: int, of_corpus: int, *, by_frequency: bool
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.ngram_new.restype = ctypes.c_void_p
        sizes = (capacity, SGLANG_DEPTH, SGLANG_BREADTH, budget + 1, of_corpus)
        corpus = self._library.ngram_new(*map(ctypes.c_int64, sizes), by_frequency)
        self._corpus = ctypes.c_void_p(corpus)
        self._ids = count()
        self._id = -1

    def __del__(self) -> None:
        if hasattr(self, "_corpus"):
            self._library.ngram_free(self._corpus)

    def add_documents(self, documents: Iterable[TokenIds]) -> None:
        """Draft from documents, int32[n] each, as well; once at most."""
        number = -1
        for number, document in enumerate(documents):
            tokens = np.ascontiguousarray(document, np.int32)
            self._library.ngram_add_document(self._corpus, _place(tokens), len(tokens), number)
        if number >= 0:
            self._library.ngram_end_documents(self._corpus)

    def insert(self, tokens: TokenIds) -> None:
        """Insert int32[n] with all their suffixes."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        self._library.ngram_insert(self._corpus, _place(tokens), len(tokens))

    def open(self, prompt: TokenIds, room: int) -> None:
        """Begin a sequence; see `Peer.open`."""
        self._id = next(self._ids)
        self._text = Text(prompt, room)

    def propose(self, new_tokens: TokenIds, budget: int) -> Any:
        """Append and draft; see `Peer.propose`."""
        self._text.append(new_tokens)
        end = self._text.last(SGLANG_DEPTH)
        tokens = np.empty(budget + 1, np.int32)
        mask = np.empty((budget + 1, budget + 1), np.uint8)
        self._library.ngram_match(
            self._corpus,
            ctypes.c_int64(self._id),
            _place(end),
            len(end),
            ctypes.c_int64(self._text.length),
            _place(tokens),
            _place(mask),
        )
        return tokens, mask

    def tree(self, proposed: Any) -> DraftTree:
        """Return the draft as a tree, and insert the sequence's end as the worker does now."""
        tokens, mask = proposed
        self.insert(self._text.last(SGLANG_DEPTH))
        # The nearest ancestor is the last one before a node; the first node is the root.
        ancestors = np.tril(mask, -1) * np.arange(len(tokens))
        parents = ancestors.max(axis=1)[1:] - 1
        return drafted(tokens[1:], parents, np.ones(len(parents)))

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence; see `Peer.close`."""
        self._text.append(new_tokens)
        self.insert(self._text.last(SGLANG_DEPTH))
        self._library.ngram_erase(self._corpus, ctypes.c_int64(self._id))


def _sglang_nodes(workload: Workload) -> int:
    """Return the most nodes that its trie can come to need; it has room for all from the start."""
    lengths = [len(each) for each in workload.outputs]
    lengths += [len(each.output) + SGLANG_DEPTH for each in workload.traces]
    return SGLANG_DEPTH * sum(lengths) + 1024


def _place(array: Any) -> ctypes.c_void_p:
    """Return where an array's first element is; nothing of it is copied."""
    return ctypes.c_void_p(array.ctypes.data)


def _best_ngram(traces: Sequence[Trace], budget: int) -> int:
    """Return the longest n-gram with which prompt lookup takes the fewest steps.

    Found by our reading, which drafts the same and takes a fraction of the programs' time.
    """
    steps = {}
    for longest in LONGEST_NGRAMS:
        peer = DrafterPeer(PromptLookup(longest))
        steps[longest] = replay_in_turns({"": peer}, traces, budget, Turns.TRACE)[""].steps
    return min(steps, key=lambda longest: steps[longest])


def quickest_of_the_best(reached: Mapping[Choice, Tally]) -> Choice:
    """Return the choice of the lowest median time among those of `LEVEL` most tokens per step."""
    most = max(tally.tokens_per_step for tally in reached.values())
    level = [each for each, tally in reached.items() if tally.tokens_per_step >= LEVEL * most]
    return min(level, key=lambda each: float(np.median(reached[each].draft_us)))


def in_words(settings: Settings) -> str:
    """Return settings of suffix trees as they stand in reports."""
    shape = "trees" if settings.use_tree_spec else "paths"
    factor = settings.max_spec_factor
    size = f"{factor:g} times the match" if factor else "the whole budget"
    return f"{shape} of up to {size}, probability {settings.min_token_prob:g} and more"


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
