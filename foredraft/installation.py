"""Checks that Python finds foredraft's own packages under their names.

`indexer`, `retriever` and `decoder` are common names. Another distribution may install a folder
with the same name over foredraft's folder. A file `retriever.py` earlier on the path hides the
package. Each package has a marker in its `__init__.py`, and the check looks for the marker without
running the file.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, Final

EXTRAS: Final = {"indexer": "index", "retriever": "server", "decoder": "decoder"}
"""Foredraft's packages, each with the extra that installs its dependencies."""

MARKER: Final = "__distribution__"
OURS: Final = "foredraft"


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """If the block fails to import a library, raise an error that names the extra to install.

    Raises:
        ModuleNotFoundError: a library is missing; the message says what to install.
        ImportError: a library is installed but lacks the imported name. The message names its
            version and says what to do.
    """
    try:
        yield
    except ForeignPackageError:
        raise
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        library = (error.name or "").partition(".")[0]
        if library and missing and (library == error.name or find_spec(library) is None):
            raise ModuleNotFoundError(
                f"{error.name} is missing: run `pip install '{OURS}[{extra}]'`", name=error.name
            ) from error
        raise type(error)(_changed(library, extra, error), name=error.name) from error


def _changed(library: str, extra: str, error: ImportError) -> str:
    """Return the message for a library version that this code does not support."""
    from importlib.metadata import packages_distributions, version  # noqa: PLC0415  (slow)

    owner = next(iter(packages_distributions().get(library, ())), None)
    shown = library if owner is None else f"{owner} {version(owner)}"
    return (
        f"{error.msg}: {shown} is not a version that {OURS}[{extra}] was written for: "
        f"install an earlier one, or a newer {OURS}"
    )


class ForeignPackageError(ImportError):
    """Python finds another file under the name of a foredraft package. The message says where."""


def check_packages() -> None:
    """Check that Python finds all three packages, and that they are foredraft's.

    Raises:
        ForeignPackageError: a package is missing or foreign. The one-line message names the file
            that is in the way.
    """
    for name in EXTRAS:
        loaded = sys.modules.get(name)
        if loaded is None:
            _check_found(name, find_spec(name))
        elif getattr(loaded, MARKER, None) != OURS:
            raise _in_the_way(
                name, getattr(loaded, "__file__", None) or "a module made at run time"
            )


def starts_the_command() -> bool:
    """Return whether this process runs `foredraft` or `python -m foredraft`."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run
        return OURS in sys.orig_argv or f"-m{OURS}" in sys.orig_argv
    return Path(sys.argv[0]).stem == OURS if sys.argv else False


def _check_found(name: str, spec: ModuleSpec | None) -> None:
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    own = Path(__file__).parents[1] / name
    if spec is None or (spec.origin is None and Path(folders[0]) == own):  # an empty folder
        raise ForeignPackageError(
            f"{OURS} is incomplete: its package `{name}` is missing: {_reinstall()}", name=name
        )
    if spec.origin is None or not _is_ours(name, spec.loader):
        raise _in_the_way(name, spec.origin or folders[0])


def _is_ours(name: str, loader: Any) -> bool:
    if not hasattr(loader, "get_code"):
        return True  # packed by a tool that hides the code: then nothing can shadow the package
    try:
        code = loader.get_code(name)
    except (ImportError, OSError, SyntaxError, ValueError):
        return False
    return isinstance(code, CodeType) and MARKER in code.co_names and OURS in code.co_consts


def _in_the_way(name: str, file: str) -> ForeignPackageError:
    return ForeignPackageError(
        f"{file} is in the way of the package `{name}` of {OURS}: {_remedy(name, file)}",
        name=name,
        path=file,
    )


def _remedy(name: str, file: str) -> str:
    owner = _owner_of(name, file)
    if owner:
        return (
            f"it came with the distribution `{owner}`: run `pip uninstall {owner}`, then "
            f"{_reinstall()}, or use another environment"
        )
    folder = Path(file) if Path(file).is_dir() else Path(file).parent
    if (folder / "v1" / "retriever_pb2.py").is_file():
        return (
            f"these are stubs of {OURS}'s contract, which is already in `retriever.v1`: remove "
            "them, or have protoc write them to a folder that is not on Python's path"
        )
    return "rename it, or keep its folder off Python's path"


def _owner_of(name: str, file: str) -> str | None:
    """Return the distribution that installed a file, or `None` if the file is the user's own."""
    from importlib.metadata import distribution, packages_distributions  # noqa: PLC0415  (slow)

    for owner in packages_distributions().get(name, ()):
        folder = Path(str(distribution(owner).locate_file(""))).resolve()
        if owner != OURS and Path(file).resolve().is_relative_to(folder):
            return owner
    return None


def _reinstall() -> str:
    """Return how to reinstall foredraft, from the source that pip recorded if there is one."""
    import json  # noqa: PLC0415  (only needed when the check fails)
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415

    try:
        origin = json.loads(distribution(OURS).read_text("direct_url.json") or "{}").get("url")
    except (PackageNotFoundError, ValueError):
        origin = None
    if origin:
        return f"run `pip install --force-reinstall --no-deps {origin}`"
    return f"install {OURS} again from the same source, with `--force-reinstall --no-deps`"
