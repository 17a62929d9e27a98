"""The installed engine's own parts, where it is installed."""

import ctypes
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.decoder.plugins.experimental_sglang.tree_verification import Ints, Links

HERE = Path(__file__).parent
NOT_FOR_CPUS: Final = (
    "sgl_kernel",
    "sgl_kernel.speculative",
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class Kernels:
    """SGLang's kernels, compiled for the CPU from the installed package's sources."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def links_of(self, mask: Ints) -> Links:
        width = len(mask)
        flags = np.ascontiguousarray(mask, np.bool_)
        outs = [np.full(width, -7, np.int64) for _ in range(4)]
        arrays = [flags, np.zeros(1, np.int64), *outs]
        self._library.reconstruct(*map(pointer, arrays), 1, width)
        positions, _, next_token, next_sibling = outs
        return Links(positions, next_token, next_sibling)

    def verify(self, tokens: Ints, links: Links, target: Ints) -> list[int]:
        width = len(tokens)
        predicts, accepted = np.zeros((2, width), np.int32)
        num_accepted = np.zeros(1, np.int32)
        indices = np.arange(width)
        inputs = [tokens, indices, links.next_token, links.next_sibling, target]
        held = [np.ascontiguousarray(each, np.int64) for each in inputs]
        arrays = [predicts, accepted, num_accepted, *held]
        self._library.verify(*map(pointer, arrays), 1, width)
        path: list[int] = accepted[: int(num_accepted[0]) + 1].tolist()
        assert predicts[path].tolist() == [int(target[node]) for node in path]
        return path


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="session")
def sglang_folder() -> Path:
    package = pytest.importorskip("sglang")
    return Path(package.__file__).parent


@pytest.fixture(scope="session")
def kernels(sglang_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    include = sglang_folder / "kernels" / "jit" / "include"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, HERE / "kernels.cpp", "-o", library], check=True)
    return Kernels(ctypes.CDLL(str(library)))


@pytest.fixture(scope="session")
def ngram_worker(sglang_folder: Path) -> Iterator[Any]:
    """SGLang's module of that name, without the packages of kernels that are for GPUs alone."""
    assert sglang_folder
    import transformers.utils.import_utils  # noqa: F401, PLC0415  (looks for them as well)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in NOT_FOR_CPUS:
            stub = MagicMock(name=name, __spec__=None, __path__=[], __name__=name)
            patch.setitem(sys.modules, name, stub)
        from sglang.srt.speculative import ngram_worker as module  # noqa: PLC0415

        yield module


@pytest.fixture
def plugin(ngram_worker: Any) -> Any:
    """Our plugin, as SGLang has loaded it."""
    assert ngram_worker
    from sglang.srt.speculative.spec_registry import get_spec  # noqa: PLC0415

    from decoder.plugins.experimental_sglang import plugin as module  # noqa: PLC0415

    if get_spec(module.ALGORITHM) is None:
        module.register()
    return module
