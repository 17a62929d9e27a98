"""The wire contract keeps rules that buf does not know."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_contract_keeps_its_rules() -> None:
    """Package equals path, enums begin unspecified, each call has messages of its own."""
    text = (ROOT / "proto" / "retriever" / "v1" / "retriever.proto").read_text()
    assert "package retriever.v1;" in text
    assert "SOURCE_UNSPECIFIED = 0;" in text
    calls = [line.split() for line in text.splitlines() if line.strip().startswith("rpc ")]
    assert len(calls) == 13
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
                ("syntax", "option", "SOURCE_", "FAIL_OPEN_REASON_", "KEEPING_", "PHASE_")
            )
        ):
            assert "default" in comment.lower(), line
            num_fields += 1
        comment = ""
    assert num_fields > 20
