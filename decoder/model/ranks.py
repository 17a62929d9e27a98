"""Processes that share the passes of one model: the first decides, the others do as it says.

Where a model's weights are divided over processes, each pass is one of all of them, and all must
read the same. What a draft is, how much of it pays, which token is drawn and when a sequence ends
depends on clocks, on what a drafter has seen and on random numbers, which differ from process to
process. So one process alone runs the decoding loop. Whatever it asks of its target it tells the
others, which ask it of theirs; and it tells them the tokens that came of it.

What changes no weights' product waits for the next pass, so a step sends one message.
"""

import json
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import torch
from torch import distributed
from transformers import PreTrainedModel

from decoder.errors import (
    DecoderBusyError,
    OutOfMemoryError,
    SharedPassError,
    UnsupportedModelError,
)
from decoder.model.passes import Reading
from indexer.errors import reason_of
from retriever.drafter import TokenIds
from retriever.tree import DraftTree

_FRAME: Final = 4096
"""Bytes of a message that goes in one piece: a step of eight sequences with trees of 64 nodes."""

_HEAD: Final = 4
"""Bytes that say how long a message is."""

_SILENCE: Final = timedelta(days=1)
"""How long a process waits for the first one, which may itself wait for its user. A process that
ends is noticed at once."""

_END: Final = "end"
_NOTE: Final = "note"
_BEGUN: Final = "begun"
_TOKENS: Final = "tokens"

_OWN: Final = frozenset(("renew", "reset", "resume", "forget", "rewind", "commit_all", "drop"))
"""What a target does by itself: the others may hear of it with the next pass."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T", bound="_Led")


class Sequences(Protocol):
    """A sequence that is decoded: `decoder.loop.Generation`."""

    error: Exception | None
    is_over: bool

    @property
    def tokens(self) -> TokenIds:
        """int32[n], what is committed."""
        ...

    def hear(self, tokens: list[int], *, is_over: bool, error: str | None) -> None:
        """Take in what the first process made of a pass."""
        ...


_S = TypeVar("_S", bound=Sequences)
_Steps = Iterator[tuple[_S, list[int]]]


class Channel(Protocol):
    """Carries bytes from the first process to all others, in order."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that sends."""
        ...

    def send(self, message: bytes) -> None:
        """Send a message to all others."""
        ...

    def receive(self) -> bytes:
        """Wait for the next message of the first process."""
        ...


class GroupChannel:
    """Carries bytes over a process group of torch whose tensors lie on the CPU.

    Args:
        group: of the processes that share a model.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._first = distributed.get_global_rank(group, 0)
        self._frame = torch.zeros(_FRAME, dtype=torch.uint8)
        self.is_first = distributed.get_rank(group) == 0

    def send(self, message: bytes) -> None:
        """See `Channel`."""
        content = np.frombuffer(message, np.uint8)
        begins = min(len(content), _FRAME - _HEAD)
        frame = self._frame.numpy()
        frame[:_HEAD] = np.frombuffer(len(content).to_bytes(_HEAD, "little"), np.uint8)
        frame[_HEAD : _HEAD + begins] = content[:begins]
        self._broadcast(self._frame)
        if begins < len(content):
            self._broadcast(torch.from_numpy(content[begins:].copy()))

    def receive(self) -> bytes:
        """See `Channel`."""
        self._broadcast(self._frame)
        frame = self._frame.numpy()
        length = int.from_bytes(frame[:_HEAD].tobytes(), "little")
        begins = min(length, _FRAME - _HEAD)
        message = frame[_HEAD : _HEAD + begins].tobytes()
        if begins < length:
            rest = torch.zeros(length - begins, dtype=torch.uint8)
            self._broadcast(rest)
            message += rest.numpy().tobytes()
        return message

    def _broadcast(self, tensor: torch.Tensor) -> None:
        distributed.broadcast(tensor, self._first, group=self._group)


class Ranks:
    """What the first of the processes that share a model tells the others.

    Outside of `deciding` and `following` a target's methods run in each process as they are called:
    then all must call the same, as when a target is made.

    Args:
        channel: to the others, or from the first.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pending: list[Any] = []
        self._is_deciding = self._is_inside = self._is_broken = self._is_following = False

    @property
    def is_first(self) -> bool:
        """Whether this process decides."""
        return self._channel.is_first

    def agreed(self, value: Any) -> Any:
        """Return the first process's value, plain as JSON has it; all must call this."""
        self._refuse_if_busy()
        if not self.is_first:
            return self._receive()
        self._channel.send(_packed(value))
        return value

    def decided(self, decide: Callable[[], Any], target: object) -> Any:
        """Return what the first process finds by passes of its target, as plain values.

        Args:
            decide: called by the first process alone.
            target: what it asks; the others' targets do the same.
        """
        if self._is_deciding:
            return decide()
        if self.is_first:
            with self.deciding():
                found = decide()
                self.note(found)
            return found
        *_, [found] = self.following(target)
        return found

    def steps(
        self, decoded: Callable[[Iterator[_S]], _Steps[_S]], waiting: Iterator[_S], target: object
    ) -> _Steps[_S]:
        """Decode in the first process, and give out the same tokens in all others.

        Args:
            decoded: decodes sequences; called by the first process alone.
            waiting: the sequences, in every process the same.
            target: what decodes them.

        Yields:
            What `decoded` does.

        Raises:
            SharedPassError: in another process, that prompts differ or the first one left.
        """
        return self._told(decoded, waiting) if self.is_first else self._heard(waiting, target)

    def _told(
        self, decoded: Callable[[Iterator[_S]], _Steps[_S]], waiting: Iterator[_S]
    ) -> _Steps[_S]:
        numbers: dict[int, int] = {}

        def begun() -> Iterator[_S]:
            for number, sequence in enumerate(waiting):
                numbers[id(sequence)] = number
                self.note(_BEGUN, _fingerprint(sequence))
                yield sequence

        with self.deciding():
            steps: Any = decoded(begun())
            with closing(steps):
                for sequence, tokens in steps:
                    number = numbers[id(sequence)]
                    error = None if sequence.error is None else reason_of(sequence.error)
                    self.note(_TOKENS, number, tokens, sequence.is_over, error)
                    yield sequence, tokens

    def _heard(self, waiting: Iterator[_S], target: object) -> _Steps[_S]:
        begun: list[_S] = []
        notes = self.following(target)
        try:
            for kind, *values in notes:
                if kind == _BEGUN:
                    begun.append(_next_like(waiting, *values))
                    continue
                number, tokens, is_over, error = values
                begun[number].hear(tokens, is_over=is_over, error=error)
                yield begun[number], tokens
            if not all(sequence.is_over for sequence in begun):
                raise SharedPassError("the first of the processes left before the end")
        finally:
            deque(notes, maxlen=0)  # the first one goes on to its own end

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Have the others' targets do what this one is asked during the block."""
        self._refuse_if_busy()
        self._is_deciding = True
        try:
            yield
        finally:
            self._is_deciding = False
            if not self._is_broken:
                self._pending.append([_END])
                self._send()

    def note(self, *values: Any) -> None:
        """Tell the others plain values, with the next pass."""
        self._pending.append([_NOTE, *values])

    def following(self, target: object) -> Generator[list[Any]]:
        """Do as the first process says to the end of its block; yield what it notes.

        Raises:
            SharedPassError: memory runs out in a pass.
        """
        self._refuse_if_busy()
        self._is_following = True
        try:
            for name, *values in self._received():
                if name == _NOTE:
                    yield values
                else:
                    args, options = (_value(each) for each in values)
                    with self._passing():
                        getattr(target, name)(*args, **options)
        finally:
            self._is_following = False

    def _received(self) -> Iterator[list[Any]]:
        """Return what the first process asks and notes, to the end of its block."""
        while True:
            for each in self._receive():
                if each == [_END]:
                    return
                yield each

    def run(
        self,
        method: Callable[Concatenate[_T, _P], _R],
        target: _T,
        *args: _P.args,
        **options: _P.kwargs,
    ) -> _R:
        """Run a method of the target, and have the others run it, too."""
        if not self._is_deciding or self._is_inside:
            return method(target, *args, **options)
        self._pending.append([method.__name__, _plain(args), _plain(options)])
        if method.__name__ not in _OWN:
            self._send()
        with self._passing():
            return method(target, *args, **options)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Give up on the others where a pass fails: they wait in the middle of it.

        Raises:
            SharedPassError: memory ran out.
        """
        self._is_inside = True
        try:
            yield
        except OutOfMemoryError as error:
            self._is_broken = True
            raise SharedPassError(
                "memory ran out in a pass that processes share, and the others cannot leave it: "
                "end all of them, and decode fewer sequences at a time, or shorter ones "
                f"({error})"
            ) from error
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._is_inside = False

    def _send(self) -> None:
        if self._is_broken:
            raise SharedPassError(
                "an earlier pass that processes share failed: end all of them and start again"
            )
        pending, self._pending = self._pending, []
        self._channel.send(_packed(pending))

    def _refuse_if_busy(self) -> None:
        if self._is_deciding or self._is_following:
            raise DecoderBusyError(
                "the processes that share this model are decoding: finish or close that first"
            )

    def _receive(self) -> Any:
        return json.loads(self._channel.receive())


class _Led(Protocol):
    """A target, or what stands for one."""

    ranks: Ranks | None


def led(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """Have the other processes run a method, too, where the first one decides."""

    @wraps(method)
    def run(target: _T, /, *args: _P.args, **options: _P.kwargs) -> _R:
        if target.ranks is None:
            return method(target, *args, **options)
        return target.ranks.run(method, target, *args, **options)

    return run


_known: Final[WeakKeyDictionary[PreTrainedModel, Ranks]] = WeakKeyDictionary()


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """Return the processes that share a model's passes, `None` where it is in one alone.

    All of them must call this.

    Raises:
        UnsupportedModelError: the weights are divided in another way than by `tp_plan`.
    """
    if not is_shared(model):
        return None
    if model not in _known:
        _check_division(model)
        shared: Any = model
        mesh = shared._device_mesh  # noqa: SLF001  transformers has no public name for it
        members = distributed.get_process_group_ranks(
            mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        )
        group = distributed.new_group(
            members, timeout=_SILENCE, backend="gloo", use_local_synchronization=True
        )
        _known[model] = Ranks(GroupChannel(group))
    return _known[model]


def is_shared(model: PreTrainedModel) -> bool:
    """Return whether a model's weights are divided over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without it nothing is divided
    divided: tuple[type, ...] = () if tensors is None else (tensors.DTensor,)
    return any(isinstance(each, divided) or hasattr(each, "ds_id") for each in model.parameters())


def refuse_shared(model: PreTrainedModel, use: str) -> None:
    """Refuse a model whose weights are divided over processes.

    Args:
        model: to look at.
        use: what it was to be used for, as the beginning of a sentence.

    Raises:
        UnsupportedModelError: they are.
    """
    if is_shared(model):
        raise UnsupportedModelError(
            f"{use} {type(model).__name__} whose weights are divided over processes: "
            "load it without tp_plan or distributed_config"
        )


def _check_division(model: PreTrainedModel) -> None:
    """Refuse what is not plain tensor parallelism by transformers: it was not tested.

    Raises:
        UnsupportedModelError: the message names what to leave out.
    """
    config = getattr(model.config, "distributed_config", None)
    if config is None or config.tp_size < 2:  # noqa: PLR2004  one process divides nothing
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} are divided over processes by another "
            'library or plan: load it with tp_plan="auto"'
        )
    stated = {
        "fsdp_size": config.fsdp_size > 1 or config.dp_replicate_size > 1,
        "pp_size": config.pp_size > 1,
        "ep_size": config.ep_size > 1,
        "enable_expert_parallel": bool(config.enable_expert_parallel),
        "enable_sequence_parallel": bool(config.enable_sequence_parallel),
    }
    untested = [name for name, is_set in stated.items() if is_set]
    if untested:
        raise UnsupportedModelError(
            f"{type(model).__name__} is divided over processes with {', '.join(untested)}, which "
            'is not supported: load it with tp_plan="auto" alone'
        )


def _fingerprint(sequence: Sequences) -> int:
    return crc32(sequence.tokens.astype("<i4").tobytes())


def _next_like(waiting: Iterator[_S], fingerprint: int) -> _S:
    """Return the next sequence.

    Raises:
        SharedPassError: the first process decodes another one.
    """
    sequence = next(waiting, None)
    if sequence is None or _fingerprint(sequence) != fingerprint:
        raise SharedPassError(
            "processes that share a model were given different prompts: give all the same, in "
            "one order"
        )
    return sequence


def _packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """Return an argument of a target's method as JSON has it."""
    if isinstance(value, Reading):
        tree = None if value.tree is None else value.tree.parents.tolist()
        return {"place": value.place, "tokens": value.tokens.tolist(), "parents": tree}
    if isinstance(value, DraftTree):
        return {"tokens": value.token_ids.tolist(), "parents": value.parents.tolist()}
    if isinstance(value, np.ndarray):
        return {"ints": value.tolist()}
    if isinstance(value, dict):
        return {"options": {name: _plain(each) for name, each in value.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return int(value)


def _value(plain: Any) -> Any:
    """Return what `_plain` was given; a tree has no probabilities, as a pass needs none."""
    value = plain
    match plain:
        case {"place": place, "tokens": tokens, "parents": None}:
            value = Reading(place, np.array(tokens, np.int32))
        case {"place": place, "tokens": [last, *nodes], "parents": parents}:
            value = Reading.of(place, last, _tree(nodes, parents))
        case {"tokens": nodes, "parents": parents}:
            value = _tree(nodes, parents)
        case {"ints": values}:
            value = np.array(values, np.int64)
        case {"options": options}:
            value = {name: _value(each) for name, each in options.items()}
        case list():
            value = [_value(each) for each in plain]
    return value


def _tree(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.zeros(size, np.float32),
        np.zeros(size, np.uint8),
    )
