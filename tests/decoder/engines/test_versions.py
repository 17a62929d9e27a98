"""Untested versions of engines are named once, and used."""

import logging

import pytest

from decoder.engines import contract as versions
from decoder.engines.engine_options import check_version


def test_a_version_outside_the_range_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert not check_version(">=0.1,<0.2", "no-such-engine", "numpy")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "numpy >=0.1,<0.2" in record.message
    assert not check_version(">=0.1,<0.3", "numpy")
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("found", "is_tested"),
    [("5.1", True), ("5.2.0rc1", True), ("6.0", False), ("5.1+cpu", True), ("not-a-number", False)],
)
def test_versions_are_compared_as_packages_number_them(
    found: str, *, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    assert check_version(">=5.0,<6", "engine") is is_tested


def test_an_engine_that_is_not_installed_by_name_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not check_version(">=1", "no-such-engine")
    assert "of an unknown version" in caplog.text
