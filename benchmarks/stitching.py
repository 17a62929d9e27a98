"""Corpora of any size: given documents, then synthetic documents stitched together from them."""

import gzip
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from indexer.build_report import BuildTally
from indexer.sources import DEFAULT_FIELD, SourceOptions, plan, read
from retriever.errors import RetrieverError

MIN_SPAN_WORDS: Final = 20
MAX_SPAN_WORDS: Final = 60
SPANS: Final = 10
"""Spans in each synthetic document, which make about four hundred words."""

_WORD: Final = re.compile(r"\S+\s*")


class NoTextError(RetrieverError):
    """A corpus contains no text."""


@dataclass(frozen=True, slots=True)
class Written:
    """The size of a corpus.

    Attributes:
        documents: number of all documents.
        synthetic_documents: number of documents that were stitched together.
        synthetic_share: share of the characters in these documents.
    """

    documents: int
    synthetic_documents: int
    synthetic_share: float


def read_texts(path: Path) -> list[str]:
    """Return the documents of a file that contain words.

    Raises:
        SourceError: there is no such file.
        NoTextError: the file contains no text.
    """
    tally = BuildTally()
    options = SourceOptions()
    blocks = plan([path], options, tally)
    documents = chain.from_iterable(read(block, options, tally) for block in blocks)
    texts = [document.text for document in documents if document.text.strip()]
    if not texts:
        raise NoTextError(f"{path} holds no text: give JSON lines with a {DEFAULT_FIELD!r} each")
    return texts


def stitch(documents: Sequence[str], seed: int) -> Iterator[str]:
    """Yield synthetic documents without end, the same ones for the same seed.

    Each has ten spans of 20 to 60 words. Every span comes from another random document and starts
    at a random word. It keeps the white space between its words. A document with fewer words is
    used as a whole.

    Args:
        documents: source of the spans; at least one document, and each contains words.
        seed: seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    edges = [_edges(document) for document in documents]
    while True:
        chosen = rng.integers(0, len(documents), SPANS).tolist()
        lengths = rng.integers(MIN_SPAN_WORDS, MAX_SPAN_WORDS + 1, SPANS).tolist()
        places = rng.random(SPANS).tolist()
        yield " ".join(
            _span(documents[number], edges[number], length, place)
            for number, length, place in zip(chosen, lengths, places, strict=True)
        )


def _edges(document: str) -> "array[int]":
    """Return the start of each word, and the end of the last word."""
    return array("L", [*(word.start() for word in _WORD.finditer(document)), len(document)])


def _span(document: str, edges: "array[int]", num_words: int, place: float) -> str:
    """Return a span of words; `place`, in [0, 1), selects one of the possible starts."""
    begin = int(place * max(1, len(edges) - num_words))
    end = min(begin + num_words, len(edges) - 1)
    return document[edges[begin] : edges[end]].rstrip()


def write_corpus(path: Path, documents: Sequence[str], num_characters: int, seed: int) -> Written:
    """Write JSON lines (gzip) until there are `num_characters` characters of text.

    Args:
        path: path of the file, `.jsonl.gz`.
        documents: documents to write first; if they are too few, synthetic ones follow.
        num_characters: number of characters; the document that reaches it is the last.
        seed: seed of the synthetic documents.
    """
    characters = Counter[bool]()
    num_documents = Counter[bool]()
    texts = _texts(documents, seed)
    with gzip.open(path, "wt", compresslevel=1) as file:
        while characters.total() < num_characters:
            text, is_synthetic = next(texts)
            file.write(json.dumps({DEFAULT_FIELD: text}) + "\n")
            characters[is_synthetic] += len(text)
            num_documents[is_synthetic] += 1
    share = characters[True] / max(1, characters.total())
    return Written(num_documents.total(), num_documents[True], share)


def _texts(documents: Sequence[str], seed: int) -> Iterator[tuple[str, bool]]:
    """Yield texts without end, each with whether it is synthetic."""
    for document in documents:
        yield document, False
    for document in stitch(documents, seed):
        yield document, True
