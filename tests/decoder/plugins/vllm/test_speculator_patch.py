"""The patch that opens vLLM's newer model runner to a speculator of one's own.

`FOREDRAFT_VLLM_SOURCE` names the folder `vllm` of 0.33, such as that of an unpacked wheel: the
patch is applied to a copy of it. Where the compiled parts are beside it, so that it can be imported
(`FOREDRAFT_VLLM_RUNS=1`), the patch's own tests are run, too.
"""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

PATCH = Path(__file__).parents[4] / "docs/patches/vllm-0.33-custom-speculator.patch"
ADDED = "tests/v1/spec_decode/test_custom_speculator.py"


def changed_files() -> list[str]:
    lines = PATCH.read_text("utf-8").splitlines()
    return [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return the root of a patched copy of vLLM's source."""
    named = os.environ.get("FOREDRAFT_VLLM_SOURCE")
    if not named:
        pytest.skip("FOREDRAFT_VLLM_SOURCE names no source of vLLM")
    copytree(named, tmp_path / "vllm", symlinks=True)
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    return tmp_path


def test_it_says_which_files_it_changes() -> None:
    assert changed_files() == [
        ADDED,
        "vllm/config/vllm.py",
        "vllm/v1/spec_decode/custom_class_proposer.py",
        "vllm/v1/worker/gpu/spec_decode/__init__.py",
        "vllm/v1/worker/gpu/spec_decode/speculator.py",
    ]


def test_it_applies(source: Path) -> None:
    for name in changed_files():
        text = (source / name).read_text("utf-8")
        compile(text, name, "exec")
        assert "custom" in text or "supports_mm_inputs: bool = False" in text


def test_its_own_tests_pass(source: Path) -> None:
    if os.environ.get("FOREDRAFT_VLLM_RUNS") != "1":
        pytest.skip("FOREDRAFT_VLLM_RUNS=1 says that this source can be imported")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ADDED],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
        check=True,
    )
