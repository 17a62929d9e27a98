"""The suite without one plugin after another: `python -m tests.deletion.without_plugins`.

Each, or those that are named, is deleted by `rm -r` from a copy of what is committed or new here;
`all` deletes all of them at once, and so do names with commas between them. Then a wheel is built
of what is left, and the tests run; those that need the plugin are skipped, and say so. Arguments
that follow `--` go to pytest.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.deletion.absent_plugins import ALONE, ROOT, plugins


def copied(folder: Path) -> Path:
    """Copy the project; its kernels are compiled already, and kept by what they are made of."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in sorted(listed):
        if (ROOT / name).is_file():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place)
    (folder / "sitecustomize.py").write_text(ALONE)
    return folder


def run(folder: Path, *command: str) -> int:
    """Run a command in a folder, whose packages are found before those that are installed."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def check_without(plugin: str, arguments: list[str]) -> bool:
    """Delete a plugin, or several with commas between them; return whether the rest is well."""
    with TemporaryDirectory(prefix="without-") as scratch:
        project = copied(Path(scratch, "project"))
        for each in plugin.split(","):
            shutil.rmtree(project.joinpath(*each.split(".")))
        wheel = ("wheel", "--quiet", "--no-deps", "--wheel-dir", str(Path(scratch, "wheel")), ".")
        if run(project, sys.executable, "-m", "pip", *wheel):
            return False
        return run(project, sys.executable, "-m", "pytest", *arguments) == 0


def _named(word: str) -> str:
    """Return the plugin of a name."""
    return next((each for each in plugins() if each.rpartition(".")[2] == word), word)


def main() -> None:
    """Check each plugin that is named, or all; end with 1 where tests fail."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    asked = [",".join(plugins()) if word == "all" else _named(word) for word in words[:cut]]
    outcomes: dict[str, bool] = {}
    for plugin in asked or plugins():
        print(f"== without {plugin}", flush=True)
        outcomes[plugin] = check_without(plugin, words[cut + 1 :])
    for plugin, is_well in outcomes.items():
        print(f"{'passed' if is_well else 'FAILED'} without {plugin}")
    sys.exit(0 if all(outcomes.values()) else 1)


if __name__ == "__main__":
    main()
