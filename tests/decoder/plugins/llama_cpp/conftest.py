"""A tiny model, with drafts and without."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.decoder.plugins.llama_cpp import tiny_model  # noqa: PLC0415  (needs packages of the extra)

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_model.write_model(path)
    return path


@pytest.fixture(scope="module")
def plain(path: Path) -> Any:
    from tests.decoder.plugins.llama_cpp.loaded_models import load  # noqa: PLC0415  (as above)

    return load(path)


@pytest.fixture
def llm(path: Path) -> Any:
    from tests.decoder.plugins.llama_cpp.loaded_models import load  # noqa: PLC0415  (as above)

    return load(path, logits_all=True)
