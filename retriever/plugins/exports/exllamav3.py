"""A corpus for exllamav3: its frozen suffix automaton, in one file.

The file has three parts. The prefix is `EXL3SAM` and a zero byte, then the version (u32), the size
of the header (u32) and of the payload (u64) in bytes, all little-endian. The second part is a JSON
header, and the third one Zstandard frame. The frame holds nine arrays of i32 at multiples of 64
bytes. Each array is stored as four planes: the lowest bytes of all numbers, then the next bytes.
The loader checks the graph. It also checks that the model's tokenizer files are those that the
header names.

Source: exllamav3 1.6.5, `exllamav3/generator/ngram.py` and `FrozenSAMCursor`.
"""

import hashlib
import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.errors import ExportError
from retriever.kernels.automata import Graph, build_automaton
from retriever.kernels.chains import SEPARATOR
from retriever.plugins.exports.exported_documents import whole_file

BYTES_PER_TOKEN: Final = 160
"""Most memory that building takes per token, in bytes."""

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class FrozenAutomaton:
    """A suffix automaton; state 0 is the root.

    Attributes:
        links: int32[s], the state of the longest suffix that occurs elsewhere; -1 at the root.
        lengths: int32[s], length of each state's longest substring, in tokens.
        ends: int32[s], position of the last token of its first occurrence; 2^31 - 1 at the root.
        offsets: int32[s + 1], where the edges of each state start.
        labels: int32[e], tokens of the edges, ascending within a state.
        targets: int32[e], states that the edges lead to.
    """

    links: _Ints
    lengths: _Ints
    ends: _Ints
    offsets: _Ints
    labels: _Ints
    targets: _Ints

    @classmethod
    def of(cls, tokens: TokenIds) -> "FrozenAutomaton":
        """Build the automaton of int32[n], documents each followed by a separator, -1."""
        graph = _room_for(len(tokens))
        build_automaton(graph, tokens)
        num_states, num_edges = graph.counts.tolist()
        origins, labels = graph.origins[:num_edges], graph.labels[:num_edges]
        order = np.lexsort((labels, origins))
        offsets = np.zeros(num_states + 1, np.int32)
        np.cumsum(np.bincount(origins, minlength=num_states), out=offsets[1:])
        return cls(
            graph.links[:num_states],
            graph.lengths[:num_states],
            graph.ends[:num_states],
            offsets,
            labels[order],
            graph.targets[:num_edges][order],
        )


def _room_for(num_tokens: int) -> Graph:
    """Return an empty graph; unused parts of it take no memory."""
    num_states, num_edges = 2 * num_tokens + 1, 3 * num_tokens + 1
    num_slots = 1 << max(4, (2 * num_edges - 1).bit_length())
    links, lengths, ends, first_edges = (np.empty(num_states, np.int32) for _ in range(4))
    origins, labels, targets, next_edges = (np.empty(num_edges, np.int32) for _ in range(4))
    return Graph(
        links,
        lengths,
        ends,
        first_edges,
        origins,
        labels,
        targets,
        next_edges,
        slots=np.full(num_slots, -1, np.int32),
        counts=np.zeros(2, np.int64),
    )


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DEFAULT_MAX_TOKENS: Final = 10_000_000
"""Default limit: 1.6 GB at `BYTES_PER_TOKEN`, which fits in memory next to a model."""

MAX_TOKENS: Final = (2**31 - 2) // 3
"""Most tokens; with more tokens, edge numbers would not fit in four bytes."""

_PREFIX: Final = struct.Struct("<8sIIQ")
_MAGIC: Final = b"EXL3SAM\0"
_VERSION: Final = 1
_ALIGNMENT: Final = 64
_MAX_ROOT: Final = 1 << 20
_LEVEL: Final = 9
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


@dataclass(slots=True)
class AutomatonReport:
    """Counts of the written data.

    Attributes:
        documents: number of documents in the automaton.
        tokens: number of their tokens, plus a separator for each document.
        left_out_documents: number of documents that did not fit.
        states: number of states.
        edges: number of edges.
        bytes: size of the file.
    """

    documents: int = 0
    tokens: int = 0
    left_out_documents: int = 0
    states: int = 0
    edges: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, int]:
        """Return the report as JSON values."""
        return asdict(self)


def tokenizer_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that define a model's token ids.

    Raises:
        ExportError: the folder has no `tokenizer.json`, or a file cannot be read.
    """
    try:
        digests = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in _TOKENIZER_FILES
            if (folder / name).exists()
        }
    except OSError as error:
        raise ExportError(f"{folder} cannot be read: {error.strerror}") from error
    if _TOKENIZER_FILES[0] not in digests:
        raise ExportError(
            f"{folder} has no tokenizer.json: give the folder of the model that exllamav3 runs"
        )
    return digests


def export_exllamav3(  # noqa: PLR0913  (all but the first are given by name)
    documents: Iterable[TokenIds],
    output: Path,
    *,
    tokenizer_files: Mapping[str, str],
    vocabulary_size: int,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    overwrite: bool = False,
) -> AutomatonReport:
    """Write documents as a frozen automaton, in order, until one does not fit.

    All documents and the automaton are held in memory; see `BYTES_PER_TOKEN`.

    Args:
        documents: int32[n] for each document.
        output: file to write.
        tokenizer_files: as `tokenizer_digests` returns them.
        vocabulary_size: largest token id plus one.
        max_tokens: most tokens, including separators; at most `MAX_TOKENS`.
        overwrite: whether to replace an existing file.

    Raises:
        ExportError: nothing fits, or the file exists or cannot be written.
        DamagedIndexError: a document cannot be read.
    """
    report = AutomatonReport()
    with whole_file(output, overwrite=overwrite) as file:
        tokens = _gathered(documents, min(max_tokens, MAX_TOKENS), report)
        automaton = FrozenAutomaton.of(tokens)
        report.states, report.edges = len(automaton.links), len(automaton.labels)
        sections = _sections(automaton, tokens, min(vocabulary_size, _MAX_ROOT))
        header = {
            "tokenizer": {"files": dict(tokenizer_files)},
            "state_count": report.states,
            "edge_count": report.edges,
            "token_count": report.tokens,
            "document_count": report.documents,
            "corpus_sha256": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest(),
        }
        _write(file, header, sections)
        report.bytes = file.tell()
    return report


def _gathered(documents: Iterable[TokenIds], max_tokens: int, report: AutomatonReport) -> TokenIds:
    """Return the documents, int32[n], each followed by a separator."""
    kept: list[TokenIds] = []
    for tokens in documents:
        if report.left_out_documents or report.tokens + len(tokens) + 1 > max_tokens:
            report.left_out_documents += 1
            continue
        kept += [tokens, np.array([SEPARATOR], np.int32)]
        report.documents += 1
        report.tokens += len(tokens) + 1
    if not kept:
        raise ExportError(
            "there is nothing to write: the index is empty, or --max-tokens is less than its "
            "first document"
        )
    return np.concatenate(kept)


def _sections(
    automaton: FrozenAutomaton, tokens: TokenIds, root_size: int
) -> dict[str, NDArray[np.int32]]:
    return {
        "link": automaton.links,
        "max_len": automaton.lengths,
        "min_end": automaton.ends,
        "edge_offsets": automaton.offsets,
        "edge_token": automaton.labels,
        "edge_to": automaton.targets,
        "root": _root_table(automaton, root_size),
        "corpus": tokens,
        "document_ends": np.flatnonzero(tokens == SEPARATOR).astype(np.int32),
    }


def _root_table(automaton: FrozenAutomaton, size: int) -> NDArray[np.int32]:
    """Return the target of each token from the root, int32[size]; -1 for none."""
    end = automaton.offsets[1]
    labels, targets = automaton.labels[:end], automaton.targets[:end]
    table = np.full(size, -1, np.int32)
    within = labels < size
    table[labels[within]] = targets[within]
    return table


def _write(
    file: BinaryIO, header: Mapping[str, Any], sections: Mapping[str, NDArray[np.int32]]
) -> None:
    places, size = _places([len(array) for array in sections.values()])
    described = [
        {"name": name, "offset": at, "count": len(array), "dtype": "<i4", "encoding": "byte_planes"}
        for (name, array), at in zip(sections.items(), places, strict=True)
    ]
    whole = {
        **header,
        "format": "exllamav3.frozen_sam",
        "version": _VERSION,
        "layout": "csr",
        "compression": "zstd",
        "separator": SEPARATOR,
        "payload_bytes": size,
        "sections": described,
    }
    content = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
    file.write(_PREFIX.pack(_MAGIC, _VERSION, len(content), size) + content)
    compressor = zstd.ZstdCompressor(level=_LEVEL)
    written = 0
    for array, at in zip(sections.values(), places, strict=True):
        file.write(compressor.compress(bytes(at - written)))
        planes = array.astype("<i4").view(np.uint8).reshape(-1, 4).T
        file.writelines(compressor.compress(plane.tobytes()) for plane in planes)
        written = at + 4 * len(array)
    file.write(compressor.flush())


def _places(counts: Sequence[int]) -> tuple[list[int], int]:
    """Return the byte offsets of arrays of four-byte numbers, and the end of the last array."""
    places: list[int] = []
    end = 0
    for count in counts:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + 4 * count
    return places, end
