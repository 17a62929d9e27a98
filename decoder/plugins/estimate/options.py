"""The options of an estimate, and the data sheets behind its rooflines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from decoder.errors import refuse_contradictions
from decoder.model.pretrained import ModelOptions, Precision
from indexer.flags import Metavar
from indexer.tokenizer import DEFAULT_MODEL
from retriever.limits import Limits
from retriever.operations.settings import RecordSettings


class Device(NamedTuple):
    """An accelerator with the figures of its maker's data sheet.

    Attributes:
        name: name of the product.
        bytes_per_s: memory bandwidth in bytes per second.
        flops: dense bfloat16 operations per second.
    """

    name: str
    bytes_per_s: float
    flops: float


class Size(NamedTuple):
    """A model in bfloat16.

    Attributes:
        name: name of a model of this size.
        num_parameters: number of parameters; every pass reads and multiplies by all of them.
        kv_bytes: bytes of KV cache for each token of context.
        num_devices: number of devices; they share weights and work evenly.
    """

    name: str
    num_parameters: float
    kv_bytes: int
    num_devices: int = 1


DEVICES: Final[Mapping[str, Device]] = {
    "h100": Device("NVIDIA H100 SXM", 3.35e12, 989e12),
    "a100": Device("NVIDIA A100 SXM 80 GB", 2.039e12, 312e12),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", 1.008e12, 165e12),
    "l4": Device("NVIDIA L4", 300e9, 121e12),
}
"""Devices by the part of a roofline's name after the dash; figures from the makers' data sheets."""

# KV bytes: layers x KV heads x size of a head x 2 (keys, values) x 2 bytes.
SIZES: Final[Mapping[str, Size]] = {
    "1b": Size("Llama 3.2 1B", 1.24e9, 16 * 8 * 64 * 4),
    "8b": Size("Llama 3.1 8B", 8.03e9, 32 * 8 * 128 * 4),
    "70b": Size("Llama 3.1 70B", 70.6e9, 80 * 8 * 128 * 4, num_devices=4),
}
"""Models by the part of a roofline's name before the dash."""

ROOFLINES: Final = tuple(
    f"{size}-{device}"
    for size in SIZES
    for device in DEVICES
    if size != "70b" or device in {"h100", "a100"}  # it does not fit on the others
)
DEFAULT_ROOFLINE: Final = "8b-h100"

KIND_FIELDS: Final = ("category", "kind", "task", "model")
"""Fields that may name a record's kind of traffic; the first one that the log has is used."""

NO_FIELD: Final = "none"
"""Value of --by that treats all traffic as one kind."""

_MODEL: Final = ModelOptions(DEFAULT_MODEL)
_MAX_BUDGET: Final = Limits().max_budget_nodes

BUDGETS: Final = (4, 8, 16, 32, 64)
"""Default budgets of an estimate: largest numbers of nodes in a draft."""


class LogSettings(RecordSettings):
    """Which records of the log are replayed, and how they are read."""

    model_config = ConfigDict(title="Log", extra="forbid", frozen=True, defer_build=True)

    by: Annotated[
        str | None,
        Metavar("FIELD"),
        Field(
            description=f"The field of a record that names its kind of traffic, or {NO_FIELD}. "
            f"Default: the first of {', '.join(KIND_FIELDS)} that the log has."
        ),
    ] = None
    limit: Annotated[
        int,
        Field(
            ge=1,
            description="Replay at most this many outputs, the first ones. With more outputs, "
            "later ones have more text to draft from, and the replay takes longer.",
        ),
    ] = 200
    tokenizer: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="The tokenizer for texts: a hub id, a folder or a .gguf file. Default: "
            f"the tokenizer of --model, else of the index, else of {DEFAULT_MODEL}."
        ),
    ] = None


class EstimatedDrafts(BaseModel):
    """What drafts come from, by which rules, and how large they are."""

    model_config = ConfigDict(title="Drafts", extra="forbid", frozen=True, defer_build=True)

    index: Annotated[
        list[Path],
        Metavar("DIR"),
        Field(
            description="An index to draft from as well. It should not hold the log's own outputs: "
            "they would predict themselves. Repeatable."
        ),
    ] = []
    drafter: Annotated[
        list[str],
        Metavar("NAME"),
        Field(
            description="Another drafter to replay for comparison with our own; names as in "
            "`replay --drafter`. Repeatable. Default: prompt-lookup."
        ),
    ] = ["prompt-lookup"]
    budget: Annotated[
        list[int],
        Metavar("N"),
        Field(
            description="The largest number of nodes in a draft, from 1 to "
            f"{_MAX_BUDGET}. Repeatable. Default: "
            f"{', '.join(map(str, BUDGETS))}."
        ),
    ] = []

    @property
    def budgets(self) -> list[int]:
        """The budgets in ascending order."""
        return sorted(set(self.budget or BUDGETS))

    def check(self) -> None:
        """Refuse budgets that are out of range.

        Raises:
            ContradictoryOptionsError: a budget is out of range.
        """
        is_possible = 1 <= self.budgets[0] <= self.budgets[-1] <= _MAX_BUDGET
        refuse_contradictions((not is_possible, f"--budget must be from 1 to {_MAX_BUDGET} nodes"))


class CostSettings(BaseModel):
    """Where the costs of passes come from: --model, --costs or --roofline."""

    model_config = ConfigDict(
        title="Costs of passes", extra="forbid", frozen=True, defer_build=True
    )

    model: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="Measure the passes of this model on this machine: a hub id, a folder or "
            "a .gguf file."
        ),
    ] = None
    dtype: Annotated[Precision, Field(description="With --model: data type of the model.")] = (
        _MODEL.precision
    )
    device: Annotated[str, Metavar("DEVICE"), Field(description="With --model: device to use.")] = (
        _MODEL.device
    )
    cost_cache: Annotated[
        str | None,
        Metavar("DIR"),
        Field(description="With --model: where costs are stored; none: always measure."),
    ] = None
    costs: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Read the costs from a file: a report of `bench --json`, or JSON with "
            "`widths` (number of nodes plus one) and `seconds`."
        ),
    ] = None
    roofline: Annotated[
        str | None,
        Metavar("NAME"),
        Field(
            description="Compute the costs from data sheets, for a bfloat16 model on a device: "
            f"{', '.join(ROOFLINES)}. Default: {DEFAULT_ROOFLINE}."
        ),
    ] = None
    batch: Annotated[
        int, Field(ge=1, description="With --roofline: number of sequences in a pass.")
    ] = 1

    def check(self) -> None:
        """Refuse options that contradict one another.

        Raises:
            ContradictoryOptionsError: there is more than one source of costs, or --batch comes
                with measured costs, or there is no such roofline.
        """
        named = {"--model": self.model, "--costs": self.costs, "--roofline": self.roofline}
        given = [option for option, value in named.items() if value is not None]
        refuse_contradictions(
            (
                len(given) > 1,
                f"{' and '.join(given)} exclude each other: choose one source of costs",
            ),
            (
                self.batch != 1 and (self.model or self.costs),
                (
                    f"--batch needs --roofline: the costs of {''.join(given[:1])} hold only for "
                    "the batch that they were measured with"
                ),
            ),
            (
                self.roofline is not None and self.roofline not in ROOFLINES,
                (
                    f"--roofline {self.roofline} is unknown: choose from {', '.join(ROOFLINES)}, "
                    "measure with --model, or pass --costs"
                ),
            ),
        )
