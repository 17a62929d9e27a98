"""The committed stubs are those of the committed contract."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENUMS = ("SOURCE_", "FAIL_OPEN_REASON_", "KEEPING_", "PHASE_")
STUBS = [
    f"{contract}_{kind}"
    for contract in ("retriever", "admin")
    for kind in ("pb2.py", "pb2.pyi", "pb2_grpc.py", "pb2_grpc.pyi")
]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stubs made as `make stubs` makes them."""
    folder = tmp_path_factory.mktemp("stubs")
    binaries = Path(sys.executable).parent
    subprocess.run(
        ["make", "--silent", "stubs", f"BIN={binaries}", f"STUBS_OUT={folder}"],
        cwd=ROOT,
        check=True,
        env=dict(os.environ, PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}"),
    )
    return folder / "retriever" / "v1"


@pytest.mark.parametrize("name", STUBS)
def test_stubs_are_fresh(fresh: Path, name: str) -> None:
    committed = ROOT / "retriever" / "v1" / name
    assert committed.read_text() == (fresh / name).read_text(), "run `make stubs` and commit"


def test_contract_keeps_its_rules() -> None:
    """Package equals path, enums begin unspecified, each call has messages of its own."""
    text = (ROOT / "proto" / "retriever" / "v1" / "retriever.proto").read_text()
    assert "package retriever.v1;" in text
    assert "SOURCE_UNSPECIFIED = 0;" in text
    calls = [line.split() for line in text.splitlines() if line.strip().startswith("rpc ")]
    assert len(calls) == 12
    for call in calls:
        signature = " ".join(call).replace("stream ", "")
        name = signature.split()[1].split("(")[0]
        assert f"({name}Request) returns ({name}Response)" in signature


def test_every_field_of_the_contract_is_documented_with_its_default() -> None:
    lines = (ROOT / "proto" / "retriever" / "v1" / "retriever.proto").read_text().splitlines()
    comment, num_fields = "", 0
    for line in map(str.strip, lines):
        if line.startswith("//"):
            comment += line
            continue
        if (
            line.endswith(";")
            and " = " in line
            and not line.startswith(
                ("syntax", "SOURCE_", "FAIL_OPEN_REASON_", "KEEPING_", "PHASE_")
            )
        ):
            assert "default" in comment.lower(), line
            num_fields += 1
        comment = ""
    assert num_fields > 20
