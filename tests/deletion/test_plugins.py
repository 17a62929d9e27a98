"""Plugins can be deleted: core imports none, and says what is not there when it is asked for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.program import commands
from indexer.errors import MissingPluginError
from indexer.launch import is_installed, plugged
from tests.deletion.absent_plugins import ALONE, needed_by, plugins
from tests.import_statements import import_statements

ROOT = Path(__file__).parents[2]
PACKAGES = ("foredraft", "indexer", "retriever", "decoder")


def core() -> list[Path]:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in files if "plugins" not in path.relative_to(ROOT).parts)


def test_core_imports_no_plugin() -> None:
    assert len(core()) > 150
    for path in core():
        for node in import_statements(path):
            names = [alias.name for alias in node.names]
            names += [f"{getattr(node, 'module', None)}.{name}" for name in names]
            assert not [name for name in names if ".plugins" in name], path


def test_every_plugin_has_its_tests_and_every_folder_of_tests_its_plugin() -> None:
    folders = [path for package in PACKAGES for path in (ROOT / package).glob("plugins/*/")]
    named = {".".join(path.relative_to(ROOT).parts) for path in folders}
    there = {name for name in named if not name.endswith("__pycache__")}
    assert there <= set(plugins())
    assert "decoder.plugins.trace" in plugins()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages without any plugin."""
    folder = tmp_path_factory.mktemp("bare")
    kept = shutil.ignore_patterns("__pycache__", "plugins")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=kept)
    (folder / "sitecustomize.py").write_text(ALONE)
    return folder


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


EACH_OPTION = """
import sys
from decoder.commands import main
for flags in {flags}:
    sys.argv = ["foredraft", "generate", "--prompt", "a", *flags]
    try:
        main()
    except SystemExit as error:
        print(error.code, *flags)
"""


@pytest.mark.programs
def test_core_can_be_imported_and_an_option_whose_plugin_is_gone_says_so(bare: Path) -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in core()]
    left_out = re.compile(r"^foredraft\.|__main__|_pb2|\.__init__$|\.ray|redis|tracing")
    wanted = [name for name in names if not left_out.search(name)]
    told = {
        ("--trace", "t.jsonl"): "decoder.plugins.trace",
        ("--html", "t.html"): "decoder.plugins.trace",
        ("--speculator", "head"): "decoder.plugins.speculators",
    }
    script = f"for name in {wanted}: __import__(name)\n{EACH_OPTION.format(flags=list(told))}"
    done = run(bare, "-c", f"import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\n{script}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"1 {' '.join(flags)}" for flags in told]
    assert done.stderr.splitlines() == [
        f"error: {flags[0]} needs {plugin}, which is not part of this installation"
        for flags, plugin in told.items()
    ]


@pytest.mark.programs
@pytest.mark.parametrize(
    ("flags", "plugin"),
    [
        (("--admin-address", "unix:admin.sock"), "admin"),
        (("--redis", "redis://localhost:1"), "replication"),
        (("--trace-ratio", "0.5"), "tracing"),
        (("--metrics-address", "0", "--status-page"), "status_page"),
    ],
)
def test_a_service_says_which_plugin_an_option_needs(
    flags: tuple[str, ...], plugin: str, bare: Path
) -> None:
    done = run(bare, "-m", "foredraft", "serve", "--address", "127.0.0.1:0", *flags)
    asked = flags[-1] if flags[-1].startswith("--") else flags[0]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: {asked} needs retriever.plugins.{plugin}, which is not part of this installation"
    )


@pytest.mark.programs
@pytest.mark.plugin("indexer.plugins.screening")
def test_an_index_is_built_and_changed_without_plugins_but_not_unscreened(
    bare: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one line")
    index, screened = tmp_path / "index", tmp_path / "screened"
    build = ("-m", "foredraft", "build", str(tmp_path / "a.txt"), "--output")
    assert run(bare, *build, str(index)).returncode == 0
    assert run(ROOT, *build, str(screened), "--redact").returncode == 0
    add = ("-m", "foredraft", "add", str(screened), str(tmp_path / "a.txt"))
    told = {
        (*build, str(tmp_path / "x"), "--redact"): "--redact needs indexer.plugins.screening",
        (*build, str(tmp_path / "x"), "--engine", "ray"): "--engine ray needs indexer.plugins.ray",
        add: f"{screened}, whose documents are screened, needs indexer.plugins.screening",
    }
    for arguments, said in told.items():
        done = run(bare, *arguments)
        assert done.returncode == 1
        last = f"error: {said}, which is not part of this installation"
        assert done.stderr.splitlines()[-1] == last


@pytest.mark.plugin
@pytest.mark.parametrize(
    "name", [each.name for each in commands().values() if ".plugins." in each.module]
)
def test_a_command_whose_plugin_is_gone_says_so(name: str, bare: Path) -> None:
    done = run(bare, "-m", "foredraft", name, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.match(
        rf"error: `foredraft {name}` is not part of this installation: \w+\.plugins\.", done.stderr
    )
    assert "Traceback" not in done.stderr


def test_the_help_lists_what_is_there(bare: Path) -> None:
    done = run(bare, "-m", "foredraft", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  generate " in done.stdout
    gone = r"^  (bench|train|estimate|trace|admin|replay|export) "
    assert not re.search(gone, done.stdout, re.MULTILINE)


def test_a_plugin_that_is_not_there_is_told_apart_from_a_library(tmp_path: Path) -> None:
    assert is_installed("indexer.launch")
    assert not is_installed("indexer.plugins.nothing")
    with pytest.raises(MissingPluginError, match=r"^--x needs indexer\.plugins\.nothing, which is"):
        plugged("indexer.plugins.nothing.inner", "--x")
    with pytest.raises(MissingPluginError, match=r"needs indexer\.plugins\.more"):
        plugged("indexer.errors", "--x", needs=("indexer.plugins.more",))
    assert needed_by(tmp_path / "test.py") is None or not plugins()
