"""Kernels of a test, kept in a user's folder of its own, wherever this run keeps the others."""

import importlib
from pathlib import Path

import platformdirs
import pytest
from numba.core import config

from retriever.kernels import compiling


def keep_in(caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have kernels that come from now on be kept in a folder; return where."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: str(caches))
    starts_again()
    return caches / "kernels"


def starts_again() -> None:
    """Have files be looked at as by a process that starts."""
    compiling._made_of.cache_clear()
    compiling._folder_of.cache_clear()
    importlib.invalidate_caches()
