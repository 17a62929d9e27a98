"""What a pass costs by the nodes that it verifies: measured, read from a file, or by a roofline.

A roofline (Williams et al. 2009, doi:10.1145/1498765.1498785) takes the longer of two times: to
read the weights once, and to multiply every row of the pass by them. Reading the KV cache of each
sequence comes on top. So nodes are free until arithmetic takes longer than reading.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from decoder.budget.costs import CostSurface, checked_surface
from decoder.errors import CostFileError, UnsupportedModelError
from decoder.plugins.estimate.options import DEVICES, SIZES
from indexer.errors import reason_of

if TYPE_CHECKING:
    from decoder.budget.cost_store import CostStore
    from decoder.model.pretrained import LanguageModel

BANDWIDTH_SHARE: Final = 0.8
ARITHMETIC_SHARE: Final = 0.6
"""Shares of the stated peaks that are reached: what tuned kernels come to with large matrices. A
lower share of arithmetic makes nodes cost sooner."""

_CONTEXTS: Final = (0, 1 << 20)
"""Time is linear in the context, so that two points state it."""

_BYTES_PER_WEIGHT: Final = 2


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a pass takes, and how that is known.

    Attributes:
        surface: seconds by context and by tokens of one sequence in the pass.
        source: where the figures come from, in a few words.
        assumptions: what they take for granted, a sentence each.
        batch: sequences that share a pass; drafts for them are made one after the other.
        roofline: the name that it was computed for from data sheets, without the engine's own time,
            so that what it promises is the most there can be; empty where passes were measured.
    """

    surface: CostSurface
    source: str
    assumptions: tuple[str, ...] = field(default=())
    batch: int = 1
    roofline: str = ""

    def seconds(self, num_nodes: int, context: int) -> float:
        """Return what a pass takes that verifies so many nodes behind `context` tokens."""
        return self.surface.pass_s(num_nodes + 1, context)

    def reaching(self, max_nodes: int) -> "CostCurve":
        """Return a curve that knows passes of `max_nodes` nodes.

        Beyond the widest pass it goes on as between the last two widths, and says so.
        """
        surface, widest = self.surface, self.surface.widths[-1]
        if max_nodes < widest:
            return self
        last, before = widest, surface.widths[-2]
        share = (max_nodes + 1 - last) / (last - before)
        rows = tuple(
            (*row, row[-1] + share * max(row[-1] - row[-2], 0.0)) for row in surface.seconds
        )
        wider = CostSurface(surface.contexts, (*surface.widths, max_nodes + 1), rows)
        told = f"beyond {widest - 1} nodes, passes cost as between {before - 1} and {widest - 1}"
        return replace(self, surface=wider, assumptions=(*self.assumptions, told))


def roofline(name: str, batch: int, max_nodes: int) -> CostCurve:
    """Return the built-in curve of a name in `ROOFLINES`.

    Args:
        name: of model size and device, such as "8b-h100".
        batch: sequences in a pass.
        max_nodes: most nodes for each of them.
    """
    size_name, _, device_name = name.partition("-")
    size, device = SIZES[size_name], DEVICES[device_name]
    bytes_per_s = device.bytes_per_s * size.num_devices * BANDWIDTH_SHARE
    flops = device.flops * size.num_devices * ARITHMETIC_SHARE
    reading_s = size.num_parameters * _BYTES_PER_WEIGHT / bytes_per_s
    row_s = 2 * size.num_parameters * batch / flops
    widths = tuple(range(1, max_nodes + 2))
    rows = tuple(
        tuple(
            max(reading_s, row_s * width) + context * batch * size.kv_bytes / bytes_per_s
            for width in widths
        )
        for context in _CONTEXTS
    )
    num_free = max(int(reading_s / row_s) - 1, 0)
    devices = f"{size.num_devices} x " if size.num_devices > 1 else ""
    where = f"{size.name} on {devices}{device.name}, {_batch(batch)}"
    return CostCurve(
        CostSurface(_CONTEXTS, widths, rows),
        f"roofline of {where}",
        (
            (
                f"{size.num_parameters / 1e9:g}e9 weights in bfloat16, all read once in a pass: "
                f"{reading_s * 1e3:.2f} ms at {BANDWIDTH_SHARE:.0%} of "
                f"{device.bytes_per_s / 1e12:g} TB/s (data sheet)"
            ),
            (
                f"arithmetic at {ARITHMETIC_SHARE:.0%} of {device.flops / 1e12:.0f} TFLOPS (data "
                f"sheet): nodes are free up to {num_free} for each sequence"
            ),
            (
                f"KV cache of {size.kv_bytes / 1024:.0f} KiB a token, read once in a pass; the "
                "engine's own time for a step is left out"
            ),
        ),
        batch,
        name,
    )


def measured(language_model: "LanguageModel", store: "CostStore | None") -> CostCurve:
    """Return what passes of a model cost on this machine, measured unless a store knows it.

    Raises:
        UnsupportedModelError: the model cannot verify trees.
    """
    from decoder.budget.cost_store import known_costs  # noqa: PLC0415  (loads torch)
    from decoder.model.capability_check import FOUND_HERE  # noqa: PLC0415  (as above)
    from decoder.model.compatibility import Capability  # noqa: PLC0415  (as above)
    from decoder.model.target import Target  # noqa: PLC0415  (as above)

    target = Target(language_model.model, verdicts=store or FOUND_HERE)
    if target.capability is not Capability.TREES:
        raise UnsupportedModelError(
            f"{language_model.name} cannot verify trees of tokens, which the estimate counts: "
            "name another --model, or give its costs by --costs"
        )
    surface = known_costs(target, language_model.model, store)
    model = language_model.model
    dtype = str(model.dtype).removeprefix("torch.")
    return CostCurve(
        surface,
        f"passes of {language_model.name} in {dtype}, measured on this machine ({model.device})",
        (f"one sequence in a pass, behind {_contexts(surface)} tokens of context",),
    )


def from_file(path: Path) -> CostCurve:
    """Read measured costs: a file of the cost cache, a report of `bench --json`, or a plain table.

    A plain table is `{"widths": [1, 2, ...], "seconds": [...]}`, a width being the nodes and one
    more; with `contexts`, `seconds` holds a row for each.

    Raises:
        CostFileError: the file cannot be read or holds no costs.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CostFileError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    try:
        surface = checked_surface(*_axes(content))
        _, _ = surface.widths[:2]  # how costs rise takes two widths
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CostFileError(
            f'{path} holds no costs of passes: expected {{"widths": [1, 2, ...], "seconds": '
            "[...]}, both rising, a file of the cost cache, or a report of `foredraft bench --json`"
        ) from error
    return CostCurve(
        surface,
        f"costs in {path}",
        (f"as the file states them, behind {_contexts(surface)} tokens of context",),
    )


def _axes(content: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return contexts, widths and rows of seconds of any of the forms.

    Raises:
        KeyError, TypeError, ValueError or AttributeError: it is none of them.
    """
    if "cost_curve" in content:
        rows = content["cost_curve"]
        widths = list(next(iter(rows.values()), ()))
        return list(rows), widths, [[row[width] for width in widths] for row in rows.values()]
    if "contexts" in content:
        return content["contexts"], content["widths"], content["seconds"]
    return [0], content["widths"], [content["seconds"]]


def _contexts(surface: CostSurface) -> str:
    return " and ".join(f"{context:,}" for context in surface.contexts)


def _batch(batch: int) -> str:
    return "one sequence in a pass" if batch == 1 else f"{batch} sequences in a pass"
