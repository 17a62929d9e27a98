"""A speculator that is trained online, while it drafts.

Verification computes the target's states at committed tokens anyway, so they cost nothing. They go
to a separate process (`learner`), so decoding never waits for training. If that process finds a
better head, the head is loaded in the background. It then drafts for all sequences that start
later.
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
"""The lowest priority: it hardly slows decoding, even if all cores are busy."""

DEFAULT_HELD_BYTES: Final = 256 * 2**20
"""Bytes of states that a learner stores: about 50,000 tokens of a small model, or 8,000 tokens of a
model with states of 4,096 numbers."""

_MOST_TOKENS: Final = 1024
"""Most tokens of a sequence to send; of a longer sequence, the last tokens are sent."""

_LEAST_TOKENS: Final = 8
"""Fewest tokens of a sequence that is sent: shorter sequences are useless for training."""

_MOST_WAITING: Final = 32
"""Most sequences that wait to be sent; further ones are dropped."""

_ENDING_S: Final = 2.0
"""Seconds that a learner may take to end, for example while it writes a head; then it is killed."""

_FRAME: Final = 8
"""Bytes of the length field of a message."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """The start arguments of a learner.

    Attributes:
        head: folder of the original head; it is used again if it is the best.
        folder: folder of the learned head; a head in it is trained further.
        target: attributes of `HeadTarget`, except for the vocabulary.
        share: share of one core's time.
        max_bytes: most bytes of stored sequences.
        niceness: number to add to the niceness of the learner's process.
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
    """Yield the messages until the stream ends; a message that was cut is left out."""
    while len(size := stream.read(_FRAME)) == _FRAME:
        length = int.from_bytes(size, "little")
        content = stream.read(length)
        if len(content) < length:
            return
        yield load(content)


class LearningSpeculator:
    """A speculator whose head is trained on the sequences that it drafts for.

    Sequences with `remember` off are not used for training. The head's file contains what was
    learned from a tenant's text, so use a separate folder for each tenant. Close the speculator, or
    use it in a `with` block. If the learner fails, a warning is logged. Training ends then, but
    drafting continues.

    Args:
        path: path of the original head, which is never changed; see `load_head`.
        folder: folder for the learned head; a head from an earlier run is trained further.
        model: the target.
        vocabulary: vocabulary of the target's tokenizer, if known.
        name: name of the target in messages.
        kept: the only tokens to draft; see `Speculator`.
        share: share of one core's time for training, above 0 and at most 1.
        held_bytes: most bytes of states that are stored in memory for training.
        niceness: number to add to the learner's niceness, from 0 to 19; higher means a lower
            priority.

    Raises:
        HeadFileError: a head cannot be read, or the folder cannot be written or is in use.
        HeadMismatchError: the head was made for another model.
        UnsupportedModelError: the head is not an EAGLE-3 head with its own vocabulary.
        VocabularyMismatchError: the head was made for another tokenizer.
        ValueError: the share is out of range.
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
            raise ValueError(
                f"the share of a core's time must be above 0 and at most 1, not {share}"
            )
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
        """Return a new reading of a sequence by the current head."""
        reading = self._current.follow(sequence)
        if not sequence.options.remember:
            return reading
        return _TaughtReading(reading, sequence, TrueStates(self._numbers), self._learner)

    def close(self) -> None:
        """End training; changes that were not evaluated yet are lost. Idempotent."""
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
        """Load the learned head, for sequences that start from now on."""
        loaded = self._loaded(self._folder)
        if np.array_equal(loaded.columns, self.columns):
            self._current = loaded

    def _outer_layers(self) -> dict[str, torch.Tensor]:
        """Return the parts of the target that a learner needs; see `Teaching`."""
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
    """The learner's process, and two threads that communicate with it.

    Args:
        order: start arguments of the learner.
        outer: parts of the target; see `Teaching`.
        on_new: called from one of the threads after a better head was written.
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
            stderr=subprocess.DEVNULL,  # it reports errors on standard output
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
        """Queue a finished sequence for sending, unless too many are waiting.

        Args:
            states: [n, F], the concatenated states.
            begin: position of the first state.
            sequence: the sequence.
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
        with suppress(OSError), stream:  # the other thread reports a dead learner
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
                "online training has stopped: the learner ended with status %d",
                self._process.returncode,
            )

    def _hear(self, said: dict[str, object]) -> None:
        if "error" in said:
            _log.warning("online training has stopped: %s", said["error"])
            return
        told = "has improved and is now in use" if said["is_new"] else "is unchanged"
        _log.info(
            "the speculator %s: %.3f predicted held-out tokens per pass, before %.3f",
            told,
            said["after"],
            said["before"],
        )
        if said["is_new"]:
            try:
                self._on_new()
            except (DecoderError, OSError) as error:
                _log.warning("the learned head cannot be loaded: %s", error)


def _eagle3(speculator: Speculator) -> Eagle3Head:
    """Return the head of a speculator, if it can be trained online.

    Raises:
        UnsupportedModelError: the head cannot be trained online.
    """
    head = speculator.head
    if not isinstance(head, Eagle3Head) or not head.config.is_cut:
        raise UnsupportedModelError(
            f"{speculator.name} cannot be trained online, only EAGLE-3 heads with their own "
            "vocabulary can: leave out --online"
        )
    return head
