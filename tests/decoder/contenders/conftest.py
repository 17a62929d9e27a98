from pathlib import Path

import pytest

from tests.benchmarks.drafting import IndexMaker, index_maker


@pytest.fixture
def make_index(tmp_path: Path) -> IndexMaker:
    return index_maker(tmp_path / "index")
