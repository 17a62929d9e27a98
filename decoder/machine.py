"""What figures and costs depend on: the machine, and the versions of what computes on it."""

import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the processor's name as the system knows it; empty where it does not."""
    with suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def device_name(device: torch.device) -> str:
    """Return what kind of device it is, and which one where torch knows more than that."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return device.type


def describe_machine() -> dict[str, Any]:
    """Return the machine as plain values."""
    return {
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of what computes."""
    names = ("foredraft", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
