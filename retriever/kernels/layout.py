"""Records shared by kernels, the scratch memory of a draft, and packing of arrays for calls.

Passing an array from Python takes up to 0.2 microseconds, and a draft uses about fifty arrays. So
we pack the arrays of named tuples into one record of their addresses. A kernel unpacks the named
tuples that it needs. The caller must keep the arrays alive and in place while the record is in
use.
"""

import math
from array import array
from ctypes import addressof, c_char
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from retriever.tree import MAX_SOURCES

_Arrays = TypeVar("_Arrays", bound=NamedTuple)


def pack(*tuples: NamedTuple) -> NDArray[Any]:
    """Return one record: the address and shape of each C-contiguous array.

    For each array, the record also has an unset field of its element type, which `unpack` reads.

    Args:
        tuples: named tuples of arrays; no two arrays have the same name.

    Raises:
        ValueError: an array is not contiguous, or has the same name as another.
    """
    named = [(name, each) for of in tuples for name, each in zip(of._fields, of, strict=True)]
    dtype, places = _layout(tuple((name, each.ndim, each.dtype) for name, each in named))
    words = [0] * (dtype.itemsize // 8)
    for place, (name, each) in zip(places, named, strict=True):
        if not each.flags.c_contiguous:
            raise ValueError(f"{name} cannot be packed: it is not C-contiguous")
        words[place : place + 1 + each.ndim] = address_of(each), *each.shape
    return np.frombuffer(array("q", words), dtype)


def address_of(of: NDArray[Any]) -> int:
    """Return the address of an array, three times faster than numpy's own attribute."""
    try:
        return addressof(_exported(of))
    except (TypeError, ValueError):  # it is read-only or empty
        return of.ctypes.data


_exported: Final = c_char.from_buffer


@cache
def _layout(kinds: tuple[tuple[str, int, np.dtype[Any]], ...]) -> tuple[np.dtype[Any], list[int]]:
    """Return the type of the record for arrays with these names, dimensions and element types.

    Also returns the offset of each array in the record, in words of eight bytes. Equal types share
    one object: numba needs a microsecond to compare an argument type that is a different object.

    Raises:
        ValueError: two arrays have the same name.
    """
    names = [name for name, _, _ in kinds]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]} cannot be packed: another array has this name")
    fields = [
        (name, [("address", np.int64), ("shape", np.int64, (ndim,)), ("element", element)])
        for name, ndim, element in kinds
    ]
    dtype: np.dtype[Any] = np.dtype(fields, align=True)
    offsets: Any = dtype.fields
    return dtype, [offsets[name][1] // 8 for name in names]


if TYPE_CHECKING:

    def unpack(record: Any, kind: type[_Arrays]) -> _Arrays:
        """Return the arrays of a record that are fields of the named tuple `kind`."""
        ...

    def unpack_at(address: int, layout: np.dtype[Any], kind: type[_Arrays]) -> _Arrays:
        """Do what `unpack` does, for a record of this layout at an address."""
        ...

    def record_at(address: int, layout: np.dtype[Any]) -> Any:
        """Return the record of this layout at an address."""
        ...

    def array_at(address: int, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the array of `length` elements at an address."""
        ...

else:

    @intrinsic
    def unpack(_context: Any, record: types.Record, kind: types.NamedTupleClass) -> Any:
        """Return the arrays of a record that are fields of the named tuple `kind`."""
        result, generate = _unpacking(record, kind)
        return result(record, kind), generate

    @intrinsic
    def unpack_at(
        _context: Any, address: types.Integer, layout: types.DType, kind: types.NamedTupleClass
    ) -> Any:
        """Do what `unpack` does, for a record of this layout at an address."""
        result, at_record = _unpacking(layout.dtype, kind)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            record = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
            return at_record(context, builder, signature, [record])

        return result(address, layout, kind), generate

    @intrinsic
    def record_at(_context: Any, address: types.Integer, layout: types.DType) -> Any:
        """Return the record of this layout at an address."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = context.get_value_type(signature.return_type)
            return builder.inttoptr(arguments[0], place)

        return layout.dtype(address, layout), generate

    @intrinsic
    def array_at(
        _context: Any, address: types.Integer, length: types.Integer, dtype: types.DType
    ) -> Any:
        """Return the array of `length` elements at an address."""
        kind = types.Array(dtype.dtype, 1, "C")

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number, array = ir.IntType(64), context.make_array(kind)(context, builder)
            size = context.cast(builder, arguments[1], signature.args[1], types.int64)
            itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
            begin = builder.inttoptr(arguments[0], array.data.type)
            populate_array(array, begin, [size], [number(itemsize)], itemsize, None)
            return array._getvalue()  # noqa: SLF001

        return kind(address, length, dtype), generate


def _unpacking(record: Any, kind: Any) -> tuple[Any, Any]:
    """Return the unpacked type, and the function that emits code for unpacking."""
    names = kind.instance_class._fields
    packed = [record.typeof(name) for name in names]
    array_type: Any = types.Array  # numba's type hints for both are wrong
    named_tuple: Any = types.NamedTuple
    kinds = [array_type(of.typeof("element"), *of.typeof("shape").shape, "C") for of in packed]
    result = named_tuple(kinds, kind.instance_class)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        arrays = [
            _array_at(context, builder, arguments[0], record.offset(name), of, array)
            for name, of, array in zip(names, packed, kinds, strict=True)
        ]
        return context.make_tuple(builder, result, arrays)

    return result, generate


def _array_at(
    context: Any, builder: Any, record: Any, offset: int, packed: types.Record, kind: types.Array
) -> Any:
    """Emit code that builds an array from its packed form at an offset in a record."""
    number = ir.IntType(64)

    def load(offset: int) -> Any:
        start = builder.bitcast(record, ir.IntType(8).as_pointer())
        place = builder.gep(start, [number(offset)])
        return builder.load(builder.bitcast(place, number.as_pointer()))

    array = context.make_array(kind)(context, builder)
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    shape_at = offset + packed.offset("shape")
    shape = [load(shape_at + 8 * axis) for axis in range(kind.ndim)]
    strides = [number(itemsize)]
    for extent in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], extent))
    address = builder.inttoptr(load(offset + packed.offset("address")), array.data.type)
    populate: Any = populate_array
    populate(array, address, shape, strides, itemsize, None)
    return array._getvalue()  # noqa: SLF001


CACHE_LINE: Final = 64
"""Number of bytes that memory transfers at once."""


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
    """Return zeros aligned to a cache line, so that records of that size occupy one line each.

    Numpy aligns its own arrays to only 16 bytes, so such records would cross lines.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    begin = -address_of(memory) % CACHE_LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


MAX_MATCH: Final = 32
"""Longest match that is counted, in tokens."""

FEW: Final = 128
"""If an end of the query has at most this many occurrences in a segment, we read them all to find
longer matches. These reads overlap, but the reads of a search wait for each other. 32 and 64 are
slower, and 256 is no faster."""

RECENT_SIZE: Final = 1 << 12
"""Entries in the table of recent tokens; the index is the token id modulo this size."""

MAX_FOLLOWERS: Final = 8
"""Most occurrences in the sequence that we read for one node."""

NUM_RANKS: Final = 256
"""Number of ranks for sorting probabilities; a rank covers a sixteenth of an octave."""

MAX_SUCCESSORS: Final = 92
"""Most candidates of a node that are not from rows: 64 from the phrase tables, 12 from the sequence
and 16 from generations."""

NUM_TABLE_ORDERS: Final = 3
"""Longest context in the phrase tables, in tokens."""

ROW: Final = np.dtype(
    [
        ("length", np.int32),  # tokens in the row's continuation
        ("match", np.int32),  # tokens that matched before the continuation
        ("source", np.int32),  # database that the row comes from
        ("next", np.int32),  # next row at the same node of the tree, -1 for none
        ("position", np.int64),  # the continuation's position in its store; chains and cursors only
        ("count", np.float64),  # number of occurrences that the row represents
        ("weight", np.float64),  # the row's share in the prediction
        ("similarity", np.float64),  # 1 or more: similarity of the text before it to the context
    ],
    align=True,
)
"""One occurrence of the context's end; `continuations` holds the tokens after it."""

NODE: Final = np.dtype(
    [
        ("token", np.int32),
        ("before", np.int32),  # the token before it in the sequence, -1 for none
        ("earlier", np.int32),  # the token before that
        ("pair", np.int32),  # entry of (before, token) in the phrase tables; -1: none, -2: unknown
        ("triple", np.int32),  # entry of (earlier, before, token)
        ("parent", np.int32),  # its parent candidate, 0 for the root
        ("depth", np.int32),
        ("first_row", np.int32),
        ("last_row", np.int32),
        ("slot", np.int16),  # the token's slot in the table of siblings
        ("is_called", np.int16),  # whether its data has been prefetched
        ("place", np.int32),  # index in the tree, -1 for the root and for nodes outside it
        ("source", np.int16),
        ("dominant", np.int16),  # database of the longest match that agrees with the path
        ("first_child", np.int32),  # its children are candidates first_child to end_child
        ("end_child", np.int32),  # 0 until its children are computed
        ("heaviest", np.float32),  # weight of its heaviest row, which determines its source
        ("probability", np.float32),
    ],
    align=True,
)
"""One candidate for the tree, in 64 bytes; candidate 0 is the root."""


class _EvidenceColumns(NamedTuple):
    """Columns of evidence about candidates: sums at first, features once all rows are added."""

    ROWS: int = 0  # weight of the candidate's rows, later their probability for the candidate
    LIVE: int = 1  # the tables' estimate, corrected by generations and the sequence
    CORPUS: int = 2  # the phrase tables' estimate
    SIMILAR: int = 3  # like ROWS, but occurrences in similar text count more
    RECENCY: int = 4  # distance to the candidate's last occurrence in the sequence
    UNIGRAM: int = 5  # the candidate's share in the corpus
    SIZE: int = 6
    WIDTH: int = 8  # padded, so that a row is half a cache line


Evidence: Final = _EvidenceColumns()


class _TraitColumns(NamedTuple):
    """Columns of a node's features: the amount of evidence of each kind."""

    MATCH: int = 0
    DEPTH: int = 1
    ROWS: int = 2
    CORPUS_3: int = 3
    CORPUS_2: int = 4
    CORPUS_1: int = 5
    LIVE_3: int = 6
    LIVE_2: int = 7
    CONTEXT_2: int = 8
    CONTEXT_1: int = 9
    SIZE: int = 10


Traits: Final = _TraitColumns()


HIDDEN: Final = 16
MATCH_BUCKETS: Final = 7
DEPTH_BUCKETS: Final = 5

WEIGHTS: Final = np.dtype(
    [
        ("evidence", np.float32, (Evidence.SIZE, HIDDEN)),
        ("traits", np.float32, (Traits.SIZE, HIDDEN)),
        ("bias", np.float32, (HIDDEN,)),
        ("output", np.float32, (HIDDEN,)),
        ("escape_traits", np.float32, (Traits.SIZE, HIDDEN)),
        ("escape_bias", np.float32, (HIDDEN,)),
        ("escape_output", np.float32, (HIDDEN,)),
        ("escape", np.float32, (MAX_SOURCES, MATCH_BUCKETS, DEPTH_BUCKETS)),
    ]
)
"""Weights that mix evidence. One hidden layer scores a candidate. Another scores the escape, "none
of these". `escape` adds a bias to the escape score, by dominant source, match length and depth.
Scores are logarithms to base 2. `retriever.predict.weights` defines the stored form."""

PRIOR: Final = np.dtype(
    [
        ("trust", np.float64, (MAX_SOURCES,)),
        ("backoff", np.float64),
        ("escape", np.float64),
    ]
)
"""Relative weights of rows before mixing; see `predict.draft.Prior`."""

SEGMENT_LIMITS: Final = np.dtype(
    [
        ("source", np.int64),  # database that rows are marked with
        ("shortest", np.int64),  # shortest match to look for; 1 or more
        ("samples", np.int64),  # most occurrences to read for each match length
        ("enough", np.int64),  # shorter matches are not searched once a length occurs this often
        ("key_stride", np.int64),  # distance between suffixes that have a key
        ("key_bits", np.int64),  # number of bits for each token in a key
    ]
)
"""Parameters for searching a segment of the corpus."""


class Tables(NamedTuple):
    """The arrays of phrase tables (`indexer.reader.PhraseTables`) in the form that kernels take."""

    starts1: NDArray[np.uint32]
    starts2: NDArray[np.uint32]
    starts3: NDArray[np.uint32]
    tokens2: NDArray[Any]
    tokens3: NDArray[Any]
    tokens4: NDArray[Any]
    counts1: NDArray[np.uint8]
    counts2: NDArray[np.uint8]
    counts3: NDArray[np.uint8]
    counts4: NDArray[np.uint8]
    values: NDArray[np.float32]  # float32[256], the count that each code represents
    shares: NDArray[np.float32]  # float32[vocabulary], share of each token in the corpus
    rarity: NDArray[np.float32]  # float32[vocabulary], from 0 (frequent token) to 1 (rare token)


class Chains(NamedTuple):
    """The arrays of a store with hash chains; see `kernels.chains`.

    Attributes:
        tokens: int32[capacity], a ring; the capacity is a power of two.
        heads: int32[orders, buckets], low 31 bits of the newest position of each bucket, -1 for
            none.
        links: int32[orders, capacity], distance to the previous position, 0 for none.
        state: int64[3], the next position, the start of the current document, and the oldest
            position that may be read.
        last: int32[power of two], last position of the tokens whose id modulo the size is this
            index, -1 for none. Only used for sequences, whose rings never wrap.
    """

    tokens: NDArray[np.int32]
    heads: NDArray[np.int32]
    links: NDArray[np.int32]
    state: NDArray[np.int64]
    last: NDArray[np.int32]


class Orders(NamedTuple):
    """The n-grams that a store indexes.

    Attributes:
        orders: int64[orders], lengths of the n-grams, longest first.
        max_rows: int64[orders], most rows that each order may add to a draft.
    """

    orders: NDArray[np.int64]
    max_rows: NDArray[np.int64]


LANE_BLOCK: Final = 16
"""Tokens in a block of a lane, a power of two. Other groups of a tenant see only full blocks."""

BLOCK: Final = np.dtype(
    [
        ("number", np.int64),  # number of the block stored here, from 0
        ("previous", np.int64),  # number of its lane's previous block, -1 for none
        ("next", np.int64),  # number of its lane's next block, -1 for none
        ("lane", np.int64),  # number of its lane, -1 after the lane is withdrawn
        ("group", np.int64),  # group of its lane, more than 0
        ("version", np.int64),  # version of the model that writes its lane, -1 if not stated
        ("used", np.int32),  # number of tokens in it
        ("skipped", np.int32),  # number of prompt tokens in it; no n-gram that ends there is linked
        ("is_shared", np.int32),  # whether all groups may see it once it is full
    ],
    align=True,
)
"""A block of a lane: `LANE_BLOCK` tokens, in 64 bytes."""


class Lanes(NamedTuple):
    """Texts that are written concurrently, in blocks of one ring; see `kernels.chains`.

    Positions are absolute: block n starts at n * LANE_BLOCK, and the index in the ring is the
    position modulo the capacity. With n orders of n-grams (`Orders`), the first n rows link n-grams
    of one group. The next n rows link n-grams that all groups may see.

    Attributes:
        tokens: int32[capacity], the ring; the capacity is a power of two.
        heads: int32[2 * orders, buckets], low 31 bits of the position that was linked last in each
            bucket, -1 for none.
        links: int32[2 * orders, capacity], distance back to the bucket's previously linked
            position; negative if that position is later, 0 for none.
        blocks: BLOCK[capacity / LANE_BLOCK].
        state: int64[3], the number of the next block, the number of the oldest block that may be
            read, and how many blocks belong to a lane.
    """

    tokens: NDArray[np.int32]
    heads: NDArray[np.int32]
    links: NDArray[np.int32]
    blocks: NDArray[Any]
    state: NDArray[np.int64]


class Lane(NamedTuple):
    """A lane: int64[6], with the fields defined in `kernels.chains`."""

    lane: NDArray[np.int64]


class Cursor(NamedTuple):
    """The place from which a sequence is copied, and its edits; see `kernels.cursors`.

    Attributes:
        cursor: int64[2].
        trail: int64[5].
        edits: int64[most edits, 5].
    """

    cursor: NDArray[np.int64]
    trail: NDArray[np.int64]
    edits: NDArray[np.int64]


class TextCursors(NamedTuple):
    """The places at which a sequence follows texts of one store; see `kernels.cursors`.

    Attributes:
        cursors: int64[texts, 3].
        starts: int64[texts + 1], the start of each text in the store, and the end of the last.
    """

    cursors: NDArray[np.int64]
    starts: NDArray[np.int64]


class Shared(NamedTuple):
    """The data from which a tenant's sequences are drafted, except databases without a stage.

    Attributes:
        bounds: int64[3], by the fields of `BOUNDS`.
        by_source: int64[2, MAX_SOURCES], nodes and accepted nodes of all drafts.
        by_accepted: int64[MAX_POSITIONS + 2]. First come counts of drafts by number of accepted
            tokens; the last of them counts drafts with MAX_POSITIONS or more. The final entry
            counts the tokens that followed drafts.
        by_index: int64[2, MAX_SOURCES], like `by_source`, for drafts from these indexes.
        outputs: the store of generations, packed: one record of `STORE_LAYOUT`.
        live: int64[sets, WAYS], live table of generations.
        versions: int64[n, 2], the model versions that wrote the generations; see
            `chains.fade_rows`.
        running: `Lanes` and their `Orders`, packed: outputs of running sequences. Empty if no
            sequence has a group.
        segments: `SegmentArrays` of each segment of the corpus, packed; all of one type.
        tables: `Tables`, packed.
        weights: WEIGHTS[1].
    """

    bounds: NDArray[np.int64]
    by_source: NDArray[np.int64]
    by_accepted: NDArray[np.int64]
    by_index: NDArray[np.int64]
    outputs: NDArray[Any]
    live: NDArray[np.int64]
    versions: NDArray[np.int64]
    running: NDArray[Any]
    segments: NDArray[Any]
    tables: NDArray[Any]
    weights: NDArray[Any]


class _Bounds(NamedTuple):
    """Columns of the bounds that a step is checked against."""

    NODES: int = 0  # most nodes of a tree
    TOKENS: int = 1  # most tokens of a sequence
    VOCABULARY: int = 2  # number of token ids; all ids are less
    SIZE: int = 3


BOUNDS: Final = _Bounds()

MAX_POSITIONS: Final = 16
"""Draft positions that are counted separately; engines verify at most about this many tokens."""

STEP: Final = np.dtype(
    [
        # Request, set for each call.
        ("sequence", np.int64),  # address of the sequence's packed store
        ("lane", np.int64),  # address of its packed lane
        ("stages", np.int64),  # what to do; see `entries`
        ("row", np.int64),  # first free row
        ("tokens", np.int64),  # address of int32[num_tokens], the tokens after the last draft
        ("num_tokens", np.int64),
        ("length", np.int64),  # length of the whole sequence, including these tokens
        ("budget", np.int64),  # most nodes of the tree, and most tokens to copy
        ("min_probability", np.float64),  # less probable nodes are skipped
        ("rate", np.float64),  # learning rate; 0 to learn nothing
        # Stays between calls; drafts ahead have a separate record.
        ("longest", np.int64),  # no match in the corpus is longer than this
        ("tree", np.int64),  # address of the last tree; see `tree_nodes`
        ("tree_size", np.int64),  # number of its nodes; -1 after its outcome was counted
        ("tree_budget", np.int64),  # its budget
        # Answer.
        ("refusal", np.int64),  # why nothing was done, 0 if not refused
        ("size", np.int64),  # number of nodes of the tree
        ("num_rows", np.int64),  # first free row afterwards
        ("learned", np.int64),  # number of nodes that were learned from
    ]
)
"""A sequence's request to a kernel, and the answer. Each sequence has one record, so that calls
need few arguments."""

INT32: Final = np.dtype(np.int32)
INT64: Final = np.dtype(np.int64)
FLOAT32: Final = np.dtype(np.float32)
UINT8: Final = np.dtype(np.uint8)


class Priors(NamedTuple):
    """The weights of rows before mixing: PRIOR[1]."""

    prior: NDArray[Any]


class SegmentArrays(NamedTuple):
    """The arrays of a segment of the corpus, and how to search it; see `kernels.suffixes`."""

    tokens: NDArray[Any]
    suffixes: NDArray[Any]
    starts: NDArray[Any]
    keys: NDArray[np.uint64]  # uint64[0] if the segment has none
    limits: NDArray[Any]  # SEGMENT_LIMITS[1]


class PhraseArrays(NamedTuple):
    """The arrays of listed phrases; see `kernels.phrase_matching`.

    Attributes:
        tokens: int32[tokens of all phrases].
        starts: int64[phrases + 1], where in `tokens` each phrase starts.
        first_phrases: int32[beginnings], the first phrase that starts with each beginning.
        last_phrases: int32[beginnings], the last phrase that starts with it.
        lengths: int32[beginnings], length of the beginning in tokens.
        shorter: int32[beginnings].
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    first_phrases: NDArray[np.int32]
    last_phrases: NDArray[np.int32]
    lengths: NDArray[np.int32]
    shorter: NDArray[np.int32]


class Found(NamedTuple):
    """The rows of evidence from which a draft grows, and the scratch arrays for finding them."""

    rows: NDArray[Any]  # ROW[max_rows]
    continuations: NDArray[np.int32]  # int32[max_rows, max_depth], tokens after each occurrence
    recent: NDArray[np.float32]  # float32[RECENT_SIZE], rarity of recent tokens, 0 for others
    marked: NDArray[np.int32]  # int32[MAX_MATCH], the tokens that are marked in `recent`
    counts: NDArray[np.float64]  # float64[MAX_MATCH + 1], evidence by match length
    matches: NDArray[np.int32]  # int32[FEW], lengths of matches in a segment


class Grown(NamedTuple):
    """The nodes of the tree, in the order in which they were added."""

    token_ids: NDArray[np.int32]  # int32[max_depth]
    parents: NDArray[np.int32]  # int32[max_depth]
    probabilities: NDArray[np.float32]  # float32[max_depth]
    sources: NDArray[np.uint8]  # uint8[max_depth]


class Work(NamedTuple):
    """The scratch arrays for growing a tree."""

    nodes: NDArray[Any]  # NODE[max_nodes]
    evidence: NDArray[np.float32]  # float32[max_nodes, Evidence.WIDTH]
    shares: NDArray[np.float32]  # float32[max_nodes], probability given the parent
    traits: NDArray[np.float32]  # float32[max_depth + 1, Traits.SIZE], by index in the tree + 1
    heap: NDArray[np.int64]  # int64[max_nodes], candidates that are not in the tree yet
    ranks: NDArray[np.int32]  # int32[NUM_RANKS], candidates on the heap by their probability
    slots: NDArray[np.int32]  # int32[power of two], never full; all -1 between calls
    tail: NDArray[np.int32]  # int32[3], the last tokens before a candidate
    followers: NDArray[np.int32]  # int32[MAX_FOLLOWERS], the tokens after `tail` in the sequence
    sums: NDArray[np.float32]  # float32[HIDDEN], inputs of the hidden units
    counted: NDArray[np.int64]  # int64[2, MAX_SOURCES], nodes and accepted nodes of one draft


class Scratch:
    """Memory for one draft at a time, allocated once.

    Args:
        max_depth: most nodes of a tree, and tokens of a continuation.
        max_rows: most rows of evidence.
        max_nodes: most candidates of a draft.
        prior: PRIOR[1], weights of rows before mixing; zeros if not given.

    Attributes:
        found: rows of evidence.
        work: the arrays in which the tree grows.
        packed: `found`, `work` and the prior, packed for kernels: one record of `SCRATCH_LAYOUT`.
        address: address of `packed`.
    """

    def __init__(
        self,
        max_depth: int,
        max_rows: int = 1024,
        max_nodes: int = 1 << 14,
        prior: NDArray[Any] | None = None,
    ) -> None:
        num_slots = 2 << (max_rows + MAX_SUCCESSORS - 1).bit_length()
        self.found = Found(
            aligned_zeros((max_rows,), ROW),
            aligned_zeros((max_rows, max_depth), np.int32),
            aligned_zeros((RECENT_SIZE,), np.float32),
            np.zeros(MAX_MATCH, np.int32),
            np.zeros(MAX_MATCH + 1),
            np.zeros(FEW, np.int32),
        )
        self.work = Work(
            aligned_zeros((max_nodes,), NODE),
            aligned_zeros((max_nodes, Evidence.WIDTH), np.float32),
            aligned_zeros((max_nodes,), np.float32),
            aligned_zeros((max_depth + 1, Traits.SIZE), np.float32),
            aligned_zeros((max_nodes,), np.int64),
            aligned_zeros((NUM_RANKS,), np.int32),
            np.full(num_slots, -1, np.int32),
            np.zeros(NUM_TABLE_ORDERS, np.int32),
            np.zeros(MAX_FOLLOWERS, np.int32),
            np.zeros(HIDDEN, np.float32),
            np.zeros((2, MAX_SOURCES), np.int64),
        )
        self._priors = Priors(np.zeros(1, PRIOR) if prior is None else prior)
        self.packed = pack(self.found, self.work, self._priors)
        self.address: int = self.packed.ctypes.data

    @property
    def rows(self) -> NDArray[Any]:
        """ROW[max_rows], the evidence."""
        return self.found.rows

    @property
    def continuations(self) -> NDArray[np.int32]:
        """int32[max_rows, max_depth], the tokens after each occurrence."""
        return self.found.continuations


def _store_layout() -> "np.dtype[Any]":
    none, none_2d = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
    numbers, numbers_2d = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    chains = Chains(none, none_2d, none_2d, numbers, none)
    cursor = Cursor(numbers, numbers, numbers_2d)
    return pack(chains, Orders(numbers, numbers), cursor).dtype


STORE_LAYOUT: Final = _store_layout()
"""A packed store: `Chains`, `Orders` and `Cursor`."""

LANE_LAYOUT: Final = pack(Lane(np.zeros(0, np.int64))).dtype
"""A packed lane."""

SCRATCH_LAYOUT: Final = Scratch(1, 1, 1).packed.dtype
"""A packed scratch memory: `Found`, `Work` and `Priors`."""
