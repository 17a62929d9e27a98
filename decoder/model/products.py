"""Packed copies of weights on a CPU, each used while its weight is unchanged."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from decoder.model.stamp import parameters_of
from retriever.kernels.compiling import kernel

LeastWeights = Mapping[torch.dtype, int]
"""Number of weights in the smallest layer to pack, for each dtype that is packed."""

LEAST_WEIGHTS: Final[LeastWeights] = {torch.float32: 1 << 16, torch.bfloat16: 1 << 12}
"""Default minimum sizes: for smaller layers, the call takes more time than the layout saves."""

_ROWS_HINT: Final = 32
"""Number of rows for which weights are laid out; measurements show that this layout works well from
one row to thousands."""

_LEAST_USES: Final = 16
"""Number of products with a changed weight before the weight is packed again. Packing takes as much
time as 15 to 25 packed products save, and a model in training changes all of its weights after
every rollout."""

linear: Final[Callable[..., torch.Tensor]] = torch._C._nn.linear  # noqa: SLF001  as torch.nn.functional has it
"""torch's own product of rows and weights."""


class _Entry:
    """The state of a weight.

    Attributes:
        weight: weak reference to the weight.
        version: version counter of the weight when last checked.
        pointer: address of the weight's contents when last checked.
        dtype: dtype of the packed copies; `None` if the weight cannot be packed.
        num_unpacked: number of products without a copy since the weight changed.
        packed: the weight's own packed copy, if any.
        digest: digest of the copied contents.
        calls: weights that multiplied the same rows in the last pass, this weight first.
        joint: the packed copy that these weights share, if any.
        stays_alone: whether the weight must not share a copy.
    """

    __slots__ = (
        "__weakref__",
        "calls",
        "digest",
        "dtype",
        "joint",
        "num_unpacked",
        "packed",
        "pointer",
        "stays_alone",
        "version",
        "weight",
    )

    def __init__(self, weight: "ref[torch.Tensor]", dtype: torch.dtype | None) -> None:
        self.weight, self.dtype = weight, dtype
        self.version, self.pointer = -1, 0
        self.num_unpacked = _LEAST_USES - 1  # one product without: some weights are used only once
        self.packed: torch.Tensor | None = None
        self.digest: NDArray[np.uint64] | None = None
        self.calls: tuple[_Call, ...] = ()
        self.joint: _Joint | None = None
        self.stays_alone = False

    def has_moved(self, weight: torch.Tensor) -> bool:
        """Return whether the weight was written to or moved since the last check."""
        return self.version != weight._version or self.pointer != weight.data_ptr()  # noqa: SLF001

    def holds(self) -> bool:
        """Return whether the weight still exists and is unchanged since the last check."""
        weight = self.weight()
        return weight is not None and not self.has_moved(weight)

    def renew(self, weight: torch.Tensor) -> None:
        """Record that the weight has changed."""
        self.drop()
        self.num_unpacked = 0
        self.version, self.pointer = weight._version, weight.data_ptr()  # noqa: SLF001

    def drop(self) -> None:
        """Drop the weight's copies; drop a joint copy for all its members."""
        joint, self.joint = self.joint, None
        self.packed = self.digest = None
        if joint is not None:
            for member in _there(joint.calls):
                if member.joint is joint:
                    member.drop()

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack the weight, and return the copy, which is used from now on."""
        own = weight.detach()
        self.digest, self.packed = _digest(own), _laid_out(own)
        return self.packed


_Call = tuple["ref[_Entry]", "ref[torch.Tensor] | None"]
"""A weight, and the bias of the product with it."""

_Product = tuple[torch.Tensor, torch.Tensor | None]
"""The result of a product, and the bias added in it."""


class _Joint:
    """A joint packed copy of several weights that multiply the same rows, in one product.

    Synchronizing threads takes about 50 microseconds per product. With joint copies, a one-row pass
    of a small model needs 121 products instead of 211.

    Args:
        calls: weights and biases of two or more products.
        entries: entries of these weights.
        weights: the weights themselves.
    """

    def __init__(
        self, calls: tuple[_Call, ...], entries: Sequence[_Entry], weights: Sequence[torch.Tensor]
    ) -> None:
        self.calls = calls
        self._num_biases = sum(bias is not None for _, bias in calls)
        self._sizes = [len(weight) for weight in weights]
        own = [weight.detach() for weight in weights]
        digests = [*map(_digest, own)]
        self._packed = _laid_out(torch.cat(own))
        self.num_bytes = self._packed.numel() * self._packed.element_size()
        for entry, digest in zip(entries, digests, strict=True):
            entry.joint, entry.packed, entry.digest = self, None, digest

    @classmethod
    def made_of(cls, calls: tuple[_Call, ...]) -> "_Joint | None":
        """Return a joint copy of weights that multiplied the same rows, if possible."""
        entries = _there(calls)
        weights = [weight for entry in entries if (weight := entry.weight()) is not None]
        is_ready = all(entry.holds() and entry.num_unpacked == _LEAST_USES for entry in entries)
        if len(weights) < len(calls) or not is_ready:
            return None
        kinds = {(weight.dtype, weight.shape[1]) for weight in weights}
        has_biases = {bias is None for _, bias in calls}
        is_free = not any(entry.stays_alone or entry.joint is not None for entry in entries)
        is_once = len({*map(id, entries)}) == len(calls)
        if not (is_once and is_free and len(kinds) == len(has_biases) == 1):
            entries[0].stays_alone = True
            return None
        return cls(calls, entries, weights)

    def is_led_by(self, entry: _Entry) -> bool:
        """Return whether this is the first weight of the joint copy."""
        return self.calls[0][0]() is entry

    def products(self, rows: torch.Tensor) -> dict[_Entry, _Product] | None:
        """Return all products with some rows; `None`, without a copy, if a weight changed."""
        entries = _there(self.calls)
        biases = [None if bias is None else bias() for _, bias in self.calls]
        added = [bias for bias in biases if bias is not None]
        is_whole = len(entries) == len(self.calls) and len(added) == self._num_biases
        if not is_whole or not all(map(_Entry.holds, entries)):
            entries[0].drop()
            return None
        bias = torch.cat(added) if added else None
        made = torch.split(_multiply(rows, self._packed, bias), self._sizes, dim=-1)
        return dict(zip(entries, zip(made, biases, strict=True), strict=True))


def _there(calls: Sequence[_Call]) -> list[_Entry]:
    """Return the entries of the weights that still exist."""
    return [entry for call, _ in calls if (entry := call()) is not None]


class Products:
    """Packed copies of weights in oneDNN's own layout, which the `Multiplier` of each pass uses.

    `torch.nn.functional.linear` lays weights out again in every call. For a pass of few rows, that
    takes as long as multiplying. A copy is found by its weight's identity, and used while the
    weight's version and address are unchanged; any ordinary change modifies one of these. `audit`
    finds other changes, such as `weight.data.mul_(2)`. For weights that cannot be packed
    (quantised, divided over processes, recomputed in each pass, on another device), torch computes
    the product.

    Args:
        least: number of weights in the smallest layer to pack, by dtype.
    """

    def __init__(self, least: LeastWeights = LEAST_WEIGHTS) -> None:
        self._least = {dtype: size for dtype, size in least.items() if _has_kernels(dtype)}
        self._entries: dict[int, _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed copies, in addition to the weights themselves."""
        entries = list(self._entries.values())
        own = (each.packed for each in entries)
        joint = {each.joint for each in entries if each.joint is not None}
        alone = sum(each.numel() * each.element_size() for each in own if each is not None)
        return alone + sum(each.num_bytes for each in joint)

    def takes(self, model: nn.Module) -> bool:
        """Return whether a model has at least one weight that can be packed."""
        return any(map(self._is_packable, parameters_of(model)))

    def audit(self) -> bool:
        """Drop copies of weights that changed unnoticed; return whether there were any.

        All packed weights are read once, by as many threads as torch uses.
        """
        packed = [
            (entry, weight)
            for entry in list(self._entries.values())
            if entry.digest is not None and (weight := entry.weight()) is not None
        ]
        num_threads = max(1, min(torch.get_num_threads(), len(packed)))
        with ThreadPoolExecutor(num_threads) as pool:
            parts = pool.map(_changed, (packed[at::num_threads] for at in range(num_threads)))
        changed = list(chain.from_iterable(parts))
        for entry, weight in changed:
            entry.renew(weight)
        return bool(changed)

    def of(self, weight: torch.Tensor) -> _Entry:
        """Return the entry of a weight; a new weight gets a new entry."""
        key = id(weight)
        entry = self._entries.get(key)
        if entry is not None and entry.weight() is weight:
            return entry
        is_packable = self._is_packable(weight)
        own = ref(weight, lambda _: self._lose(key))
        entry = self._entries[key] = _Entry(own, weight.dtype if is_packable else None)
        if is_packable:
            entry.version, entry.pointer = weight._version, weight.data_ptr()  # noqa: SLF001
        return entry

    def _lose(self, key: int) -> None:
        """Drop the entry of a weight that no longer exists."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.drop()

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


class Multiplier:
    """Multiplies rows by weights during one pass, as `torch.nn.functional.linear` does.

    Args:
        products: the packed copies of the weights.
        joins: whether weights that multiply the same rows one after another share a copy. This is
            allowed only if nothing can overwrite the rows in between.
    """

    def __init__(self, products: Products, *, joins: bool) -> None:
        self._products, self._joins = products, joins
        self._rows: torch.Tensor | None = None
        self._calls: list[tuple[_Entry, torch.Tensor | None]] = []
        self._made: dict[_Entry, _Product] = {}

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows @ weight.T + bias, [..., out features]."""
        entry = self._products.of(weight)
        if entry.dtype is not rows.dtype or _is_special():
            return linear(rows, weight, bias)
        if rows is self._rows and (product := self._made_with(entry, bias)) is not None:
            return product
        if entry.has_moved(weight):
            entry.renew(weight)
        if self._joins:
            if rows is not self._rows and (product := self._begun(rows, entry, bias)) is not None:
                return product
            self._calls.append((entry, bias))
        if entry.joint is not None:  # not used in the same order as before
            entry.stays_alone = self._joins
            entry.drop()
        if entry.packed is not None:
            return _multiply(rows, entry.packed, bias)
        if entry.num_unpacked == _LEAST_USES:
            return _multiply(rows, entry.pack(weight), bias)
        entry.num_unpacked += 1
        return linear(rows, weight, bias)

    def _made_with(self, entry: _Entry, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return a product that was computed together with an earlier product of the same rows."""
        product, added = self._made.pop(entry, (None, None))
        return product if added is bias else None

    def _begun(
        self, rows: torch.Tensor, entry: _Entry, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Start with new rows; return their first product if a joint copy computes all."""
        self.end()
        self._rows = rows
        if entry.joint is None and len(entry.calls) > 1 and not entry.stays_alone:
            _Joint.made_of(entry.calls)
        if entry.joint is None or not entry.joint.is_led_by(entry):
            return None
        self._made = entry.joint.products(rows) or {}
        return self._made_with(entry, bias)

    def end(self) -> None:
        """Record which weights multiplied the same rows, after the last of these products."""
        for entry in self._made:  # computed but not used
            entry.stays_alone = True
            entry.drop()
        if self._calls and (leader := self._calls[0][0]).joint is None:
            calls = (
                (ref(entry), None if bias is None else ref(bias)) for entry, bias in self._calls
            )
            leader.calls = tuple(calls)
        self._rows, self._calls, self._made = None, [], {}


def _changed(packed: Sequence[tuple[_Entry, torch.Tensor]]) -> list[tuple[_Entry, torch.Tensor]]:
    """Return the entries and weights that differ from their packed copies."""
    return [
        (entry, weight)
        for entry, weight in packed
        if entry.digest is None
        or entry.has_moved(weight)
        or not np.array_equal(_digest(weight), entry.digest)
    ]


_shared: WeakKeyDictionary[nn.Module, WeakValueDictionary[str, Products]] = WeakKeyDictionary()


def products_of(model: nn.Module, least: LeastWeights = LEAST_WEIGHTS) -> Products:
    """Return the packed copies of a model's weights, shared by all current users of the model."""
    of_model = _shared.setdefault(model, WeakValueDictionary())
    return of_model.setdefault(repr(sorted(map(str, least.items()))), Products(least))


def _is_special() -> bool:
    """Return whether a product needs gradients or another dtype."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, [out features, in features], in oneDNN's own layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)  # noqa: SLF001  no public name
    return packed


def _multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # noqa: SLF001
    return product


def _has_kernels(dtype: torch.dtype) -> bool:
    operators = torch.ops.mkldnn
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if not is_built or not all(hasattr(operators, name) for name in names):
        return False
    return dtype != torch.bfloat16 or bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001


_BLOCK: Final = 2048
"""Number of 64-bit words per digest number. A change of a single word always changes the number."""

_MARKS: Final = np.random.default_rng(1).integers(0, 1 << 63, _BLOCK, np.uint64)
"""One random mark for each place in a block, so that swapped words change the sum."""


def _digest(weight: torch.Tensor) -> NDArray[np.uint64]:
    """Return uint64[blocks], a digest of the contents of a contiguous weight."""
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
    """Sum the words of each block, each xored with the mark of its place, at memory speed.

    Args:
        words: uint64[n], the contents to sum.
        marks: uint64[size of a block], a mark for each place in a block.
        sums: uint64[ceil(n / size of a block) or more], set to the blocks' sums.
    """
    size = len(marks)
    num_whole = len(words) // size
    for block in range(num_whole):
        part = words[block * size : (block + 1) * size]  # the compiler knows its length
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
