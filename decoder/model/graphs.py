"""Passes of a few fixed shapes, each captured once and then replayed; prompts are read eagerly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from decoder.model.cache import Frame, TreeCache, num_seen
from decoder.model.passes import CachedPasses, Masks
from decoder.model.states import States, StateTap
from indexer.errors import reason_of
from retriever.drafter import TokenIds

_WARM_UPS: Final = 3
"""As many as torch's own make_graphed_callables runs; in these, libraries choose their kernels."""

Output = TypeVar("Output")


class Capture(Protocol):
    """Captures functions; a captured function must not outlive the tensors that it touches."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """Run a function a few times and return a faster one that does the same.

        Args:
            function: the same computation at every call, on the same tensors; it may be run any
                number of times before this returns.

        Returns:
            A function that repeats the computation and returns the same tensor objects each time.

        Raises:
            RuntimeError: it cannot be captured, or finds no memory.
        """
        ...


CaptureMaker = Callable[[], Capture]
"""Makes a capture; called again once all captured functions are dropped."""


class CudaGraphs:
    """Captures CUDA graphs (torch.cuda.CUDAGraph) that share one pool of memory.

    Args:
        device: on which everything is computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """See `Capture`."""
        graph = torch.cuda.CUDAGraph()
        # The stream is named to return to it: torch stays on its own stream if capturing fails.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._warm_up(function)
            # Other threads, such as a draft model's, may use the device during the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                output = function()

        def replay() -> Output:
            graph.replay()
            return output

        return replay

    def _warm_up(self, function: Callable[[], object]) -> None:
        """Run a function on the stream that captures it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)


def capture_on(device: torch.device) -> CaptureMaker | None:
    """Return how functions are captured on a device, `None` where they cannot be."""
    return partial(CudaGraphs, device) if device.type == "cuda" else None


Windows = Mapping[str, int | None]
"""Of each layer type, `None` where attention is full."""


class FixedInputs:
    """Tokens, positions, slots and masks of passes with a fixed number of rows and of keys.

    Rows that a pass does not need repeat its first one, in slots behind its own. They see the same
    keys, so their values stay finite, and no other row sees them.

    Args:
        num_rows: of every pass.
        num_keys: slots of the cache that every pass is shown.
        windows: of the model's layer types.
        dtype: the model's.
        device: the model's.

    Attributes:
        tokens: int64[1, rows].
        positions: int64[1, rows].
        slots: int64[rows], where the rows' keys and values go.
        masks: dtype[1, 1, rows, keys] for each layer type, zero where attention is allowed.
    """

    def __init__(
        self,
        num_rows: int,
        num_keys: int,
        windows: Windows,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._numbers = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.tokens, self.positions = self._numbers[:1], self._numbers[1:2]
        self.slots = self._numbers[2]
        self._windows = dict(windows)
        self.masks = {
            kind: torch.zeros(1, 1, num_rows, num_keys, dtype=dtype, device=device)
            for kind in windows
        }

    def begin(self, past: int) -> None:
        """Set the inputs of a dummy pass behind `past` tokens, which `fill` overwrites."""
        self.fill(np.zeros(1, np.int32), np.full(1, past), None, past)

    def fill(self, tokens: TokenIds, positions: NDArray[np.int64], masks: Masks, past: int) -> None:
        """Set the inputs of one pass behind `past` tokens; see `Passes.read`.

        Without masks it has a single row, which sees all that lies in its window.
        """
        numbers = np.empty(self._numbers.shape, np.int64)
        width = len(tokens)
        numbers[0, :width], numbers[0, width:] = tokens, tokens[0]
        numbers[1, :width], numbers[1, width:] = positions, positions[0]
        numbers[2] = np.arange(past, past + numbers.shape[1])
        self._numbers.copy_(torch.from_numpy(numbers))
        for kind, mask in self.masks.items():
            given = masks[kind] if isinstance(masks, dict) else masks
            _lay(mask, given, width, past, num_seen(past, self._windows[kind]))


def _lay(mask: torch.Tensor, given: torch.Tensor | None, width: int, past: int, seen: int) -> None:
    """Write a mask over the last `seen` tokens and the rows themselves, and hide all else."""
    mask.fill_(torch.finfo(mask.dtype).min)
    shown = mask[:, :, :width, past - seen : past + width]
    if given is None:
        shown.zero_()
    else:
        shown.copy_(given)
    mask[:, :, width:] = mask[:, :, :1]


_MOST_ROWS: Final = 256
"""Rows of the widest captured pass: as many as a drafter's largest tree has nodes. Each power of
two below is captured by itself, which takes time and memory."""

_FEWEST_KEYS: Final = 256
"""Keys that the shortest captured pass is shown: smaller shapes would save little and be captured
again and again while a sequence is short."""

_FEWEST_TOKENS: Final = 1024
"""Slots that are reserved at the start, because growing makes captured shapes void."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    inputs: FixedInputs
    run: Callable[[], tuple[torch.Tensor, States]]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    slots_and_places: torch.Tensor
    run: Callable[[], None]


class GraphPasses(CachedPasses):
    """Passes whose shapes are few, so that each can be captured and replayed.

    Rows and shown keys are padded to powers of two, rows up to 256; masks hide the padding. The
    tokens that a commit moves are padded, too. Wider passes and prompts run eagerly, on the same
    cache. Growing buffers, and moving weights between two sequences, make all captured shapes
    void. Where capturing fails, all passes run eagerly from then on, and the log says so once.
    Python code in a model's hooks runs when a shape is captured, not at every pass.

    Args:
        model: the model to run; it takes trees.
        cache: of its sequence.
        windows: of the model's layer types.
        make_capture: how shapes are captured.
        tap: keeps states of the model; `None` to keep none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        windows: Windows,
        make_capture: CaptureMaker,
        tap: StateTap | None = None,
    ) -> None:
        super().__init__(model, cache, tap)
        self._trees = cache
        self._windows = dict(windows)
        self._make_capture = make_capture
        self._is_eager = False
        self._forget()

    @property
    def is_padding(self) -> bool:
        """Whether passes are padded; not where capturing failed."""
        return not self._is_eager

    def read(
        self, tokens: TokenIds, masks: Masks, positions: NDArray[np.int64], num_logits: int
    ) -> tuple[torch.Tensor, States]:
        """See `Passes`."""
        width, past = len(tokens), self._trees.get_seq_length()
        is_prompt = self._trees.capacity == 0 or (masks is None and width > 1)
        is_eager = is_prompt or self._trees.place > 0
        captured = None if is_eager else self._pass_for(width, past)
        if captured is None:
            return super().read(tokens, masks, positions, num_logits)
        captured.inputs.fill(tokens, positions, masks, past)
        logits, states = captured.run()
        self._trees.hold(past + width)
        # The next pass writes to these again.
        kept = {number: rows[:width].clone() for number, rows in states.items()}
        return logits[width - num_logits : width].clone(), kept

    def truncate(self, length: int) -> None:
        """See `Passes`."""
        super().truncate(length)
        if length == 0 and self._weights_at() != self._addresses:
            self._forget()

    def keep(self, start: int, slots: NDArray[np.int64]) -> None:
        """See `Passes`."""
        move = None if self._trees.place else self._move_for(len(slots))
        if move is None:
            super().keep(start, slots)
            return
        rows = np.minimum(np.arange(move.slots_and_places.shape[1]), len(slots) - 1)
        move.slots_and_places.copy_(torch.from_numpy(np.stack([slots[rows], start + rows])))
        move.run()
        self._trees.hold(start + len(slots))

    def _pass_for(self, width: int, past: int) -> _Pass | None:
        """Return the captured pass for a width; `None` where passes run eagerly."""
        if self._is_eager or width > _MOST_ROWS:
            return None
        num_rows = _bucket(width)
        self._trees.reserve(max(past + num_rows, _FEWEST_TOKENS))
        self._renew()
        num_keys = min(_bucket(max(past + num_rows, _FEWEST_KEYS)), self._trees.capacity)
        found = self._passes.get((num_rows, num_keys))
        return found or self._new_pass(num_rows, num_keys, past)

    def _new_pass(self, num_rows: int, num_keys: int, past: int) -> _Pass | None:
        device = torch.device(self._model.device)
        inputs = FixedInputs(num_rows, num_keys, self._windows, self._model.dtype, device)
        inputs.begin(past)
        run = self._captured(self._padded(inputs, num_keys))
        if run is None:
            return None
        made = self._passes[num_rows, num_keys] = _Pass(inputs, run)
        return made

    def _padded(
        self, inputs: FixedInputs, num_keys: int
    ) -> Callable[[], tuple[torch.Tensor, States]]:
        """Return a function that runs inputs through the model.

        It returns [rows, vocabulary], all logits, and the states that are tapped.
        """
        masks = inputs.masks
        options: dict[str, Any] = {"logits_to_keep": 0} if self._takes_count else {}
        frame = Frame(inputs.slots, num_keys)

        def run() -> tuple[torch.Tensor, States]:
            with self._trees.framed(frame) as states:
                output = self._model(
                    input_ids=inputs.tokens,
                    attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                    position_ids=inputs.positions,
                    past_key_values=states,
                    use_cache=True,
                    **options,
                )
            return output.logits[0], {} if self._tap is None else self._tap.taken()

        return run

    def _move_for(self, num_tokens: int) -> _Move | None:
        """Return the captured move of so many tokens in the cache; `None` to move them eagerly."""
        self._renew()
        count = _bucket(num_tokens)
        if self._is_eager or count > _MOST_ROWS:
            return None
        return self._moves.get(count) or self._new_move(count)

    def _new_move(self, count: int) -> _Move | None:
        device = torch.device(self._model.device)
        # All zero: capturing runs the move any number of times, and must not change the cache.
        slots_and_places = torch.zeros(2, count, dtype=torch.int64, device=device)
        slots, places = slots_and_places
        run = self._captured(partial(self._trees.move, slots, places))
        if run is None:
            return None
        made = self._moves[count] = _Move(slots_and_places, run)
        return made

    def _captured(self, function: Callable[[], Output]) -> Callable[[], Output] | None:
        """Capture a function; where that fails, log it and run eagerly from now on."""
        try:
            return self._capture(function)
        except RuntimeError as error:
            self._is_eager = True
            self._forget()
            _log.warning("passes run without captured graphs: %s", reason_of(error))
            return None

    def _renew(self) -> None:
        """Drop captured shapes whose buffers or weights were replaced."""
        if self._trees.num_growths != self._num_growths:
            self._forget()

    def _forget(self) -> None:
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._moves: dict[int, _Move] = {}
        self._capture = self._make_capture()
        self._num_growths = self._trees.num_growths
        self._addresses = self._weights_at()

    def _weights_at(self) -> list[int]:
        return [weight.data_ptr() for weight in self._model.parameters()]


def _bucket(count: int) -> int:
    """Return the least power of two that is not below a positive count."""
    return 1 << (count - 1).bit_length()
