"""A speculator that goes on learning while it drafts.

What verification finds costs nothing to keep: the target's states at committed tokens. They go to
a process of its own (`learner`), so that decoding never waits for training; heads that it finds
better are loaded in the background and read sequences that begin from then on.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from logging import getLogger
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import IO, Any, Final, Self

import numpy as np
import torch
from safetensors.torch import load, save
from transformers import PreTrainedModel

from decoder.drafters.following import Verified
from decoder.drafters.options import DEFAULT_SHARE
from decoder.drafters.readers import SequenceReader
from decoder.errors import DecoderError, UnsupportedModelError
from decoder.model.states import FINAL
from decoder.plugins.speculators.eagle import Eagle3Head
from decoder.plugins.speculators.head_files import HeadTarget, is_head
from decoder.plugins.speculators.head_folders import check_writable, folder_lock
from decoder.plugins.speculators.speculator import Speculator, TrueStates, load_speculator
from indexer.tokenizer import Vocabulary
from retriever.drafter import TokenIds
from retriever.sequences import TokenSequence

_NICENESS: Final = 19
"""The lowest priority: what decodes is hardly held up, even where all cores are busy."""

DEFAULT_HELD_BYTES: Final = 256 * 2**20
"""Of states that a learner holds: some 50,000 tokens of a small model, 8,000 of one with states of
4,096 numbers."""

_MOST_TOKENS: Final = 1024
"""The last ones of a sequence that are sent."""

_LEAST_TOKENS: Final = 8
"""Of a sequence: shorter ones teach nothing."""

_MOST_WAITING: Final = 32
"""Sequences that wait to be sent: the newest beyond them are left out."""

_ENDING_S: Final = 2.0
"""How long a learner may take to end by itself, as when it writes a head."""

_FRAME: Final = 8
"""Bytes that give the length of a message."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What a learner is started for.

    Attributes:
        head: folder of the head as it was given, which is gone back to where it is the best.
        folder: where the head is kept; what is there already is gone on with.
        target: names of `HeadTarget` and their values, but for the vocabulary.
        share: of one core's time.
        max_bytes: of sequences that are held.
        niceness: what is added to its priority's number.
    """

    head: str
    folder: str
    target: dict[str, Any]
    share: float
    max_bytes: int
    niceness: int


def write_message(stream: IO[bytes], tensors: dict[str, torch.Tensor]) -> None:
    """Send tensors to a learner."""
    content = save(tensors)
    stream.write(len(content).to_bytes(_FRAME, "little"))
    stream.write(content)
    stream.flush()


def read_messages(stream: IO[bytes]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what was sent, until the stream ends, be it within a message."""
    while len(size := stream.read(_FRAME)) == _FRAME:
        length = int.from_bytes(size, "little")
        content = stream.read(length)
        if len(content) < length:
            return
        yield load(content)


class LearningSpeculator:
    """A speculator whose head goes on learning from the sequences that it drafts for.

    Sequences that are not to be remembered are not learned from. What was learned is in the head's
    file: use a folder for each tenant, and never one for several. Close it, or use it in a `with`
    block. A learner that fails is told once, and ends learning but not drafting.

    Args:
        path: of the head to begin with, see `load_head`; it is never changed.
        folder: where the learned head is kept; what an earlier run left there is gone on with.
        model: the target.
        vocabulary: of its tokenizer, where that is known.
        name: of the target, for messages.
        kept: see `Speculator`.
        share: of one core's time, above 0 and at most 1.
        held_bytes: of states that are held to learn from, in memory.
        niceness: what is added to the learner's, from 0 to 19; the higher, the more it gives way.

    Raises:
        HeadFileError: a head cannot be read, or the folder cannot be used or is in use.
        HeadMismatchError: the head was made for another model.
        UnsupportedModelError: only EAGLE-3 heads with a vocabulary of their own go on learning.
        VocabularyMismatchError: it was made for another tokenizer.
        ValueError: the share is out of its range.
    """

    def __init__(  # noqa: PLR0913  (the last six are options)
        self,
        path: Path,
        folder: Path,
        model: PreTrainedModel,
        *,
        vocabulary: Vocabulary | None = None,
        name: str | None = None,
        kept: TokenIds | None = None,
        share: float = DEFAULT_SHARE,
        held_bytes: int = DEFAULT_HELD_BYTES,
        niceness: int = _NICENESS,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"a share of a core's time is above 0 and at most 1, not {share}")
        self._folder = folder
        self._model, self._vocabulary, self._name, self._kept = model, vocabulary, name, kept
        check_writable(folder)
        with ExitStack() as opened:
            opened.enter_context(folder_lock(folder))
            self._current = self._loaded(folder if is_head(folder) else path)
            self._numbers = (*_eagle3(self._current).config.states, FINAL)
            target = replace(HeadTarget.of(model, name), vocabulary=None)
            order = Order(
                head=str(path.absolute()),
                folder=str(folder.absolute()),
                target=asdict(target),
                share=share,
                max_bytes=held_bytes,
                niceness=niceness,
            )
            self._learner = _LearnerProcess(order, self._outer_layers(), self._reload)
            opened.callback(self._learner.close)
            self._opened = opened.pop_all()
        self.name = self._current.name
        self.columns = self._current.columns
        self.max_depth = self._current.max_depth
        self.reads_paths = self._current.reads_paths
        self.source = self._current.source
        self.states = frozenset(self._numbers)

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        """Return the reading of a sequence by the head of this moment."""
        reading = self._current.follow(sequence)
        if not sequence.options.remember:
            return reading
        return _TaughtReading(reading, sequence, TrueStates(self._numbers), self._learner)

    def close(self) -> None:
        """End learning; what is learned and not yet judged is lost. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loaded(self, path: Path) -> Speculator:
        return load_speculator(
            path, self._model, vocabulary=self._vocabulary, name=self._name, kept=self._kept
        )

    def _reload(self) -> None:
        """Read sequences that begin from now on with the head that was written."""
        loaded = self._loaded(self._folder)
        if np.array_equal(loaded.columns, self.columns):
            self._current = loaded

    def _outer_layers(self) -> dict[str, torch.Tensor]:
        """Return what a learner needs of the target: see `Teaching`."""
        head = _eagle3(self._current)
        embed = head.embed_tokens or self._model.get_input_embeddings()
        output: torch.nn.Module = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there
        columns = torch.from_numpy(self._current.columns.astype(np.int64))
        layers = {
            "embedding": embed.get_parameter("weight"),
            "rows": output.get_parameter("weight"),
        }
        bias = getattr(output, "bias", None)
        if bias is not None:
            layers["bias"] = bias
        return {
            key: (value if key == "embedding" else value[columns.to(value.device)])
            .detach()
            .cpu()
            .contiguous()
            for key, value in layers.items()
        }


class _TaughtReading:
    """A reading whose sequence is sent to a learner when it ends; see `SequenceReader`."""

    def __init__(
        self,
        reading: SequenceReader,
        sequence: TokenSequence,
        states: TrueStates,
        learner: "_LearnerProcess",
    ) -> None:
        self._reading, self._sequence = reading, sequence
        self._states, self._learner = states, learner
        self.begin, self.read = reading.begin, reading.read

    def learn(self, verified: Verified) -> None:
        """See `SequenceReader.learn`."""
        self._reading.learn(verified)
        self._states.learn(verified, len(self._sequence))

    def close(self) -> None:
        """See `SequenceReader.close`."""
        self._reading.close()
        if self._states.end > self._states.start:
            begin = self._states.start
            self._learner.send(self._states.take(), begin, self._sequence)


class _LearnerProcess:
    """The process that learns, and two threads that talk to it.

    Args:
        order: what it is started for.
        outer: see `Teaching`.
        on_new: is called, from one of the threads, when a better head was written.
    """

    def __init__(
        self, order: Order, outer: dict[str, torch.Tensor], on_new: Callable[[], None]
    ) -> None:
        self._waiting: Queue[dict[str, torch.Tensor] | None] = Queue(_MOST_WAITING)
        self._waiting.put(outer)
        self._on_new = on_new
        self._is_closing = False
        self._process = subprocess.Popen(  # noqa: S603  (this package's own module)
            [
                sys.executable,
                "-P",
                "-m",
                "decoder.plugins.training.learner",
                json.dumps(asdict(order)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it has to say of errors it says on standard output
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the process that decodes
        )
        self._threads = [
            Thread(target=run, name=f"foredraft-learner-{run.__name__}", daemon=True)
            for run in (self._sends, self._listens)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, states: torch.Tensor, begin: int, sequence: TokenSequence) -> None:
        """Have a finished sequence sent, unless too many wait.

        Args:
            states: [n, F], side by side.
            begin: position of the first one.
            sequence: whose they are.
        """
        skipped = max(0, len(states) - _MOST_TOKENS)
        states, begin = states[skipped:], begin + skipped
        tokens = sequence.tokens[begin : begin + len(states) + 1]
        if len(tokens) < _LEAST_TOKENS:
            return
        with suppress(Full):
            self._waiting.put_nowait(
                {
                    "tokens": torch.from_numpy(tokens.copy()),
                    "num_prompt": torch.tensor(max(0, sequence.num_prompt - begin)),
                    "states": states.detach().to("cpu", torch.bfloat16).contiguous(),
                }
            )

    def close(self) -> None:
        """End the process."""
        self._is_closing = True
        with suppress(Full):
            self._waiting.put_nowait(None)
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_ENDING_S)

    def _sends(self) -> None:
        stream = self._process.stdin
        assert stream is not None  # noqa: S101  (it is a pipe)
        with suppress(OSError), stream:  # a learner that died says so by the other stream
            while (message := self._waiting.get()) is not None:
                if all(bool(each.isfinite().all()) for each in message.values()):
                    write_message(stream, message)

    def _listens(self) -> None:
        stream = self._process.stdout
        assert stream is not None  # noqa: S101  (it is a pipe)
        with stream:
            for line in stream:
                self._hear(json.loads(line))
        if self._process.wait() and not self._is_closing:
            _log.warning(
                "the speculator learns no more: its learner ended with status %d",
                self._process.returncode,
            )

    def _hear(self, said: dict[str, object]) -> None:
        if "error" in said:
            _log.warning("the speculator learns no more: %s", said["error"])
            return
        told = "predicts more and is drafted from" if said["is_new"] else "is left as it was"
        _log.info(
            "the speculator %s: held-out worth %.3f, before %.3f",
            told,
            said["after"],
            said["before"],
        )
        if said["is_new"]:
            try:
                self._on_new()
            except (DecoderError, OSError) as error:
                _log.warning("what the speculator learned cannot be loaded: %s", error)


def _eagle3(speculator: Speculator) -> Eagle3Head:
    """Return the head of a speculator that can go on learning.

    Raises:
        UnsupportedModelError: it cannot.
    """
    head = speculator.head
    if not isinstance(head, Eagle3Head) or not head.config.is_cut:
        raise UnsupportedModelError(
            f"{speculator.name} does not go on learning, only EAGLE-3 heads with a vocabulary of "
            "their own do: leave out --online"
        )
    return head
