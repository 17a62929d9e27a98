"""Workloads for comparing drafters: recordings, with stored outputs and indexes to draft from."""

import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from indexer.build import build_from_texts
from indexer.reader import Index
from retriever.drafter import TokenIds
from retriever.errors import RetrieverError
from retriever.limits import checked_tokens
from retriever.traces.traces import ChatEncoder, Trace, read_outputs, read_traces

STDLIB: Final = Path(sysconfig.get_paths()["stdlib"])
STDLIB_OUTPUT_TOKENS: Final = 400
EVERY: Final = 8
"""Of this many modules of the standard library, one is a recording and one a stored output."""


class WorkloadError(RetrieverError):
    """The text of a workload is invalid."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Tokenised recordings, and the sources of drafts.

    Attributes:
        name: name in tables.
        traces: recordings to replay.
        outputs: int32[n] each, outputs that count as recent ones.
        indexes: open indexes.
    """

    name: str
    traces: list[Trace]
    outputs: list[TokenIds]
    indexes: list[Index]


@dataclass(frozen=True, slots=True)
class WorkloadFiles:
    """The files of a workload.

    Attributes:
        name: name in tables.
        traces: file of recordings, in a format of `foredraft replay`.
        warm: files of outputs that count as recent ones.
        indexes: directories of indexes.
    """

    name: str
    traces: Path
    warm: tuple[Path, ...]
    indexes: tuple[Path, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]...`.

        Raises:
            WorkloadError: the text has another form.
        """
        pairs = [part.partition("=") for part in text.split(",")]
        if any(not key or not path for key, _, path in pairs) or any(
            key not in {"warm", "index"} for key, _, _ in pairs[1:]
        ):
            raise WorkloadError(
                f"a workload is NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]..., not {text!r}"
            )
        return cls(
            pairs[0][0],
            Path(pairs[0][2]),
            tuple(Path(path) for key, _, path in pairs[1:] if key == "warm"),
            tuple(Path(path) for key, _, path in pairs[1:] if key == "index"),
        )

    def load(self, encoder: ChatEncoder, limit: int | None) -> Workload:
        """Read and tokenise everything, once for all drafters.

        Raises:
            TraceError: a file cannot be read.
            indexer.errors.IndexerError: an index is missing, damaged or for another tokenizer.
        """
        traces = list(read_traces(self.traces, encoder, limit))
        outputs = [output for path in self.warm for output in read_outputs(path, encoder)]
        vocabulary = encoder.vocabulary
        indexes = [Index.open(path, vocabulary=vocabulary) for path in self.indexes]
        return Workload(self.name, traces, outputs, indexes)


@contextmanager
def stdlib_workload(encoder: ChatEncoder, limit: int | None) -> Iterator[Workload]:
    """Yield a small workload that needs no files: modules of the standard library.

    The first half of every eighth module is a prompt. The rest, cut to 400 tokens, is its recorded
    output. The modules after these are stored outputs. All other modules are indexed.
    """
    outputs, traces = stdlib_recordings(encoder, limit)
    with tempfile.TemporaryDirectory() as folder:
        texts = ((path.name, path.read_text()) for path in stdlib_corpus())
        build_from_texts(texts, Path(folder) / "index", encoder.tokenizer)
        with Index.open(Path(folder) / "index") as index:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            yield Workload(f"stdlib {version}", traces, outputs, [index])


def stdlib_corpus() -> list[Path]:
    """Return the modules of the standard library that are indexed."""
    modules = sorted(STDLIB.glob("*.py"))
    return sorted(set(modules) - set(modules[::EVERY]) - set(modules[1::EVERY]))


def stdlib_recordings(
    encoder: ChatEncoder, limit: int | None
) -> tuple[list[TokenIds], list[Trace]]:
    """Return stored outputs (int32[n] each) and recordings, made from other modules."""
    modules = sorted(STDLIB.glob("*.py"))
    outputs = [_ids(encoder, path.read_text()) for path in modules[1::EVERY]]
    return outputs, [_halved(encoder, path) for path in modules[::EVERY][:limit]]


def _halved(encoder: ChatEncoder, path: Path) -> Trace:
    lines = path.read_text().splitlines(keepends=True)
    prompt, output = "".join(lines[: len(lines) // 2]), "".join(lines[len(lines) // 2 :])
    return Trace(_ids(encoder, prompt), _ids(encoder, output)[:STDLIB_OUTPUT_TOKENS])


def _ids(encoder: ChatEncoder, text: str) -> TokenIds:
    return checked_tokens(encoder.encode_output(text), None)
