"""The wire contract keeps rules that buf does not know."""

import re
from pathlib import Path

from google.protobuf import json_format

from retriever.v1 import retriever_pb2 as pb

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
                ("syntax", "option", "SOURCE_", "FAIL_OPEN_REASON_", "SAVE_STATUS_", "PHASE_")
            )
        ):
            assert "default" in comment.lower(), line
            num_fields += 1
        comment = ""
    assert num_fields > 20


def examples() -> dict[str, str]:
    """Return the example message of each call, in JSON, by the call's name."""
    text = (ROOT / "proto" / "retriever" / "v1" / "retriever.proto").read_text()
    found: dict[str, str] = {}
    for comment, name in re.findall(r"((?:^  //.*\n)+)^  rpc (\w+)\(", text, re.MULTILINE):
        lines = [line.removeprefix("  //").strip() for line in comment.splitlines()]
        found[name] = " ".join(lines[lines.index("Example:") + 1 :])
    return found


def test_each_call_has_an_example() -> None:
    calls = pb.DESCRIPTOR.services_by_name["RetrieverService"].methods
    assert examples().keys() == {call.name for call in calls}
    for call in calls:
        request = getattr(pb, f"{call.name}Request")()
        json_format.Parse(examples()[call.name], request)
