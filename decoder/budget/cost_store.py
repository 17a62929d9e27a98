"""Stores what was measured about a model: the costs of its passes, and what it verifies exactly."""

import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from logging import getLogger
from pathlib import Path
from typing import Any, Final, TypeVar

import platformdirs
import torch
from transformers import PreTrainedModel

from decoder.budget.costs import CostSurface, checked_surface
from decoder.budget.pass_timing import decided, measure_costs, still_holds
from decoder.model.capability_check import FOUND_HERE, ModelVerdict
from decoder.model.compatibility import Capability
from decoder.model.stamp import parameters_of, undisturbed
from decoder.model.target import Target
from decoder.model.user_model import has_code_of_others
from indexer.tokenizer import CACHE_VARIABLE, NOWHERE

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the system's name for the processor; empty if there is none."""
    with suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def device_name(device: torch.device) -> str:
    """Return the kind of a device, with its name if it is a CUDA device."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return device.type


def describe_machine() -> dict[str, Any]:
    """Describe the machine in plain values."""
    return {
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that passes depend on."""
    names = ("foredraft", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


_log = getLogger(__name__)
_FORMAT: Final = 1
_COST: Final = "cost"
_CHECK: Final = "check"
_UNSPECIFIC: Final = ("_name_or_path", "name_or_path", "transformers_version")

_Kept = TypeVar("_Kept")

Key = dict[str, Any]
"""Everything on which stored costs or verdicts depend, as JSON values."""


def store_at(stated: str | None) -> "CostStore | None":
    """Return the store in a directory; `None` if `stated` is "none".

    Args:
        stated: the directory; `None` for the directory in `FOREDRAFT_CACHE` or, without it, the
            user's cache directory.
    """
    stated = stated or os.environ.get(CACHE_VARIABLE)
    if stated == NOWHERE:
        return None
    return CostStore(Path(stated or platformdirs.user_cache_dir("foredraft", appauthor=False)))


def key_of(model: PreTrainedModel) -> Key:
    """Return everything on which the costs of a model's passes depend.

    This includes the types of the model's modules, because faster modules may have replaced them.
    """
    return {**_computed(model), "machine": describe_machine()}


def _computed(model: PreTrainedModel) -> Key:
    """Return everything but the weights on which the results of a model's passes depend."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _UNSPECIFIC}
    stated = json.dumps(config, sort_keys=True, default=str).encode()
    return {
        "architecture": type(model).__name__,
        "config": sha256(stated).hexdigest(),
        "modules": _modules(model),
        "dtype": str(model.dtype),
        **_division(model),
        "device": device_name(model.device),
        "attention": str(model.config._attn_implementation),  # noqa: SLF001  no public name
        "versions": versions(),
    }


def _modules(model: PreTrainedModel) -> str:
    """Return a digest of the names, types and modes of a model's modules."""
    found = undisturbed(lambda: list(model.named_modules()))
    stated = [(name, type(each).__qualname__, each.training) for name, each in found]
    return sha256(json.dumps(stated).encode()).hexdigest()


def _division(model: PreTrainedModel) -> Key:
    """Return the number of processes and the devices over which a model is divided, if any."""
    devices = sorted({str(weight.device) for weight in parameters_of(model)})
    stated = {"processes": model.tp_size, "devices": devices if len(devices) > 1 else None}
    return {name: value for name, value in stated.items() if value is not None}


@dataclass(frozen=True, slots=True)
class CostStore:
    """A directory with a small JSON file for each key; also stores verdicts (see `Verdicts`).

    If a file cannot be read or written, that is logged, and the costs or verdict are found anew.

    Attributes:
        directory: folder of the files, created with the first file.
    """

    directory: Path

    def load(self, key: Key) -> CostSurface | None:
        """Return the stored costs for a key; `None` if there are none or they are damaged."""
        return self._loaded(_COST, key, _surface)

    def save(self, key: Key, surface: CostSurface) -> None:
        """Store the measured costs for a key; the file is written atomically."""
        content = {
            "contexts": surface.contexts,
            "widths": surface.widths,
            "seconds": surface.seconds,
        }
        self._save(_COST, key, content)

    def verdict_on(self, model: PreTrainedModel) -> ModelVerdict | None:
        """Return the stored verdict on models of this architecture, dtype and versions, if any.

        Keys do not cover foreign code: for a model with foreign hooks or modules, a verdict is
        valid only as long as the model object exists.
        """
        if has_code_of_others(model):
            return FOUND_HERE.verdict_on(model)
        return self._loaded(_CHECK, _computed(model), _verdict)

    def keep_verdict(self, model: PreTrainedModel, verdict: ModelVerdict) -> None:
        """Store the verdict on models like this one; the file is written atomically."""
        if has_code_of_others(model):
            FOUND_HERE.keep_verdict(model, verdict)
            return
        found = None if verdict.capability is None else verdict.capability.name
        content = {"capability": found, "reason": verdict.reason}
        self._save(_CHECK, _computed(model), content)

    def _loaded(self, kind: str, key: Key, read: Callable[[dict[str, Any]], _Kept]) -> _Kept | None:
        path = self._path(kind, key)
        try:
            return read(_checked_content(json.loads(path.read_bytes()), key))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("%ss in %s are unusable and will be measured again: %r", kind, path, error)
            return None

    def _save(self, kind: str, key: Key, content: dict[str, Any]) -> None:
        text = json.dumps({"format": _FORMAT, "key": key, **content}, indent=1)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _replace(self._path(kind, key), text)
        except OSError as error:
            _log.warning("measured %ss cannot be stored: %s", kind, error)

    def _path(self, kind: str, key: Key) -> Path:
        digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.directory / f"{kind}-{digest[:24]}.json"


def known_costs(
    target: Target,
    model: PreTrainedModel,
    store: CostStore | None,
    measure: Callable[[Target], CostSurface] = measure_costs,
    holds: Callable[[Target, CostSurface], bool] = still_holds,
) -> CostSurface:
    """Return the costs of a target's passes: stored costs if they still hold, else measured costs.

    Logs a warning before measuring, so that a waiting user sees the reason even if the program has
    not set up logging.

    Args:
        target: the target to measure; a sequence in progress is lost.
        model: the target's model.
        store: the store of costs; `None` to always measure.
        measure: function that measures the costs.
        holds: function that returns whether stored costs are still valid.
    """
    return decided(target, lambda: _found_costs(target, model, store, measure, holds))


def _found_costs(
    target: Target,
    model: PreTrainedModel,
    store: CostStore | None,
    measure: Callable[[Target], CostSurface],
    holds: Callable[[Target, CostSurface], bool],
) -> CostSurface:
    """Return the costs of a target's passes; see `known_costs`."""
    if store is None:
        _log.warning("measuring what passes cost: a few seconds")
        return measure(target)
    key = key_of(model) | {"packed": target.packs_weights, "padded": target.pads_passes}
    surface = store.load(key)
    if surface is not None and holds(target, surface):
        return surface
    why = (
        "once on this machine: a few seconds"
        if surface is None
        else "again: passes are slower or faster now, as the machine is busier or quieter"
    )
    _log.warning("measuring what passes cost, %s", why)
    surface = measure(target)
    store.save(key, surface)
    return surface


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, through a temporary file in the same folder."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".cost-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _checked_content(content: dict[str, Any], key: Key) -> dict[str, Any]:
    """Return the content of a file after checking its format and key.

    Raises:
        ValueError, KeyError or TypeError: the content is for another key or in another format.
    """
    if content["format"] != _FORMAT or content["key"] != json.loads(json.dumps(key)):
        raise ValueError("written for another key or format")
    return content


def _surface(content: dict[str, Any]) -> CostSurface:
    """Return checked costs; see `checked_surface` for the errors."""
    return checked_surface(content["contexts"], content["widths"], content["seconds"])


def _verdict(content: dict[str, Any]) -> ModelVerdict:
    """Return a verdict.

    Raises:
        KeyError: the content does not name a capability.
    """
    found = content["capability"]
    return ModelVerdict(None if found is None else Capability[found], str(content["reason"]))
