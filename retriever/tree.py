"""The draft tree: the value that drafters return and verifiers take."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retriever.errors import InvalidTreeError

ROOT: Final = -1
"""Parent of the first drafted tokens: the last committed token."""

PROBABILITY_SLACK: Final = 1e-6
"""Tolerance of bounds on probabilities: a few rounding errors of float32."""


MAX_SOURCES: Final = 16
"""Upper bound of source numbers: the length of arrays indexed by source.

Nine numbers are in use: for six databases, models, grammars and "unspecified". Each number costs
140 bytes of every tenant's weights.
"""


class _Listing(type):
    """The type of a class that can be iterated over: its members, in the order of their numbers."""

    def __iter__(cls) -> Iterator["Source"]:
        return iter(_SOURCES)

    def __len__(cls) -> int:
        return len(_SOURCES)


_SOURCES: Final[list["Source"]] = []


class Source(int, metaclass=_Listing):
    """The database that proposed a node, as a registered number.

    The numbers are those of the wire contract, without gaps: all below `len(Source)` are
    registered. `Source(2)` is the source with number 2, and `for source in Source` iterates over
    all sources. All data by source (weights, counters, labels) is in this order.

    `MODEL` is a draft model, or the target's own logits of earlier passes.

    Attributes:
        name: name in capitals, as in the wire contract; weights are stored under it.
        colour: colour on charts; empty for sources that are not a database of a service.
    """

    UNSPECIFIED: ClassVar["Source"]
    CONTEXT: ClassVar["Source"]
    GENERATIONS: ClassVar["Source"]
    PHRASES: ClassVar["Source"]
    CORPUS: ClassVar["Source"]
    MODEL: ClassVar["Source"]
    PREDICTIONS: ClassVar["Source"]
    SIBLINGS: ClassVar["Source"]
    GRAMMAR: ClassVar["Source"]

    name: str
    colour: str

    def __new__(cls, number: int) -> "Source":  # noqa: PYI034  (there are no subclasses)
        """Return the source with a number.

        Raises:
            ValueError: the number is not registered.
        """
        if not 0 <= number < len(_SOURCES):
            raise ValueError(f"{number} is not a source: {len(_SOURCES)} are registered")
        return _SOURCES[number]

    @classmethod
    def register(cls, number: int, name: str, colour: str = "") -> "Source":
        """Add a source, before the first draft.

        Args:
            number: the next free number; numbers are never reused.
            name: name in capitals.
            colour: `#rrggbb`, for a database that a service drafts from.

        Raises:
            ValueError: the number is not the next one, or the name is taken or not in capitals.
        """
        if number != len(_SOURCES) or number >= MAX_SOURCES:
            raise ValueError(
                f"source {name} cannot have number {number}: the next one is {len(_SOURCES)}, "
                f"and {MAX_SOURCES - 1} is the last"
            )
        if not (name.isidentifier() and name.isupper() and name.isascii()) or hasattr(cls, name):
            raise ValueError(f"a source cannot be named {name!r}: take another name, in capitals")
        source = int.__new__(cls, number)
        source.name, source.colour = name, colour
        _SOURCES.append(source)
        setattr(cls, name, source)
        return source

    @property
    def label(self) -> str:
        """The name for display."""
        return self.name.lower()

    def __repr__(self) -> str:
        return f"Source.{self.name}"

    def __str__(self) -> str:
        return str(int(self))


# From Okabe and Ito's palette, which is safe for colour blindness.
Source.register(0, "UNSPECIFIED")
Source.register(1, "CONTEXT", "#0072b2")
Source.register(2, "GENERATIONS", "#e69f00")
Source.register(3, "PHRASES", "#009e73")
Source.register(4, "CORPUS", "#cc79a7")
Source.register(5, "MODEL")
Source.register(6, "PREDICTIONS", "#d55e00")
Source.register(7, "SIBLINGS", "#f0e442")
Source.register(8, "GRAMMAR")


def drafted_sources() -> list[Source]:
    """Return the databases that a service drafts from."""
    return [source for source in Source if source.colour]


_INT32, _FLOAT32, _UINT8 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)
NODE_BYTES: Final = 4 + 4 + 4 + 1
"""Bytes of a node of a packed tree: token id, parent, probability and source."""


class DraftTree:
    """Continuations of a sequence as a tree, most probable node first.

    Parents precede their children, and probabilities do not rise from node to node. So every prefix
    of a tree is a valid tree, and the best one of its size. Trees from outside are built by
    `checked`; the constructor trusts its arguments. A tree is an immutable value.

    Attributes:
        token_ids: int32[N], the drafted tokens.
        parents: int32[N], index of the parent node, `ROOT` for children of the last
            committed token.
        probabilities: float32[N], estimated probability that the node and all its ancestors are
            accepted.
        sources: uint8[N], the `Source` that proposed each node.
    """

    __slots__ = ("_block", "_parents", "_probabilities", "_size", "_sources", "_token_ids")

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        parents: NDArray[np.int32],
        probabilities: NDArray[np.float32],
        sources: NDArray[np.uint8],
    ) -> None:
        self._block: bytes | bytearray | None = None
        self._size = len(token_ids)
        self._token_ids: NDArray[np.int32] | None = token_ids
        self._parents: NDArray[np.int32] | None = parents
        self._probabilities: NDArray[np.float32] | None = probabilities
        self._sources: NDArray[np.uint8] | None = sources

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32[N], the drafted tokens."""
        if self._token_ids is None:
            self._token_ids = np.ndarray(self._size, _INT32, self._block)
        return self._token_ids

    @property
    def parents(self) -> NDArray[np.int32]:
        """int32[N], index of the parent node of each node."""
        if self._parents is None:
            self._parents = self._array(_INT32, 4)
        return self._parents

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """float32[N], estimated probability of each node."""
        if self._probabilities is None:
            self._probabilities = self._array(_FLOAT32, 8)
        return self._probabilities

    @property
    def sources(self) -> NDArray[np.uint8]:
        """uint8[N], source of each node."""
        if self._sources is None:
            self._sources = self._array(_UINT8, 12)
        return self._sources

    def _array(self, dtype: np.dtype[Any], before: int) -> NDArray[Any]:
        """Return the array of the block that starts after `before` bytes for each node."""
        block = self._block or b""
        begin = len(block) // NODE_BYTES * before
        return np.ndarray(self._size, dtype, block, begin)

    def packed(self) -> bytes:
        """Return 13 bytes for each node: all ids, all parents, all probabilities, all sources."""
        block = self._block
        if block is not None and len(block) == NODE_BYTES * self._size:
            return bytes(block)
        arrays = (self.token_ids, self.parents, self.probabilities, self.sources)
        return b"".join([each.tobytes() for each in arrays])

    def __repr__(self) -> str:
        return (
            f"DraftTree(token_ids={self.token_ids!r}, parents={self.parents!r}, "
            f"probabilities={self.probabilities!r}, sources={self.sources!r})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return DraftTree, (self.token_ids, self.parents, self.probabilities, self.sources)

    @classmethod
    def empty(cls) -> Self:
        """Return the tree without nodes: no draft."""
        return cls(
            np.empty(0, np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.empty(0, np.uint8),
        )

    @classmethod
    def checked(
        cls,
        token_ids: ArrayLike,
        parents: ArrayLike,
        probabilities: ArrayLike,
        sources: ArrayLike,
        *,
        vocabulary_size: int | None = None,
    ) -> Self:
        """Build a tree from untrusted arrays.

        Raises:
            InvalidTreeError: the arrays violate a rule of the tree; the message says which.
        """
        tree = cls(
            _array(token_ids, np.int32, "token_ids"),
            _array(parents, np.int32, "parents"),
            _array(probabilities, np.float32, "probabilities"),
            _array(sources, np.uint8, "sources"),
        )
        _check_values(tree, vocabulary_size)
        _check_structure(tree)
        return tree

    def __len__(self) -> int:
        return self._size

    def depths(self) -> NDArray[np.int32]:
        """Return int32[N], the distance of each node from the root: 1 for its children."""
        depths = np.empty(len(self), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = 1 if parent == ROOT else depths[parent] + 1
        return depths

    def prefix(self, num_nodes: int) -> "DraftTree":
        """Return the tree of the first `num_nodes` nodes: the best one of that size."""
        if num_nodes >= len(self):
            return self
        return DraftTree(
            self.token_ids[:num_nodes],
            self.parents[:num_nodes],
            self.probabilities[:num_nodes],
            self.sources[:num_nodes],
        )

    def among(self, kept: NDArray[np.bool_]) -> "DraftTree":
        """Return the tree of the nodes in `kept`, bool[N], which must include their parents."""
        renumbered = np.append(np.cumsum(kept, dtype=np.int32) - 1, np.int32(ROOT))
        return DraftTree(
            self.token_ids[kept],
            renumbered[self.parents[kept]].astype(np.int32),
            self.probabilities[kept],
            self.sources[kept],
        )

    def best_chain(self, max_tokens: int) -> "DraftTree":
        """Return the path from the root with the highest expected number of accepted tokens.

        That number is the sum of the path's probabilities. This is for verifiers that take only
        chains; a chain is a tree, too.
        """
        expected = self.probabilities.astype(np.float64)
        depths = self.depths()
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                expected[node] += expected[parent]
        within = np.flatnonzero(depths <= max_tokens)
        if len(within) == 0:
            return DraftTree.empty()
        path = self.path_to(int(within[np.argmax(expected[within])]))
        parents = np.arange(-1, len(path) - 1, dtype=np.int32)
        return DraftTree(
            self.token_ids[path], parents, self.probabilities[path], self.sources[path]
        )

    def follow(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return int64[k], the nodes of the longest path that is a prefix of the tokens.

        Args:
            tokens: integers[n], the tokens after the last committed one.
        """
        path: list[int] = []
        current, wanted = ROOT, tokens[: len(self)].tolist()
        nodes = enumerate(zip(self.parents.tolist(), self.token_ids.tolist(), strict=True))
        for node, (parent, token) in nodes:
            if parent == current and len(path) < len(wanted) and token == wanted[len(path)]:
                path.append(node)
                current = node
        return np.array(path, np.int64)

    def path_to(self, node: int) -> NDArray[np.int64]:
        """Return int64[depth], the nodes from the root's child down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = int(self.parents[node])
        return np.array(path[::-1], np.int64)


class BlockTree(DraftTree):
    """A tree of the first nodes of a block; its arrays are made on first access.

    Args:
        block: n packed nodes: all ids, all parents, all probabilities, all sources; not copied.
        size: number of nodes in the tree.
    """

    __slots__ = ()

    def __init__(self, block: bytes | bytearray, size: int) -> None:
        self._block, self._size = block, size
        self._token_ids = self._parents = self._probabilities = self._sources = None


def _array(values: ArrayLike, dtype: type[np.generic], name: str) -> NDArray[Any]:
    """Convert values to an array without loss, or raise `InvalidTreeError`."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, dtype)
    if array.ndim != 1:
        raise InvalidTreeError(f"{name} must have one dimension, not {array.ndim}")
    converted = array.astype(dtype)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(converted, array):
        raise InvalidTreeError(f"{name} does not fit {np.dtype(dtype).name}")
    return converted


def _check_values(tree: DraftTree, vocabulary_size: int | None) -> None:
    sizes = {len(tree.token_ids), len(tree.parents), len(tree.probabilities), len(tree.sources)}
    if len(sizes) != 1:
        raise InvalidTreeError(f"arrays of a tree differ in length: {sorted(sizes)}")
    if len(tree) == 0:
        return
    if tree.token_ids.min() < 0:
        raise InvalidTreeError("token ids must not be negative")
    if vocabulary_size is not None and tree.token_ids.max() >= vocabulary_size:
        raise InvalidTreeError(
            f"token id {tree.token_ids.max()} is outside the vocabulary of {vocabulary_size}"
        )
    if not np.all((tree.probabilities >= 0) & (tree.probabilities <= 1 + PROBABILITY_SLACK)):
        raise InvalidTreeError("probabilities must lie between 0 and 1")
    if tree.sources.max() >= len(Source):
        raise InvalidTreeError(f"unknown source {tree.sources.max()}")


def _check_structure(tree: DraftTree) -> None:
    nodes = np.arange(len(tree))
    if np.any(tree.parents < ROOT) or np.any(tree.parents >= nodes):
        raise InvalidTreeError("every parent must be the root (-1) or an earlier node")
    if np.any(np.diff(tree.probabilities) > PROBABILITY_SLACK):
        raise InvalidTreeError("nodes must stand in order of falling probability")
    siblings = np.stack([tree.parents, tree.token_ids])
    if np.unique(siblings, axis=1).shape[1] != len(tree):
        raise InvalidTreeError("two children of one node carry the same token")


@dataclass(frozen=True, slots=True)
class DocumentOccurrence:
    """A position in an indexed document.

    Attributes:
        index: name of the index.
        name: name of the document, as it was indexed.
        licence: licence of the document; empty if unknown.
        position: position of the drafted token in the document, in tokens from 0.
    """

    index: str
    name: str
    licence: str
    position: int


@dataclass(frozen=True, slots=True)
class PredictedPlace:
    """A position in a prediction.

    Attributes:
        label: label of the prediction; empty if it has none.
        position: position of the drafted token in it, in tokens from 0.
    """

    label: str
    position: int


@dataclass(frozen=True, slots=True)
class NodeProvenance:
    """The evidence for one node: earlier places where its token followed the same tokens.

    Attributes:
        match_length: number of tokens before the node, in the context and on its path, that also
            precede its token at these places.
        count: number of such places in the node's source.
        context_positions: a few positions in the context, if the node comes from the context.
        documents: some documents with such a place, each once, if the node comes from an index.
        predictions: a few positions in predictions, if the node comes from predictions.
    """

    match_length: int
    count: int
    context_positions: tuple[int, ...] = ()
    documents: tuple[DocumentOccurrence, ...] = ()
    predictions: tuple[PredictedPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """A draft tree and the evidence for each node, in order."""

    tree: DraftTree
    nodes: tuple[NodeProvenance, ...]

    def as_json(self, text_of: Callable[[int], str] | None = None) -> list[dict[str, Any]]:
        """Return an object for each node, in order.

        Args:
            text_of: returns the text of a token; without it, texts are None.
        """
        columns = (self.tree.token_ids, self.tree.parents, self.tree.probabilities)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        sources = map(Source, self.tree.sources.tolist())
        return [
            {
                "token_id": token,
                "text": text_of(token) if text_of is not None else None,
                "parent": parent,
                "probability": probability,
                "source": source.label,
                **asdict(node),
            }
            for (token, parent, probability), source, node in zip(
                rows, sources, self.nodes, strict=True
            )
        ]
