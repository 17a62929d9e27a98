"""What an estimate can be asked for: rooflines from data sheets, fields that tell kinds apart."""

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
    """An accelerator as its maker's data sheet states it.

    Attributes:
        name: of the product.
        bytes_per_s: bandwidth of its memory.
        flops: dense bfloat16 operations in a second.
    """

    name: str
    bytes_per_s: float
    flops: float


class Size(NamedTuple):
    """A model in bfloat16.

    Attributes:
        name: of a model of this size.
        num_parameters: all of them are read and multiplied by in every pass.
        kv_bytes: of the KV cache, for each token of context.
        num_devices: that share weights and work evenly.
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
"""By the name that stands behind the dash; figures of the makers' data sheets."""

# KV bytes: layers x heads of keys x their size x 2 (keys, values) x 2 bytes.
SIZES: Final[Mapping[str, Size]] = {
    "1b": Size("Llama 3.2 1B", 1.24e9, 16 * 8 * 64 * 4),
    "8b": Size("Llama 3.1 8B", 8.03e9, 32 * 8 * 128 * 4),
    "70b": Size("Llama 3.1 70B", 70.6e9, 80 * 8 * 128 * 4, num_devices=4),
}
"""By the name that stands before the dash."""

ROOFLINES: Final = tuple(
    f"{size}-{device}"
    for size in SIZES
    for device in DEVICES
    if size != "70b" or device in {"h100", "a100"}  # the others have no room for it
)
DEFAULT_ROOFLINE: Final = "8b-h100"

KIND_FIELDS: Final = ("category", "kind", "task", "model")
"""Fields that say what kind of traffic a record is, the first that the log has."""

NO_FIELD: Final = "none"
"""In place of a field: do not tell kinds apart."""

_MODEL: Final = ModelOptions(DEFAULT_MODEL)
_MAX_BUDGET: Final = Limits().max_budget_nodes

BUDGETS: Final = (4, 8, 16, 32, 64)
"""Most nodes of a draft that an estimate is made for."""


class LogSettings(RecordSettings):
    """What of the log is replayed."""

    model_config = ConfigDict(title="Log", extra="forbid", frozen=True, defer_build=True)

    by: Annotated[
        str | None,
        Metavar("FIELD"),
        Field(
            description="A field of the records that tells kinds of traffic apart, or "
            f"{NO_FIELD}. Default: the first of {', '.join(KIND_FIELDS)} that there is."
        ),
    ] = None
    limit: Annotated[
        int,
        Field(
            ge=1,
            description="Replay only the first so many outputs. The more there are, the more "
            "earlier ones there are to draft from, and the longer it takes.",
        ),
    ] = 200
    tokenizer: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="The tokenizer of texts: a hub id, a folder or a .gguf file. Default: "
            f"that of --model, or else that of the index, or else {DEFAULT_MODEL}."
        ),
    ] = None


class EstimatedDrafts(BaseModel):
    """What is drafted, from what and by which rules."""

    model_config = ConfigDict(title="Drafts", extra="forbid", frozen=True, defer_build=True)

    index: Annotated[
        list[Path],
        Metavar("DIR"),
        Field(
            description="An index to draft from, too. It should not hold the log's own outputs: "
            "they would foretell themselves. Repeatable."
        ),
    ] = []
    drafter: Annotated[
        list[str],
        Metavar("NAME"),
        Field(
            description="A rule of others to replay next to our own drafter, as `replay --drafter` "
            "takes it. Repeatable. Default: prompt-lookup."
        ),
    ] = ["prompt-lookup"]
    budget: Annotated[
        list[int],
        Metavar("N"),
        Field(
            description="Most nodes of a draft, from 1 to "
            f"{_MAX_BUDGET}. Repeatable. Default: "
            f"{', '.join(map(str, BUDGETS))}."
        ),
    ] = []

    @property
    def budgets(self) -> list[int]:
        """The budgets, rising."""
        return sorted(set(self.budget or BUDGETS))

    def check(self) -> None:
        """Refuse budgets that no drafter takes.

        Raises:
            ContradictoryOptionsError: one is out of its range.
        """
        is_possible = 1 <= self.budgets[0] <= self.budgets[-1] <= _MAX_BUDGET
        refuse_contradictions((not is_possible, f"--budget is from 1 to {_MAX_BUDGET} nodes"))


class CostSettings(BaseModel):
    """What passes of the model cost: one of --model, --costs and --roofline."""

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
    dtype: Annotated[Precision, Field(description="With --model: what the model computes in.")] = (
        _MODEL.precision
    )
    device: Annotated[str, Metavar("DEVICE"), Field(description="With --model: where it runs.")] = (
        _MODEL.device
    )
    cost_cache: Annotated[
        str | None,
        Metavar("DIR"),
        Field(description="With --model: where costs are kept, none to measure always."),
    ] = None
    costs: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Read them: a report of `bench --json`, or JSON with `widths` (nodes and "
            "one more) and `seconds`."
        ),
    ] = None
    roofline: Annotated[
        str | None,
        Metavar("NAME"),
        Field(
            description="Compute them from data sheets, for a model in bfloat16 on a device: "
            f"{', '.join(ROOFLINES)}. Default: {DEFAULT_ROOFLINE}."
        ),
    ] = None
    batch: Annotated[
        int, Field(ge=1, description="With --roofline: sequences that share a pass.")
    ] = 1

    def check(self) -> None:
        """Refuse options that contradict one another.

        Raises:
            ContradictoryOptionsError: there is more than one source of costs, or a batch for
                costs that have their own, or no such roofline.
        """
        named = {"--model": self.model, "--costs": self.costs, "--roofline": self.roofline}
        given = [option for option, value in named.items() if value is not None]
        refuse_contradictions(
            (
                len(given) > 1,
                f"{' and '.join(given)} exclude each other: costs come from one place",
            ),
            (
                self.batch != 1 and (self.model or self.costs),
                (
                    f"--batch is for --roofline: costs of {''.join(given[:1])} hold for the "
                    "batch that they were measured with"
                ),
            ),
            (
                self.roofline is not None and self.roofline not in ROOFLINES,
                (
                    f"--roofline {self.roofline}: there are {', '.join(ROOFLINES)}; for others, "
                    "measure with --model or give --costs"
                ),
            ),
        )
