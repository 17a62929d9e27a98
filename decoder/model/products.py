"""Packed copies of weights on a CPU: derived values, each used while its weight is what it was."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from retriever.kernels.compiling import kernel

LeastWeights = Mapping[torch.dtype, int]
"""Weights of the smallest layer that is packed, for each precision that is packed at all."""

LEAST_WEIGHTS: Final[LeastWeights] = {torch.float32: 1 << 16, torch.bfloat16: 1 << 12}
"""Below, the call costs more than the layout saves."""

_ROWS_HINT: Final = 32
"""Rows to lay weights out for; measured, the layout then serves from one row to thousands."""

_LEAST_USES: Final = 16
"""Products by a weight that has changed before it is packed again: packing takes as long as 15 to
25 products save, and a model in training changes all of its weights after every rollout."""

linear: Final[Callable[..., torch.Tensor]] = torch._C._nn.linear  # noqa: SLF001  as torch.nn.functional has it
"""torch's own product of rows and weights."""


class _Entry:
    """What is known of a weight."""

    __slots__ = ("digest", "dtype", "num_unpacked", "packed", "pointer", "version", "weight")

    weight: "ref[torch.Tensor]"
    version: int
    pointer: int
    dtype: torch.dtype | None
    num_unpacked: int
    packed: torch.Tensor | None
    digest: NDArray[np.uint64] | None


class Products:
    """Products of rows with weights, by copies of the weights in oneDNN's own layout.

    `torch.nn.functional.linear` lays weights out anew in every call, which for a pass of few rows
    takes as long as multiplying. A copy is found by its weight's identity and used while the
    weight's version and address hold, which any ordinary change moves; changes that move neither,
    such as `weight.data.mul_(2)`, are found by `audit`. Whatever else a weight may be (quantised,
    divided over processes, computed anew in each pass, on another device), torch multiplies by it.

    Args:
        least: which weights are packed.
    """

    def __init__(self, least: LeastWeights = LEAST_WEIGHTS) -> None:
        self._least = {dtype: size for dtype, size in least.items() if _has_kernels(dtype)}
        self._entries: dict[int, _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that packed copies take, besides the weights themselves."""
        packed = (each.packed for each in self._entries.values())
        return sum(each.numel() * each.element_size() for each in packed if each is not None)

    def takes(self, model: nn.Module) -> bool:
        """Return whether some weight of a model can be packed."""
        return any(map(self._is_packable, model.parameters()))

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows @ weight.T + bias, [..., out features], as `torch.nn.functional.linear`."""
        entry = self._entries.get(id(weight))
        if entry is None or entry.weight() is not weight:
            entry = self._sighted(weight)
        if entry.dtype is not rows.dtype or _is_special():
            return linear(rows, weight, bias)
        if _has_moved(entry, weight):
            _renew(entry, weight)
        if entry.packed is None:
            if entry.num_unpacked < _LEAST_USES:
                entry.num_unpacked += 1
                return linear(rows, weight, bias)
            _pack(entry, weight)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001  no public name
            rows, entry.packed, bias, "none", [], ""
        )
        return output

    def audit(self) -> bool:
        """Drop copies of weights whose contents changed unseen; return whether any did.

        All weights that are packed are read once, by as many threads as torch computes with.
        """
        packed = [
            (entry, weight)
            for entry in list(self._entries.values())
            if entry.packed is not None and (weight := entry.weight()) is not None
        ]
        num_threads = max(1, min(torch.get_num_threads(), len(packed)))
        with ThreadPoolExecutor(num_threads) as pool:
            parts = pool.map(_changed, (packed[at::num_threads] for at in range(num_threads)))
        changed = list(chain.from_iterable(parts))
        for entry, weight in changed:
            _renew(entry, weight)
        return bool(changed)

    def _sighted(self, weight: torch.Tensor) -> _Entry:
        """Note a weight that is met for the first time; it is packed if it can be."""
        key = id(weight)
        entry = self._entries[key] = _Entry()
        entry.weight = ref(weight, lambda _: self._entries.pop(key, None))
        is_packable = self._is_packable(weight)
        entry.dtype = weight.dtype if is_packable else None
        entry.packed = entry.digest = None
        entry.num_unpacked = _LEAST_USES - 1  # once without: some are met only once
        entry.version, entry.pointer = (-1, 0)
        if is_packable:
            entry.version, entry.pointer = weight._version, weight.data_ptr()  # noqa: SLF001
        return entry

    def _is_packable(self, weight: torch.Tensor) -> bool:
        return (
            type(weight) is nn.Parameter
            and weight.device.type == "cpu"
            and weight.layout is torch.strided
            and weight.dim() == 2  # noqa: PLR2004  out features, in features
            and not weight.is_inference()
            and weight.is_contiguous()
            and weight.numel() >= self._least.get(weight.dtype, weight.numel() + 1)
        )


def _changed(packed: Sequence[tuple[_Entry, torch.Tensor]]) -> list[tuple[_Entry, torch.Tensor]]:
    """Return those weights that are not what was packed."""
    return [
        (entry, weight)
        for entry, weight in packed
        if entry.digest is None
        or _has_moved(entry, weight)
        or not np.array_equal(_digest(weight), entry.digest)
    ]


_shared: WeakKeyDictionary[nn.Module, WeakValueDictionary[str, Products]] = WeakKeyDictionary()


def products_of(model: nn.Module, least: LeastWeights = LEAST_WEIGHTS) -> Products:
    """Return the packed copies of a model's weights: one for all that run it, while any does."""
    of_model = _shared.setdefault(model, WeakValueDictionary())
    return of_model.setdefault(repr(sorted(map(str, least.items()))), Products(least))


def _is_special() -> bool:
    """Return whether a product is to be differentiated, or computed in another precision."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")


def _has_moved(entry: _Entry, weight: torch.Tensor) -> bool:
    return entry.version != weight._version or entry.pointer != weight.data_ptr()  # noqa: SLF001


def _renew(entry: _Entry, weight: torch.Tensor) -> None:
    """Take in that a weight has changed."""
    entry.packed = entry.digest = None
    entry.num_unpacked = 0
    entry.version, entry.pointer = weight._version, weight.data_ptr()  # noqa: SLF001


def _pack(entry: _Entry, weight: torch.Tensor) -> None:
    own = weight.detach()
    entry.digest = _digest(own)
    entry.packed = torch.ops.mkldnn._reorder_linear_weight(own, _ROWS_HINT)  # noqa: SLF001


def _has_kernels(dtype: torch.dtype) -> bool:
    operators = torch.ops.mkldnn
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if not is_built or not all(hasattr(operators, name) for name in names):
        return False
    return dtype != torch.bfloat16 or bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001


_BLOCK: Final = 2048
"""Words that one number is made of. A change of one word always shows in it."""

_MARKS: Final = np.random.default_rng(1).integers(0, 1 << 63, _BLOCK, np.uint64)
"""One for each place in a block, so that an exchange of words shows."""


def _digest(weight: torch.Tensor) -> NDArray[np.uint64]:
    """Return uint64[blocks], numbers that change with the contents of a contiguous weight."""
    content: NDArray[np.uint8] = weight.detach().reshape(-1).view(torch.uint8).numpy()
    words = content[: len(content) // 8 * 8].view(np.uint64)
    digest = np.empty(-(-len(words) // _BLOCK) + 1, np.uint64)
    digest[-1] = int.from_bytes(content[len(words) * 8 :].tobytes(), "little")
    sum_words(words, _MARKS, digest)
    return digest


@kernel()
def sum_words(
    words: NDArray[np.uint64], marks: NDArray[np.uint64], sums: NDArray[np.uint64]
) -> None:
    """Sum the words of each block, each xored with the mark of its place: as fast as memory is.

    Args:
        words: uint64[n].
        marks: uint64[size of a block].
        sums: uint64[ceil(n / size of a block) or more], written to.
    """
    size = len(marks)
    num_whole = len(words) // size
    for block in range(num_whole):
        part = words[block * size : (block + 1) * size]  # of a known length, for the compiler
        total = np.uint64(0)
        for at in range(size):
            total += part[at] ^ marks[at]
        sums[block] = total
    rest = words[num_whole * size :]
    if len(rest):
        total = np.uint64(0)
        for at in range(len(rest)):
            total += rest[at] ^ marks[at]
        sums[num_whole] = total
