"""`make contract` lets the contract grow, and refuses what breaks clients or its style."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NETWORK_ERRORS = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def checked(folder: Path) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        ["make", "--silent", "contract", f"CONTRACT={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if any(code in done.stderr for code in NETWORK_ERRORS):
        pytest.skip("npm reaches no registry")
    return done


MUTATIONS = {
    "nothing": ("", "", ""),
    "a field is renumbered": ("bool is_draining = 5;", "bool is_draining = 15;", "is_draining"),
    "a field is renamed": ("bool is_draining = 5;", "bool drains = 5;", "drains"),
    "a type changes": ("uint32 num_not_kept = 6;", "uint64 num_not_kept = 6;", "num_not_kept"),
    "a value is renumbered": ("REASON_DRAINING = 9", "REASON_DRAINING = 10", "FailOpenReason"),
    "a call goes": (
        "rpc GetServerInfo(GetServerInfoRequest) returns (GetServerInfoResponse);",
        "",
        "GetServerInfo",
    ),
    "a call becomes a stream": (
        "rpc Draft(DraftRequest) returns (DraftResponse)",
        "rpc Draft(DraftRequest) returns (stream DraftResponse)",
        "Draft",
    ),
    "a field loses its presence": (
        "optional uint32 budget_nodes = 4;",
        "uint32 budget_nodes = 4;",
        "budget_nodes",
    ),
    "a comment is missing": ("// A session has ended.\n", "", "CloseSessionResponse"),
    "a name is no field's": ("uint32 max_documents = 5;", "uint32 MaxDocuments = 5;", "Max"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_breaks_the_contract_is_refused(name: str, tmp_path: Path) -> None:
    before, after, named = MUTATIONS[name]
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    contract = tmp_path / "proto" / "retriever" / "v1" / "retriever.proto"
    text = contract.read_text()
    assert before in text
    contract.write_text(text.replace(before, after, 1) if before else text)
    done = checked(tmp_path / "proto")
    assert (done.returncode == 0) == (not before), done.stdout + done.stderr
    assert named in done.stdout


def test_the_contract_may_grow(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    contract = tmp_path / "proto" / "retriever" / "v1" / "retriever.proto"
    more = "\n// More.\nmessage More {\n  // How much. Default 0: none.\n  uint32 much = 1;\n}\n"
    contract.write_text(contract.read_text() + more)
    done = checked(tmp_path / "proto")
    assert done.returncode == 0, done.stdout + done.stderr
