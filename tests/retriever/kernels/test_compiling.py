import importlib
from pathlib import Path

import pytest

from retriever.kernels.compiling import tell_compiling

SOURCE = """
from retriever.kernels.compiling import kernel

@kernel()
def successor(number):
    return number + 1
"""


def test_compiling_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "successors.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    caplog.set_level("INFO")
    successor = importlib.import_module("successors").successor
    tell_compiling(successor)
    assert [message[:17] for message in caplog.messages] == ["compiling kernels"]
    assert successor(1) == 2
    tell_compiling(successor)
    assert len(caplog.messages) == 1
