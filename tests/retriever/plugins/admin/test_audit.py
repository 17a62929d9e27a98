"""The audit log: what operators change is recorded before it is done, or is not done."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from retriever.errors import NotPossibleError, SettingsError, UnknownIndexError
from retriever.plugins.admin.audit import AuditLog


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_change_has_two_lines_that_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path).change("alice", "EvictTenant", {"tenant": "a\nb\u2028"}) as change:
        (begun,) = lines(path)
        change.outcome["was_in_memory"] = True
    _, ended = lines(path)
    assert begun["stage"], ended["stage"] == ("begun", "ended")
    assert begun["id"] == ended["id"]
    assert (ended["who"], ended["call"]) == ("alice", "EvictTenant")
    assert ended["what"] == {"tenant": "a\nb\u2028"}
    assert (ended["status"], ended["outcome"]) == ("OK", {"was_in_memory": True})
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_change_that_fails_is_recorded_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    with (
        pytest.raises(UnknownIndexError),
        audit.change("alice", "DetachIndex", {"path": "/i"}),
    ):
        raise UnknownIndexError("no index /i is attached")
    with pytest.raises(ZeroDivisionError), audit.change("alice", "DetachIndex", {}):
        raise ZeroDivisionError("tokens that were sent")
    ended = [line for line in lines(path) if line["stage"] == "ended"]
    assert [each["status"] for each in ended] == ["UNKNOWN_INDEX", "ZeroDivisionError"]
    assert ended[0]["outcome"] == {"reason": "no index /i is attached"}
    assert "tokens" not in path.read_text()


def test_changes_are_in_the_log_whatever_its_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("retriever")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with AuditLog(None).change("alice", "EvictTenant", {}):
            pass
    finally:
        logger.setLevel(level)
    (record,) = caplog.records
    fields: dict[str, Any] = vars(record)
    assert fields["event"] == "audit"
    assert fields["fields"]["call"] == "EvictTenant"


def test_a_line_is_ended_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    path.write_text('{"torn')
    with audit.change("alice", "EvictTenant", {}):
        pass
    assert [line[:6] for line in path.read_text().splitlines()] == ['{"torn', '{"time', '{"time']


def test_a_file_that_was_moved_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    path.rename(tmp_path / "audit.1")
    with audit.change("alice", "EvictTenant", {}):
        pass
    assert len(lines(path)) == 2
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["open to others", "folder", "link", "absent folder", "full"])
def test_what_cannot_be_recorded_is_not_done(tmp_path: Path, what: str) -> None:
    path = tmp_path / "folder" / "audit.jsonl"
    path.parent.mkdir()
    audit = AuditLog(path)
    path.unlink()
    if what == "open to others":
        path.touch(0o644)
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        (tmp_path / "elsewhere").touch(0o600)
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "absent folder":
        path.parent.rmdir()
    else:
        path.symlink_to("/dev/full")
    done = []
    with (
        pytest.raises(NotPossibleError, match="nothing was changed"),
        audit.change("alice", "EvictTenant", {}),
    ):
        done.append(True)
    assert not done
    with pytest.raises(SettingsError, match="--audit-log"):
        AuditLog(path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    with audit.change("alice", "EvictTenant", {}):
        pass
    whole, write = path.read_text(), os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:7]))
    with pytest.raises(NotPossibleError, match="full"), audit.change("alice", "EvictTenant", {}):
        pass
    assert path.read_text() == whole


def test_a_change_whose_end_cannot_be_recorded_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path).change("alice", "EvictTenant", {}):
        path.chmod(0o644)
    assert [getattr(each, "event", "") for each in caplog.records] == ["audit_failed", "audit"]
    assert len(lines(path)) == 1
