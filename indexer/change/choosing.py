"""Selects documents of an index by name, and lists them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from indexer.errors import SourceError
from indexer.format.documents import DocumentTable
from indexer.reader import Index
from indexer.stages.parts import kept_runs


class Choice:
    """Documents selected by name or by a pattern of names.

    Args:
        names: names as the index lists them.
        patterns: patterns as in the shell: `*`, `?` and `[…]`.

    Raises:
        SourceError: there are neither names nor patterns.
    """

    def __init__(self, names: Iterable[str], patterns: Iterable[str]) -> None:
        self._names, self._patterns = frozenset(names), frozenset(patterns)
        self._unfound = self._names | self._patterns
        if not self._unfound:
            raise SourceError("no document is named: name some, or a pattern of their names")

    def takes(self, name: str) -> bool:
        """Return whether a document with this name is selected."""
        found = {pattern for pattern in self._patterns if fnmatchcase(name, pattern)}
        if name in self._names:
            found.add(name)
        self._unfound -= found
        return bool(found)

    def left(self, documents: DocumentTable) -> list[tuple[int, int]]:
        """Return the starts and ends of ranges of documents that are not selected."""
        chosen = [self.takes(documents.name(number)) for number in range(len(documents))]
        return kept_runs(~np.array(chosen, np.bool_))

    def check_all_found(self) -> None:
        """Check that each name and each pattern has matched a document so far.

        Raises:
            SourceError: a name or a pattern has matched no document.
        """
        if self._unfound:
            first, *more = sorted(self._unfound)
            others = f" (and {len(more)} more)" if more else ""
            raise SourceError(
                f"the index has no document {first!r}{others}: nothing was removed; "
                "`foredraft documents` lists the names"
            )


@dataclass(frozen=True, slots=True)
class ListedDocument:
    """A document in a list.

    Attributes:
        name: origin of the text.
        licence: licence; empty if unknown.
        num_tokens: number of tokens in the document.
    """

    name: str
    licence: str
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the document as JSON values."""
        return {"name": self.name, "licence": self.licence, "tokens": self.num_tokens}

    def describe(self) -> str:
        """Return the document as one line of text that ends with its name."""
        return f"{self.num_tokens:>9,}  {self.licence or '-':<12}  {self.name}"


def list_documents(path: Path | str, patterns: Iterable[str] = ()) -> Iterator[ListedDocument]:
    """Yield the documents of an index in order, or those whose names match a pattern.

    The index stays open until the last document is yielded.

    Args:
        path: directory of the index.
        patterns: patterns as in the shell; if empty, all documents are listed.

    Raises:
        IndexerError: as for `Index.open`.
        DamagedIndexError: a document table is damaged.
    """
    patterns = tuple(patterns)
    with Index.open(path) as index:
        for document, num_tokens in index.documents():
            name = document.name
            if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns):
                yield ListedDocument(name, document.licence, num_tokens)


def chosen_documents(
    path: Path | str, names: Iterable[str], patterns: Iterable[str]
) -> list[ListedDocument]:
    """Return the documents that `remove_documents` would remove.

    Raises:
        SourceError: a name or a pattern matches no document.
        IndexerError: as for `list_documents`.
    """
    choice = Choice(names, patterns)
    chosen = [document for document in list_documents(path) if choice.takes(document.name)]
    choice.check_all_found()
    return chosen
