"""What a bare machine lacks: packages, and parts of a model that were not carried along."""

import json
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

_PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"
_EXTRAS: Final = ("index", "server", "decoder", "bench")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WEIGHTS: Final = (".safetensors", ".bin")


def missing_packages() -> list[str]:
    """Return the requirements of decoding and of plots that are not installed, or are too old."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *(each for name in _EXTRAS for each in extras[name])]
    return [each for each in dict.fromkeys(stated) if not _is_met(Requirement(each))]


def _is_met(requirement: Requirement) -> bool:
    """Return whether a requirement is of this project, of another Python, or installed."""
    is_of_here = requirement.marker is None or requirement.marker.evaluate()
    if requirement.name == "foredraft" or not is_of_here:
        return True
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def missing_files(model: str) -> list[str]:
    """Return the files that a model's folder lacks; none where it is no folder, or of GGUF.

    Weights may be in parts, as `save_pretrained(folder, max_shard_size=…)` leaves them: its index
    names them all.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir() or any(folder.glob("*.gguf")):
        return []
    held = {path.name for path in folder.iterdir()}
    indexes = [name for name in held if name.endswith(".index.json")]
    numbered = _numbered(held)
    needed = ["config.json"]
    if held.isdisjoint(_TOKENIZERS):
        needed.append(_TOKENIZERS[0])
    if numbered and not indexes:
        needed.append("model.safetensors.index.json")
    if not numbered and not indexes and not any(name.endswith(_WEIGHTS) for name in held):
        needed.append("model.safetensors")
    parts = numbered.union(*(_parts_of(folder / index) for index in indexes))
    return [name for name in (*needed, *sorted(parts)) if name not in held]


def _parts_of(index: Path) -> set[str]:
    """Return the files that an index of weights names."""
    return set(json.loads(index.read_text())["weight_map"].values())


def _numbered(names: Iterable[str]) -> set[str]:
    """Return all parts that numbered ones tell of, as `model-00002-of-00003.safetensors`."""
    found = (re.fullmatch(r"(.+)-\d{5}-of-(\d{5})(\..+)", name) for name in names)
    wholes = {(part[1], int(part[2]), part[3]) for part in found if part is not None}
    return {
        f"{name}-{number:05}-of-{count:05}{suffix}"
        for name, count, suffix in wholes
        for number in range(1, count + 1)
    }
