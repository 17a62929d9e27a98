"""Small random corpora, outputs and sequences, as kernels take them and as twins do."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.format.documents import DocumentTableBuilder
from indexer.format.names import separator_of, token_dtype
from indexer.format.opening import Segment
from indexer.reader import PhraseTables
from retriever.kernels.candidates import slots_for
from retriever.kernels.evidence import gather, plant
from retriever.kernels.layout import (
    FLOAT32,
    INT32,
    MAX_MATCH,
    UINT8,
    Evidence,
    Grown,
    Scratch,
    Tables,
)
from retriever.kernels.tree_growth import grow_tree
from retriever.predict.context import Context
from retriever.predict.generations import Generations
from retriever.predict.searched_corpus import to_kernel
from retriever.predict.weights import Weights
from retriever.tree import DraftTree
from tests.indexer.stages.phrase_reading import build_tables
from tests.retriever.kernels.twins import row_twins as twins
from tests.retriever.kernels.twins.evidence_twin import EvidenceTwin

DEPTH = 8
MAX_BUDGET = 24
ESCAPE = 0.03

Grow = Callable[..., int]
"""`grow_tree`, however compiled."""


@dataclass
class World:
    """What one node's evidence is gathered from.

    Attributes:
        alphabet: the token ids that occur, more or less often; the last one in the sequence only.
        phrases: tables of a corpus.
        tables: the same as kernels read them.
        generations: generations.
        sequence: the sequence itself.
        context: the same as kernels read it.
        rows: weighed evidence.
        scratch: where `gather` works.
    """

    alphabet: list[int]
    phrases: PhraseTables
    tables: Tables
    generations: Generations
    sequence: list[int]
    context: Context
    rows: list[twins.Row]
    scratch: Scratch

    @property
    def query(self) -> NDArray[np.int32]:
        """The last tokens of the sequence."""
        return self.context.last(MAX_MATCH)

    def plant(self) -> None:
        """Make node 0 the root."""
        twins.fill(self.scratch, self.rows)
        plant(self.scratch.rows, len(self.rows), self.context.chains, self.scratch.work.nodes)

    def gather(self, current: int, num_nodes: int) -> int:
        """Gather for a node, whose traits then stand first; return the node count."""
        return int(
            gather(
                self.scratch.rows, self.scratch.continuations, self.tables, self.generations.live,
                self.context.chains, ESCAPE, self.scratch.work, slots_for(len(self.rows)), current,
                num_nodes,
            )
        )  # fmt: skip

    def grow(
        self, weights: Weights, budget: int, min_probability: float, by: Grow = grow_tree
    ) -> DraftTree:
        """Return the tree that a kernel grows, having checked that it is one."""
        twins.fill(self.scratch, self.rows)
        before = [array.tobytes() for array in self.tables]
        grown = Grown(*(np.zeros(MAX_BUDGET, dtype) for dtype in (INT32, INT32, FLOAT32, UINT8)))
        size = by(
            self.scratch.found, len(self.rows), self.context.chains, self.generations.live,
            self.tables, weights, ESCAPE, self.scratch.work, grown, budget,
            min_probability,
        )  # fmt: skip
        assert [array.tobytes() for array in self.tables] == before
        assert (self.scratch.work.slots == -1).all()
        arrays = (array[:size] for array in grown)
        return DraftTree.checked(*arrays, vocabulary_size=self.phrases.vocabulary_size)

    def twin(self) -> EvidenceTwin:
        """The twin that gathers from the same."""
        chains = self.context.chains
        num_buckets, num_last = chains.heads.shape[1], len(chains.last)
        return EvidenceTwin(self.phrases, self.generations, self.sequence, num_buckets, num_last)


def writable(arrays: Tables) -> Tables:
    """The same in memory that could be written to: as kernels unpack it, who never write there.

    They would be compiled anew for arrays that are marked as read only.
    """
    return Tables(*(np.array(array) for array in arrays))


def tables_of_tokens(tokens: list[int], vocabulary_size: int) -> PhraseTables:
    """The indexer's tables of one document."""
    dtype = token_dtype(vocabulary_size)
    array = np.array([*tokens, separator_of(dtype)], dtype)
    suffixes = np.array(twins.sort_suffixes(array.tolist(), separator_of(dtype)), np.uint32)
    starts = np.searchsorted(array[suffixes], np.arange(vocabulary_size + 1)).astype(np.uint32)
    return build_tables(
        [Segment("0", array, suffixes, starts, DocumentTableBuilder().table())], vocabulary_size
    )


def random_world(rng: np.random.Generator, *, max_nodes: int = 1 << 12) -> World:
    """A corpus, outputs and a sequence that have most of their tokens in common."""
    vocabulary_size = int(rng.choice([40, 300, 70_000]))  # the last one has tokens of four bytes
    alphabet = rng.choice(vocabulary_size, int(rng.integers(2, 38)), replace=False).tolist()
    known = alphabet[:-1]
    phrases = tables_of_tokens(skewed(rng, known, int(rng.integers(1, 400))), vocabulary_size)
    generations = Generations(1024)
    for _ in range(int(rng.integers(0, 6))):
        generations.add(np.array(skewed(rng, known, int(rng.integers(1, 200))), np.int32))
    sequence = skewed(rng, alphabet, int(rng.choice([1, 2, 3, 20, 100, 3000])))
    return World(
        alphabet, phrases, writable(to_kernel(phrases)), generations, sequence,
        Context(np.array(sequence, np.int32)), random_rows(rng, alphabet),
        Scratch(MAX_BUDGET, max_rows=64, max_nodes=max_nodes),
    )  # fmt: skip


def skewed(rng: np.random.Generator, alphabet: list[int], size: int) -> list[int]:
    """Tokens of which the first of the alphabet are the most frequent."""
    places = (len(alphabet) * rng.random(size) ** 3).astype(np.int64)
    return [alphabet[place] for place in places]


def random_rows(rng: np.random.Generator, alphabet: list[int]) -> list[twins.Row]:
    return [
        twins.Row(
            tuple(skewed(rng, alphabet, int(rng.integers(1, DEPTH + 1)))),
            int(rng.integers(1, MAX_MATCH + 1)),
            1.0,
            int(rng.integers(1, 5)),
            float(rng.uniform(1e-4, 0.03)),
            float(rng.uniform(1, 20)),
        )
        for _ in range(int(rng.choice([0, 1, 5, 30])))
    ]


def evidence_of(world: World, first: int, end: int) -> dict[int, list[float]]:
    """What was gathered for each candidate, by its token."""
    work = world.scratch.work
    tokens = work.nodes["token"][first:end].tolist()
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, work.evidence[first:end, : Evidence.SIZE].tolist(), strict=True))
