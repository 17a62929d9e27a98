"""How command lines start and end: with one line where a library is missing, silently on Ctrl-C."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from indexer.launch import INTERRUPTED

ROOT = Path(__file__).parent.parent
# Nothing is imported behind the word: an interrupt within an import's callbacks would be lost.
WAITING = "import time; print('waiting', flush=True); time.sleep(60)"
SWALLOWING = f"""
try:
    {WAITING}
except BaseException as error:
    raise ImportError("as some libraries do") from error
"""


def started(folder: Path, commands: str) -> "subprocess.Popen[str]":
    """Launch a package whose `commands` are given."""
    package = folder / "slow"
    package.mkdir()
    (package / "commands.py").write_text(commands)
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from indexer.launch import launch; launch('slow.commands', 'none')",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
    )


@pytest.mark.parametrize(
    "commands", [WAITING, SWALLOWING, f"def main():\n    {WAITING}"], ids=["import", "lost", "main"]
)
def test_an_interrupt_ends_in_silence(tmp_path: Path, commands: str) -> None:
    process = started(tmp_path, commands)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (INTERRUPTED, "", "")


WARNING = """
import sys
import warnings
def main():
    warnings.warn("a name is deprecated", FutureWarning)
    from transformers.utils import logging
    logging.get_logger("transformers.models").warning("a kernel is not installed")
    print("an answer")
"""


@pytest.mark.parametrize("options", [{}, {"PYTHONWARNINGS": "default"}], ids=["as it is", "asked"])
def test_what_libraries_tell_developers_is_told_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    for name in ("PYTHONWARNINGS", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    out, err = started(tmp_path, WARNING).communicate(timeout=120)
    assert out == "an answer\n"
    assert ("a name is deprecated" in err) == bool(options)
    assert "kernel" not in err


@pytest.mark.parametrize("ending", ["", "; sys.exit(0)", "; sys.stdout.flush()"])
@pytest.mark.parametrize("target", ["/dev/full", None])
def test_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, ending: str, target: str | None
) -> None:
    package = tmp_path / "slow"
    package.mkdir()
    (package / "commands.py").write_text(f"import sys\ndef main(): print('x' * 99){ending}\n")
    script = "from indexer.launch import launch; launch('slow.commands', 'none')"
    reading, writing = (None, os.open(target, os.O_WRONLY)) if target else os.pipe()
    if reading is not None:
        os.close(reading)  # as `head` does
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
    )
    os.close(writing)
    told = "error: the output cannot be written: No space left on device\n" if target else ""
    assert (done.returncode, done.stderr) == (1, told)


def test_what_the_packages_log_is_printed_bare(tmp_path: Path) -> None:
    logged = (
        "logging.getLogger('decoder.model.pretrained').info('loading it'); logging.info('noise')"
    )
    process = started(tmp_path, f"import logging\ndef main():\n    {logged}")
    assert process.communicate(timeout=60) == ("", "loading it\n")


@pytest.mark.parametrize(
    ("package", "extra"), [("decoder", "decoder"), ("retriever", "server"), ("indexer", "index")]
)
def test_a_missing_library_is_answered_with_what_to_install(
    package: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    done = subprocess.run(
        [sys.executable, "-m", package, "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: typer is missing: run `pip install 'foredraft[{extra}]'`\n"


@pytest.mark.parametrize("package", ["indexer", "retriever", "decoder"])
def test_every_command_line_tells_its_version_at_once(package: str) -> None:
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", package, "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert told.stdout == f"foredraft {version('foredraft')}\n"
    assert "typer" not in told.stderr
