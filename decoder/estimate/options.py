"""What an estimate can be asked for: rooflines from data sheets, fields that tell kinds apart."""

from collections.abc import Mapping
from typing import Final, NamedTuple


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
