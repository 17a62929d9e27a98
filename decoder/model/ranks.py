"""Processes that share the passes of one model: the first process decodes, the others follow.

If a model's weights are divided over processes, all processes take part in each pass, and all must
read the same input. Drafts, budgets, sampled tokens and the ends of sequences depend on clocks, on
the drafter's history and on random numbers, which differ between processes. So only one process
runs the decoding loop. It sends each call of its target to the other processes, which make the same
call of their targets. When a sequence is over, the others get its output.

Calls that use no weights are sent with the next pass, so each step sends one message.
"""

import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

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
from decoder.model.stamp import parameters_of
from indexer.errors import reason_of
from retriever.drafter import TokenIds

_FRAME: Final = 16_384
"""Bytes of a message that is sent in one broadcast: a step of eight sequences with trees of 64
nodes takes 11 kB. A second broadcast would take as long as the first. Over gloo, sending 64 kB
takes as long as sending 4 kB."""

_SILENCE: Final = timedelta(days=1)
"""Time that a process waits for the first process, which may itself wait for its user. If a process
ends, that is noticed immediately."""

_LAZY: Final = frozenset(("renew", "reset", "resume", "forget", "rewind", "commit_all", "drop"))
"""Calls that need no other process, so they are sent with the next pass."""

_R = TypeVar("_R")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class SharedSequence(Protocol):
    """A sequence to decode: `decoder.loop.Generation`.

    Attributes:
        error: the error that ended the sequence early.
        is_over: whether the sequence has ended.
        statistics: counts and times, `decoder.observation.Statistics`.
    """

    error: Exception | None
    is_over: bool
    statistics: Any

    @property
    def tokens(self) -> TokenIds:
        """Return int32[n], the committed tokens, prompt included."""
        ...

    @property
    def is_wanted(self) -> bool:
        """Whether the sequence continues with another token."""
        ...

    def take(self, tokens: list[int], statistics: Any, error: str | None) -> None:
        """Adopt the output that another process decoded."""
        ...


_S = TypeVar("_S", bound=SharedSequence)
_Steps = Iterator[tuple[_S, list[int]]]


class _Output(NamedTuple):
    """The first process's output for a sequence; its tokens include the prompt."""

    tokens: TokenIds
    statistics: Any
    error: str | None
    is_unfinished: bool

    @classmethod
    def of(cls, sequence: SharedSequence) -> "_Output":
        error = None if sequence.error is None else reason_of(sequence.error)
        return cls(sequence.tokens, sequence.statistics, error, sequence.is_wanted)


class Broadcast:
    """Carries messages from the first process of a group to all other processes, in order.

    Messages are pickled, and unpickling can run code. That is safe, because the processes are one
    program, and whoever can write to their group already takes part in its passes.

    Args:
        group: the process group that shares a model; its tensors are on the CPU.

    Raises:
        SharedPassError: another process has ended; the methods raise this error.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._first = distributed.get_global_rank(group, 0)
        self.is_first = distributed.get_rank(group) == 0

    def send(self, message: object) -> None:
        """Send a message to all other processes, in one frame, or two if the message is longer."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(content) > _FRAME:
            self._broadcast(_FRAME, pickle.dumps(len(content)))
        self._broadcast(max(len(content), _FRAME), content)

    def receive(self) -> Any:
        """Wait for the first process's next message; a bare number announces a long message."""
        message = pickle.loads(self._broadcast(_FRAME))  # noqa: S301  see the class
        if isinstance(message, int):
            message = pickle.loads(self._broadcast(message))  # noqa: S301
        return message

    def _broadcast(self, size: int, content: bytes = b"") -> bytearray:
        frame = bytearray(content.ljust(size, b"\0"))
        tensor = torch.frombuffer(frame, dtype=torch.uint8)
        try:
            distributed.broadcast(tensor, self._first, group=self._group)
        except RuntimeError as error:
            raise SharedPassError(
                f"a process that shares the model has ended: start all of them again ({error})"
            ) from error
        return frame


class Ranks:
    """The group of processes that share a model, as one of these processes sees it.

    While the first process decodes, it sends every call of its target to the others, which make the
    same call of their targets in `serve`. At other times a target's methods run only in the process
    that calls them. Then all processes must make the same calls, for example to create a target.

    Args:
        channel: channel to the other processes, or from the first process.
    """

    def __init__(self, channel: Broadcast) -> None:
        self._channel = channel
        self._is_first = channel.is_first
        self._is_busy = self._is_inside = self._is_broken = False
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._found: list[Any] = []

    @property
    def _is_driving(self) -> bool:
        """Whether calls of the target are currently sent to the other processes."""
        return self._is_first and self._is_busy and not self._is_inside

    def decided(self, decide: Callable[[], _R], target: object) -> _R:
        """Return the first process's result in every process; all processes must call this.

        Args:
            decide: function that only the first process calls; it may run passes of the target.
            target: the process's target; the targets of all processes run the same passes.

        Raises:
            SharedPassError: in the other processes, if the first process failed.
        """
        if self._is_driving:
            return decide()
        if self._is_first:
            with self._driving():
                own = decide()
                self._found.append(own)
            return own
        found: list[_R] = list(self.serve(target))
        if not found:
            raise SharedPassError("the first of the processes failed: see its error")
        return found[0]

    def steps(
        self, decoded: Callable[[Iterator[_S]], _Steps[_S]], waiting: Iterator[_S], target: object
    ) -> _Steps[_S]:
        """Decode in the first process; in the other processes, yield each complete output.

        Args:
            decoded: function that decodes sequences; only the first process calls it.
            waiting: the sequences, the same in every process.
            target: the process's target.

        Yields:
            In the first process, the results of `decoded`. In the other processes, all tokens of
            each sequence at once, in the order of `waiting`.

        Raises:
            SharedPassError: in the other processes, if prompts differ or the first process left
                early.
        """
        return self._driven(decoded, waiting) if self._is_first else self._served(waiting, target)

    def _driven(
        self, decoded: Callable[[Iterator[_S]], _Steps[_S]], waiting: Iterator[_S]
    ) -> _Steps[_S]:
        begun: deque[_S] = deque()

        def noted() -> Iterator[_S]:
            for sequence in waiting:
                begun.append(sequence)
                yield sequence

        with self._driving():
            steps: Any = decoded(noted())
            try:
                with closing(steps):
                    for latest, tokens in steps:
                        yield latest, tokens
                        # The latest sequence may still fail in its observer.
                        while begun and begun[0].is_over and begun[0] is not latest:
                            self._found.append(_Output.of(begun.popleft()))
            finally:
                self._found += map(_Output.of, begun)

    def _served(self, waiting: Iterator[_S], target: object) -> _Steps[_S]:
        outputs: Iterator[_Output] = self.serve(target)
        is_left = False
        try:
            for tokens, statistics, error, is_unfinished in outputs:
                sequence = next(waiting, None)
                prompt, new = np.split(tokens, [len(tokens) - statistics.num_tokens])
                if sequence is None or not np.array_equal(sequence.tokens, prompt):
                    raise SharedPassError(
                        "processes that share a model were given different prompts: give all of "
                        "them the same prompts in the same order"
                    )
                is_left |= is_unfinished
                sequence.take(new.tolist(), statistics, error)
                yield sequence, new.tolist()
        finally:
            deque(outputs, maxlen=0)  # the first process continues to its own end
        if is_left or next(waiting, None) is not None:
            raise SharedPassError("the first of the processes left before the end")

    def serve(self, target: object) -> Iterator[Any]:
        """Repeat the first process's calls until it is done; yield its results.

        Raises:
            SharedPassError: memory ran out in a pass.
        """
        is_last = False
        with self._busy():
            while not is_last:
                calls, found, is_last = self._channel.receive()
                with self._inside(others_wait=not is_last):
                    for name, args, options in calls:
                        getattr(target, name)(*args, **options)
                yield from found

    def run(
        self, method: Callable[..., Any], target: object, args: Any, options: dict[str, Any]
    ) -> Any:
        """Run a method of the target; if this process decodes, the others run it too."""
        if not self._is_driving:
            return method(target, *args, **options)
        self._calls.append((method.__name__, args, options))
        is_shared = method.__name__ not in _LAZY
        if is_shared:
            self._send()
        with self._inside(others_wait=is_shared):
            return method(target, *args, **options)

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """During the block, send all calls of this target to the other processes."""
        with self._busy():
            try:
                yield
            finally:
                if not self._is_broken:
                    self._send(is_last=True)

    def _send(self, *, is_last: bool = False) -> None:
        calls, found = self._calls, self._found
        self._calls, self._found = [], []
        self._channel.send((calls, found, is_last))

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Allow only one caller at a time.

        Raises:
            SharedPassError: an earlier pass failed.
            DecoderBusyError: another caller is using the group.
        """
        if self._is_broken:
            raise SharedPassError(
                "an earlier pass that processes share failed: end all of them and start again"
            )
        if self._is_busy:
            raise DecoderBusyError(
                "the processes that share this model are decoding: finish or close that decoding "
                "first"
            )
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @contextmanager
    def _inside(self, *, others_wait: bool) -> Iterator[None]:
        """Run a shared call; if it fails while the other processes wait in it, the group is broken.

        Raises:
            SharedPassError: memory ran out.
        """
        self._is_inside = True
        try:
            yield
        except BaseException as error:
            self._is_broken = others_wait
            if others_wait and isinstance(error, OutOfMemoryError):
                raise SharedPassError(
                    "memory ran out in a pass that processes share, and the others cannot leave "
                    "it: end all of them, then decode fewer sequences at a time, or shorter ones "
                    f"({error})"
                ) from error
            raise
        finally:
            self._is_inside = False


class _Led(Protocol):
    """A target, or an object used like a target."""

    ranks: Ranks | None


def led(method: _Method) -> _Method:
    """Decorate a target's method, so that the other processes also run it."""

    @wraps(method)
    def run(target: _Led, /, *args: Any, **options: Any) -> Any:
        if target.ranks is None:
            return method(target, *args, **options)
        return target.ranks.run(method, target, args, options)

    return cast(_Method, run)


_known: Final[WeakKeyDictionary[PreTrainedModel, Ranks]] = WeakKeyDictionary()


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """Return the group of processes that share a model; `None` if the model is in one process.

    All processes must call this.

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
        _known[model] = Ranks(Broadcast(group))
    return _known[model]


def is_shared(model: PreTrainedModel) -> bool:
    """Return whether a model's weights are divided over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without this module, nothing is divided
    divided: tuple[type, ...] = () if tensors is None else (tensors.DTensor,)
    weights = parameters_of(model)
    return any(isinstance(each, divided) or hasattr(each, "ds_id") for each in weights)


def refuse_shared(model: PreTrainedModel, use: str) -> None:
    """Refuse a model whose weights are divided over processes.

    Args:
        model: the model to check.
        use: start of the error message, which says what the model was to be used for.

    Raises:
        UnsupportedModelError: the weights are divided.
    """
    if is_shared(model):
        raise UnsupportedModelError(
            f"{use} {type(model).__name__} whose weights are divided over processes: "
            "load it without tp_plan or distributed_config"
        )


def _check_division(model: PreTrainedModel) -> None:
    """Refuse all but transformers' plain tensor parallelism, because nothing else was tested.

    Raises:
        UnsupportedModelError: the message says what to leave out.
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
            'is not supported: load it only with tp_plan="auto"'
        )
