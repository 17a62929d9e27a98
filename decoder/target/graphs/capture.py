"""Running a function of tensors that stay where they are again and again, without its host work."""

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

import torch

_WARM_UPS: Final = 3
"""As many as torch's own make_graphed_callables runs; libraries choose their kernels meanwhile."""

Output = TypeVar("Output")


class Capture(Protocol):
    """Captures functions; what it captured lives no longer than the tensors that it touches."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """Run a function a few times and return another that does the same, sooner.

        Args:
            function: the same computation at every call, on the same tensors; it may be run any
                number of times before this returns.

        Returns:
            What computes it anew and returns the very tensors of the first time.

        Raises:
            RuntimeError: it cannot be captured, or finds no memory.
        """
        ...


CaptureMaker = Callable[[], Capture]
"""Begins afresh, when all that was captured before is forgotten."""


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
        # The stream is named to come back to it: torch stays on its own where capturing fails.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._warm_up(function)
            # Other threads may use the device meanwhile: a draft model's, for one.
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


class Uncaptured:
    """Captures nothing: what fixed shapes compute can be had, and checked, on every device."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """See `Capture`."""
        return function


def capture_on(device: torch.device) -> CaptureMaker | None:
    """Return how functions are captured on a device, `None` where they cannot be."""
    return partial(CudaGraphs, device) if device.type == "cuda" else None
