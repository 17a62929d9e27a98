"""Engines change their hooks: which versions an adapter was tested with."""

from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

_log = getLogger(__name__)
_UNKNOWN: Final = "of an unknown version"
_told: set[tuple[str, str]] = set()


def check_version(tested: str, *distributions: str) -> bool:
    """Tell whether an engine is of a version that its adapter was tested with.

    One that is not is used all the same; the log says so once, with the range.

    Args:
        tested: the range, such as `>=5.0,<6`; releases before a final one count as they are.
        distributions: names under which the engine is installed, the first that is there counts.
    """
    name, found = _installed(distributions)
    is_tested = _is_within(found, tested)
    if not is_tested and (name, tested) not in _told:
        _told.add((name, tested))
        _log.warning("drafts were tested with %s %s, and this is %s", name, tested, found)
    return is_tested


def _installed(distributions: tuple[str, ...]) -> tuple[str, str]:
    for name in distributions:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return distributions[0], _UNKNOWN


def _is_within(found: str, tested: str) -> bool:
    try:
        return SpecifierSet(tested).contains(found, prereleases=True)
    except InvalidVersion:
        return False
