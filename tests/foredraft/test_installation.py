"""Where Python finds something else by the name of a package of ours, one line says what and where.

Processes run with `-S`: without the packages of this environment, among which foredraft may be.
"""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.installation import EXTRAS

ROOT = Path(__file__).parents[2]
CATCHING = """
try:
    import foredraft
except ImportError as error:
    print(error)
    raise
"""
IMPORTING = ("-c", CATCHING)
COMMAND = ("-m", "foredraft", "--help")
RAN = "import pathlib; pathlib.Path('ran').touch()\n"


def run(
    arguments: tuple[str, ...], folder: Path, *places: Path
) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder, looking for modules in other places, too."""
    path = os.pathsep.join(str(each) for each in places or (folder, ROOT))
    return subprocess.run(
        [sys.executable, "-S", "-W", "error", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def refused(folder: Path, *places: Path) -> str:
    """What the command says in its one line, and the import as well."""
    commanded = run(COMMAND, folder, *places)
    assert (commanded.returncode, commanded.stdout) == (1, ""), commanded
    [line] = commanded.stderr.splitlines()
    imported = run(IMPORTING, folder, *places)
    message = line.removeprefix("error: ")
    assert (imported.returncode, imported.stdout) == (1, f"{message}\n")
    last = imported.stderr.splitlines()[-1]
    assert last == f"foredraft.installation.ForeignPackageError: {message}"
    return message


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with all of foredraft in it, as pip makes it."""
    folder = tmp_path / "site-packages"
    for name in ("foredraft", *EXTRAS):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    distribute(folder, "foredraft", "foredraft", *EXTRAS)
    return folder


def distribute(site: Path, name: str, *packages: str) -> None:
    """Write down that a distribution has installed some packages."""
    told = site / f"{name}-3.1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1.0\n")
    (told / "top_level.txt").write_text("\n".join(packages))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, RAN) for name in EXTRAS),
        *(("retriever", code) for code in ("", "no Python", "\0", "foredraft = 'foredraft'")),
    ],
)
def test_a_file_of_the_users_own_is_named_and_not_run(name: str, code: str, tmp_path: Path) -> None:
    own = tmp_path / f"{name}.py"
    own.write_text(code)
    message = refused(tmp_path)
    assert message.startswith(f"{own} is in the way of the package `{name}` of foredraft: rename")
    assert not (tmp_path / "ran").exists()


def test_a_package_of_the_users_own_is_named(tmp_path: Path) -> None:
    own = tmp_path / "decoder" / "__init__.py"
    own.parent.mkdir()
    own.touch()
    assert refused(tmp_path).startswith(f"{own} is in the way")


def test_a_folder_without_code_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "decoder").mkdir()
    (tmp_path / "decoder" / "notes.txt").touch()
    assert run(COMMAND, tmp_path).returncode == 0


def test_stubs_of_the_contract_that_hide_ours_are_told_from_other_files(tmp_path: Path) -> None:
    stubs = tmp_path / "retriever" / "v1" / "retriever_pb2.py"
    stubs.parent.mkdir(parents=True)
    stubs.touch()
    assert run(COMMAND, tmp_path).returncode == 0  # as protoc makes them, they hide nothing
    own = tmp_path / "retriever" / "__init__.py"
    own.touch()
    message = refused(tmp_path)
    assert message.startswith(f"{own} is in the way of the package `retriever` of foredraft")
    assert "stubs of foredraft's contract" in message
    assert "`retriever.v1`" in message


def test_a_folder_that_an_editable_installation_is_hidden_by_is_named(
    site: Path, tmp_path: Path
) -> None:
    """Its finder comes last, so that a bare folder is found before it."""
    stubs = tmp_path / "retriever" / "v1" / "retriever_pb2.py"
    stubs.parent.mkdir(parents=True)
    stubs.touch()
    shutil.rmtree(site / "retriever")
    message = refused(tmp_path, tmp_path, site)
    assert message.startswith(f"{tmp_path / 'retriever'} is in the way")
    assert "stubs of foredraft's contract" in message


def test_a_distribution_that_was_installed_over_ours_is_named(site: Path, tmp_path: Path) -> None:
    assert run(COMMAND, tmp_path, site).returncode == 0
    other = site / "retriever" / "__init__.py"
    other.write_text("from retriever.lib import *\n")
    distribute(site, "retriever", "retriever")
    message = refused(tmp_path, site)
    assert message.startswith(f"{other} is in the way of the package `retriever` of foredraft")
    assert "`pip uninstall retriever`" in message
    assert "--force-reinstall --no-deps" in message
    other.unlink()  # as uninstalling does
    assert "`retriever` is missing: " in refused(tmp_path, site)


def test_a_users_file_is_not_taken_for_that_distribution(site: Path, tmp_path: Path) -> None:
    distribute(site, "retriever", "retriever")
    (tmp_path / "retriever.py").touch()
    assert "rename it" in refused(tmp_path, tmp_path, site)


def test_a_missing_package_is_named(site: Path, tmp_path: Path) -> None:
    shutil.rmtree(site / "decoder")
    assert refused(tmp_path, site).startswith("foredraft is incomplete: its package `decoder` is")


def test_a_module_that_took_the_name_at_run_time_is_refused(tmp_path: Path) -> None:
    script = "import sys, types; sys.modules['indexer'] = types.ModuleType('indexer')\n"
    done = run(("-c", f"{script}import foredraft"), tmp_path)
    assert "a module made at run time is in the way of the package `indexer`" in done.stderr


def test_a_program_of_another_name_gets_the_error_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "retriever.py").touch()
    program = tmp_path / "program" / "__init__.py"
    program.parent.mkdir()
    program.write_text("try:\n    import foredraft\nexcept ImportError:\n    print('caught')\n")
    (program.parent / "__main__.py").touch()
    done = run(("-m", "program"), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught\n", "")


def test_a_script_named_foredraft_ends_with_the_line(tmp_path: Path) -> None:
    """As pip writes it for `[project.scripts]`."""
    (tmp_path / "retriever.py").touch()
    script = tmp_path / "bin" / "foredraft"
    script.parent.mkdir()
    script.write_text("from foredraft.program import main\nmain()\n")
    done = run((str(script), "--help"), tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {tmp_path}/retriever.py is in the way")


def test_ours_are_known_in_an_archive(site: Path, tmp_path: Path) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "all"), "zip", site))
    done = run(COMMAND, tmp_path, archive)
    assert done.returncode == 0, done.stderr


def test_ours_are_known_without_their_sources(site: Path, tmp_path: Path) -> None:
    for name in ("foredraft", *EXTRAS):
        assert compileall.compile_dir(site / name, quiet=2, legacy=True, maxlevels=0)
        for source in (site / name).glob("*.py"):
            source.unlink()
    done = run(COMMAND, tmp_path, site)
    assert done.returncode == 0, done.stderr
