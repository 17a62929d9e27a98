"""Training texts with the target's states on disk: recorded once, read many times."""

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from decoder.errors import TrainingError
from indexer.errors import reason_of
from retriever.drafter import TokenIds

_SHARD: Final = "taught-{:05d}.safetensors"
_STAMP: Final = "of"
_SECONDS: Final = "seconds"


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A text with the target's states.

    Attributes:
        tokens: int32[n], prompt and output.
        num_prompt: number of tokens in the prompt.
        states: bfloat16[m, F], the states at the first m tokens, concatenated in the order of their
            numbers; m is n - 1 or n, because the last token's state is not used in training.
        is_own: whether the target wrote the output.
        was_asked: whether the target wrote the output for this training, and not earlier.
    """

    tokens: TokenIds
    num_prompt: int
    states: torch.Tensor
    is_own: bool = False
    was_asked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """One file of texts: their tokens in memory, and the open file to read states from."""

    tokens: TokenIds
    starts: NDArray[np.int64]
    num_prompts: TokenIds
    is_own: NDArray[np.bool_]
    was_asked: NDArray[np.bool_]
    seconds: float
    file: Any

    @property
    def num_outputs(self) -> NDArray[np.int64]:
        """int64[texts], the number of tokens in each output."""
        return self.starts[1:] - self.starts[:-1] - self.num_prompts

    def example(self, number: int) -> Example:
        """Return a text, and read its states from the file."""
        own = slice(int(self.starts[number]), int(self.starts[number + 1]))
        with _unbroken():
            states = self.file.get_slice("states")[own]
        is_own, was_asked = bool(self.is_own[number]), bool(self.was_asked[number])
        return Example(self.tokens[own], int(self.num_prompts[number]), states, is_own, was_asked)


class TaughtStore:
    """Recorded texts in the files of a directory; each file is written atomically.

    States are read from the files on demand, so they need not fit in memory.

    Args:
        directory: directory of the files; it is made if it does not exist.
        stamp: model, numbers of states and options of the recording; files with another stamp are
            refused.

    Raises:
        TrainingError: the directory holds recordings of another model or with other options, or it
            cannot be written.
    """

    def __init__(self, directory: Path, stamp: Mapping[str, Any]) -> None:
        self._directory = directory
        self._stamp = json.dumps(dict(stamp), sort_keys=True)
        self._shards: list[_Shard] = []
        with _telling(directory):
            directory.mkdir(parents=True, exist_ok=True)
        while (path := self._path()).exists():
            self._shards.append(self._opened(path))

    def __len__(self) -> int:
        return sum(len(shard.num_prompts) for shard in self._shards)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all outputs."""
        return sum(int(shard.num_outputs.sum()) for shard in self._shards)

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens in the outputs that the target wrote."""
        return sum(int(shard.num_outputs[shard.is_own].sum()) for shard in self._shards)

    @property
    def num_shards(self) -> int:
        """Number of files, one for each call of `add`."""
        return len(self._shards)

    @property
    def num_read(self) -> int:
        """Number of files with outputs that the target only read, and did not write in training."""
        return sum(not shard.was_asked.any() for shard in self._shards)

    @property
    def seconds(self) -> float:
        """Seconds that recording all texts took."""
        return sum(shard.seconds for shard in self._shards)

    def add(self, taught: Sequence[Example], seconds: float = 0.0) -> None:
        """Write texts to a new file.

        Args:
            taught: the texts.
            seconds: seconds that recording them took.

        Raises:
            TrainingError: the file cannot be written; earlier recordings stay.
        """
        if not taught:
            return
        path = self._path()
        tensors = {
            "tokens": torch.from_numpy(np.concatenate([each.tokens for each in taught])),
            "starts": torch.from_numpy(np.cumsum([0, *(len(each.tokens) for each in taught)])),
            "num_prompts": torch.tensor([each.num_prompt for each in taught], dtype=torch.int32),
            "is_own": torch.tensor([each.is_own for each in taught]),
            "was_asked": torch.tensor([each.was_asked for each in taught]),
            "states": torch.cat([_padded(each) for each in taught]),
        }
        write_tensors(path, tensors, {_STAMP: self._stamp, _SECONDS: str(seconds)})
        self._shards.append(self._opened(path))

    def lengths(self) -> NDArray[np.int64]:
        """Return int64[texts], the number of tokens in each text."""
        if not self._shards:
            return np.zeros(0, np.int64)
        return np.concatenate([np.diff(shard.starts) for shard in self._shards])

    def __getitem__(self, number: int) -> Example:
        for shard in self._shards:
            if number < len(shard.num_prompts):
                return shard.example(number)
            number -= len(shard.num_prompts)
        raise IndexError(number)

    def token_counts(self, vocabulary_size: int) -> NDArray[np.int64]:
        """Return int64[vocabulary], the number of times that each token occurs in outputs."""
        counts = np.zeros(vocabulary_size, np.int64)
        for shard in self._shards:
            is_output = np.ones(len(shard.tokens), np.bool_)
            for start, count in zip(shard.starts[:-1], shard.num_prompts, strict=True):
                is_output[start : start + count] = False
            counts += np.bincount(shard.tokens[is_output], minlength=vocabulary_size)
        return counts

    def _path(self) -> Path:
        return self._directory / _SHARD.format(len(self._shards))

    def _opened(self, path: Path) -> _Shard:
        try:
            with _unbroken():
                file = safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]  # not typed there
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name).numpy() for name in _ARRAYS}
                seconds = float(metadata.get(_SECONDS, 0.0))
        except (OSError, ValueError, SafetensorError) as error:
            raise TrainingError(
                f"{path} cannot be read ({reason_of(error)}): remove it and all later files, and "
                "run the same command again"
            ) from error
        if metadata.get(_STAMP) != self._stamp:
            raise TrainingError(
                f"{self._directory} was recorded with another "
                f"{_difference(metadata.get(_STAMP), self._stamp)}: remove it, or train with the "
                "same model, texts and options as before"
            )
        return _Shard(file=file, seconds=seconds, **arrays)


_ARRAYS: Final = ("tokens", "starts", "num_prompts", "is_own", "was_asked")


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file of tensors atomically: on an error, the old file stays.

    Raises:
        TrainingError: the file cannot be written.
    """
    partial = path.with_suffix(".partial")
    with _unbroken(), _telling(path.parent):
        save_file(dict(tensors), partial, dict(metadata))
        partial.replace(path)


@contextmanager
def _unbroken() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended; within safetensors it would become another error."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C interrupts only the main thread
        return
    pressed: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *told: pressed.append(told))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed and callable(before):
            before(*pressed[0])


@contextmanager
def _telling(directory: Path) -> Iterator[None]:
    """Translate write errors in the block.

    Raises:
        TrainingError: the directory cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{directory} cannot be written ({reason_of(error)}): make room there, and run the "
            "same command again; earlier recordings are reused"
        ) from error


def _difference(stamp: str | None, wanted: str) -> str:
    """Return the names of the fields that differ between two stamps."""
    found, own = json.loads(stamp or "{}"), json.loads(wanted)
    return " and ".join(name for name in own if found.get(name) != own[name]) or "stamp"


def _padded(taught: Example) -> torch.Tensor:
    """Return bfloat16[n, F], the states, with zeros for a last token that was not read."""
    missing = len(taught.tokens) - len(taught.states)
    return torch.nn.functional.pad(taught.states, (0, 0, 0, missing))
