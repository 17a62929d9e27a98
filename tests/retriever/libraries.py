"""An index of numbered documents, no two of which have two tokens in a row in common."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indexer.build import BuildOptions, build_from_texts
from indexer.change.changes import add_documents, compact, remove_documents

NUM_WORDS = 2000
LENGTH = 60


def word_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with a token for each of the words w0, w1 and so on."""
    words = {f"w{number}": number for number in range(NUM_WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


def document(number: int) -> list[int]:
    """The tokens of a document."""
    tokens: list[int] = np.random.default_rng(number).integers(0, NUM_WORDS, LENGTH).tolist()
    return tokens


def text(number: int) -> str:
    """Its text."""
    return " ".join(f"w{token}" for token in document(number))


class Library:
    """An index that changes.

    Args:
        folder: where the index and the documents go.
        tokenizer: `word_tokenizer()`.
        numbers: of the documents that it begins with.
    """

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, numbers: range = range(40)
    ) -> None:
        self.path = folder / "library"
        self._folder = folder
        self._tokenizer = tokenizer
        self.build(numbers)

    def build(self, numbers: range) -> None:
        texts = [(self._name(number), text(number)) for number in numbers]
        build_from_texts(texts, self.path, self._tokenizer, BuildOptions(overwrite=True))

    def add(self, *numbers: int) -> None:
        for number in numbers:
            Path(self._name(number)).write_text(text(number))
        add_documents(self.path, [self._name(number) for number in numbers])

    def remove(self, *numbers: int) -> None:
        remove_documents(self.path, patterns=[f"*-{number}.txt" for number in numbers])

    def compact(self) -> None:
        compact(self.path)

    def snapshots(self) -> list[int]:
        """Numbers of the snapshots that are there."""
        return sorted(int(path.name) for path in (self.path / "catalog").iterdir())

    def segments(self) -> list[str]:
        """Names of the segments' folders."""
        return sorted(path.name for path in (self.path / "segments").iterdir())

    def _name(self, number: int) -> str:
        return str(self._folder / f"document-{number}.txt")
