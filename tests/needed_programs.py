"""Programs that tests run beside Python; without one, its tests are skipped.

`python3 tests/needed_programs.py` prints the Debian packages of those that are missing.
"""

import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

BROWSERS: Final = ("chromium-headless-shell", "chromium", "chromium-browser")
"""Names of a browser, any of which will do."""

PACKAGES: Final[Mapping[tuple[str, ...], str]] = MappingProxyType(
    {
        ("redis-server",): "redis-server",
        ("promtool",): "prometheus",
        ("node",): "nodejs",
        ("npm",): "npm",
        ("openssl",): "openssl",
        ("git",): "git",
        BROWSERS: "chromium-headless-shell",
    }
)
"""Names of each program, and the Debian package that has it."""


def missing_packages() -> dict[str, str]:
    """Return the package of each program that is not there, by the program's first name."""
    return {
        names[0]: package
        for names, package in PACKAGES.items()
        if not any(map(shutil.which, names))
    }


if __name__ == "__main__":
    print(*missing_packages().values())  # noqa: T201  (for a script)
