"""Settings that are read again while a service runs."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from indexer.reader import Vocabulary
from retriever.errors import NotPossibleError, SettingsError
from retriever.operations.resolving import resolve
from retriever.operations.settings import Settings
from retriever.plugins.admin.administration import Administration
from retriever.plugins.admin.live_settings import CHANGEABLE, LiveSettings
from retriever.sessions.embedded import EmbeddedDrafter


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.toml"
    path.write_text("max_sessions = 10\n")
    return path


def live_from(file: Path, **flags: object) -> LiveSettings:
    again = partial(resolve, Settings, flags, {"FOREDRAFT_MAX_BATCH": "7"}, file)
    return LiveSettings(again(), again)


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """A reload of the level of logging is undone."""
    before = [
        (logger, logger.handlers, logger.level, logger.propagate)
        for logger in map(logging.getLogger, (None, "retriever", "indexer"))
    ]
    yield
    for logger, handlers, level, propagates in before:
        logger.handlers, logger.propagate = handlers, propagates
        logger.setLevel(level)


def test_what_can_change_is_in_force_after_a_reload(file: Path, drafter: EmbeddedDrafter) -> None:
    live = live_from(file, idle_session_s=5.0)
    file.write_text('max_sessions = 20\nlog_level = "debug"\nidle_session_s = 1\nmax_batch = 9\n')
    planned = live.reload(Administration(drafter.state), check_only=True)
    assert live.settings.max_sessions == 10
    changes = live.reload(Administration(drafter.state))
    assert changes == planned
    assert [(each.name, each.before, each.after) for each in changes] == [
        ("max_sessions", 10, 20),
        ("log_level", "info", "debug"),
    ]  # flags and the environment are stronger than the file
    assert drafter.limits.max_sessions == 20
    assert logging.getLogger("retriever").level == logging.DEBUG
    assert live.settings.max_sessions == 20
    assert live.origins["max_sessions"] == str(file)
    assert live.reload(Administration(drafter.state)) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('state = "elsewhere"', "state"),
        ('address = "127.0.0.1:7"', "address"),
        ("generations_tokens = 4096", "generations_tokens"),
        ("max_message_bytes = 4096", "max_message_bytes"),
        ("pad_replies = true\ntrace_ratio = 0.5", "trace_ratio"),
        ('index = ["/another"]', "admin attach"),
        ('tenant_index = ["acme=/another"]', "admin attach"),
        ("max_budget_nodes = 4096", "max_budget_nodes"),
    ],
)
def test_where_anything_else_has_changed_nothing_does(
    file: Path, drafter: EmbeddedDrafter, text: str, named: str
) -> None:
    live = live_from(file)
    before = drafter.limits
    file.write_text(f"max_sessions = 20\n{text}\n")
    for check_only in (True, False):
        with pytest.raises(NotPossibleError, match="nothing was changed") as refused:
            live.reload(Administration(drafter.state), check_only=check_only)
        assert named in str(refused.value)
    assert drafter.limits is before
    assert live.settings.max_sessions == 10


@pytest.mark.parametrize("text", ["max_sessions = ", "max_sesions = 3", "max_sessions = 0", "\xff"])
def test_a_file_that_is_none_changes_nothing(
    file: Path, drafter: EmbeddedDrafter, text: str
) -> None:
    live = live_from(file)
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError):
        live.reload(Administration(drafter.state))
    file.unlink()
    with pytest.raises(SettingsError):
        live.reload(Administration(drafter.state))
    assert live.settings.max_sessions == 10


def test_indexes_may_be_listed_as_they_are_attached(
    file: Path, index: Path, vocabulary: Vocabulary
) -> None:
    drafter = EmbeddedDrafter(vocabulary=vocabulary)
    live = live_from(file)
    file.write_text(f'tenant_index = ["acme={index}"]\nmax_sessions = 3\n')
    with pytest.raises(NotPossibleError, match="admin attach"):
        live.reload(Administration(drafter.state))
    Administration(drafter.state).attach(str(index), "acme")
    changes = live.reload(Administration(drafter.state))
    assert [each.name for each in changes] == ["max_sessions", "tenant_index"]
    assert drafter.limits.max_sessions == 3
    Administration(drafter.state).detach(str(index), "acme")
    file.write_text("max_sessions = 3\n")
    assert [each.name for each in live.reload(Administration(drafter.state))] == ["tenant_index"]


def test_each_changeable_setting_is_one() -> None:
    assert set(Settings.model_fields) >= CHANGEABLE
