"""The name, versions and speed of a CUDA device, kept with the figures measured on it."""

import shutil
import subprocess
from typing import Any, Final

import torch

_ASKED: Final = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return a device as plain values; of one that is not CUDA's, its kind."""
    if device.type != "cuda":
        return {"name": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch's own
    }


def device_state(device: torch.device) -> dict[str, str]:
    """Return driver, clocks in MHz, power in W and temperature in °C, as nvidia-smi says now.

    Empty where there is no such program or it does not know the device.
    """
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return {}
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = [f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits", f"--id={name}"]
    done = subprocess.run([program, *query], capture_output=True, text=True, check=False)
    values = [value.strip() for value in done.stdout.split(",")]
    if done.returncode or len(values) != len(_ASKED):
        return {}
    return dict(zip(_ASKED, values, strict=True))
