"""An access file and certificates."""

from pathlib import Path

import pytest

from tests.retriever.security.authorities import Signed, signed


@pytest.fixture
def access(tmp_path: Path) -> Path:
    return tmp_path / "access"


@pytest.fixture
def authority(tmp_path: Path) -> Signed:
    return signed(tmp_path, "authority")


@pytest.fixture
def server(tmp_path: Path, authority: Signed) -> Signed:
    return signed(tmp_path, "server", authority)
