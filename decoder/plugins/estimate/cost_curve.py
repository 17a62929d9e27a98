"""The time of a pass by its number of nodes: measured, read from a file, or from a roofline.

A roofline (Williams et al. 2009, doi:10.1145/1498765.1498785) takes the longer of two times: the
time to read the weights once, and the time to multiply every row of the pass by them. The time to
read the KV cache of each sequence is added. So nodes are free until arithmetic takes longer than
reading.
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
"""Shares of the data sheet's peaks that tuned kernels reach with large matrices. With a lower share
of arithmetic, fewer nodes are free."""

_CONTEXTS: Final = (0, 1 << 20)
"""Time is linear in the context, so two points define it."""

_BYTES_PER_WEIGHT: Final = 2


@dataclass(frozen=True, slots=True)
class CostCurve:
    """The time of a pass, and where that figure comes from.

    Attributes:
        surface: seconds by context and by tokens of one sequence in the pass.
        source: where the figures come from, in a few words.
        assumptions: the assumptions behind the figures, one sentence each.
        batch: number of sequences that share a pass; the drafter drafts for them one after the
            other.
        roofline: name of the roofline that gave the figures; empty if passes were measured. A
            roofline leaves out the engine's own time, so its speed-ups are upper bounds.
    """

    surface: CostSurface
    source: str
    assumptions: tuple[str, ...] = field(default=())
    batch: int = 1
    roofline: str = ""

    def seconds(self, num_nodes: int, context: int) -> float:
        """Return the seconds of a pass that verifies `num_nodes` nodes after `context` tokens."""
        return self.surface.pass_s(num_nodes + 1, context)

    def reaching(self, max_nodes: int) -> "CostCurve":
        """Return a curve that covers passes of `max_nodes` nodes.

        Beyond the widest pass, the curve is extrapolated from the last two widths. An added
        assumption says so.
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
        told = (
            f"beyond {widest - 1} nodes, extrapolated from passes of {before - 1} and {widest - 1}"
        )
        return replace(self, surface=wider, assumptions=(*self.assumptions, told))


def roofline(name: str, batch: int, max_nodes: int) -> CostCurve:
    """Return the built-in curve with a name from `ROOFLINES`.

    Args:
        name: model size and device, such as "8b-h100".
        batch: number of sequences in a pass.
        max_nodes: largest number of nodes for each sequence.
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
                f"sheet): up to {num_free} nodes for each sequence are free"
            ),
            (
                f"KV cache of {size.kv_bytes / 1024:.0f} KiB per token, read once in a pass; the "
                "engine's own time in a step is left out"
            ),
        ),
        batch,
        name,
    )


def measured(language_model: "LanguageModel", store: "CostStore | None") -> CostCurve:
    """Return the costs of a model's passes on this machine, from the store or by measuring.

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
            f"{language_model.name} cannot verify draft trees, and the estimate assumes them: name "
            "another --model, or pass its costs with --costs"
        )
    surface = known_costs(target, language_model.model, store)
    model = language_model.model
    dtype = str(model.dtype).removeprefix("torch.")
    return CostCurve(
        surface,
        f"passes of {language_model.name} in {dtype}, measured on this machine ({model.device})",
        (f"one sequence in a pass, after {_contexts(surface)} tokens of context",),
    )


def from_file(path: Path) -> CostCurve:
    """Read measured costs: a file of the cost cache, a report of `bench --json`, or a plain table.

    A plain table is `{"widths": [1, 2, ...], "seconds": [...]}`. A width is the number of nodes
    plus one. If the table has `contexts`, `seconds` holds one row for each context.

    Raises:
        CostFileError: the file cannot be read or holds no costs.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CostFileError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    try:
        surface = checked_surface(*_axes(content))
        _, _ = surface.widths[:2]  # a slope takes two widths
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CostFileError(
            f'{path} does not hold the costs of passes: it must be {{"widths": [1, 2, ...], '
            '"seconds": [...]} with rising widths, a file of the cost cache, or a report of '
            "`bench --json`"
        ) from error
    return CostCurve(
        surface,
        f"costs in {path}",
        (f"as the file states them, after {_contexts(surface)} tokens of context",),
    )


def _axes(content: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the contexts, widths and rows of seconds from content in any of the three forms.

    Raises:
        KeyError, TypeError, ValueError or AttributeError: the content has none of the forms.
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
