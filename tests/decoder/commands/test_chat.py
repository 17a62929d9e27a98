"""A conversation in the terminal, and without one."""

import io
import os
import pty
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from decoder import assembly
from decoder.budget.costs import CostSurface
from decoder.commands.chat_command import Messages, ShownPace, StatusLine, folded
from decoder.errors import InvalidPromptError
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from decoder.observation import ObservedPass
from decoder.speedup import Speedup
from tests.decoder.commands.command_line import WORTH, run
from tests.decoder.decoding import ScriptedDrafter, decoder_with, nothing, plainly

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
ESCAPES = re.compile("\x1b(?:\\[[0-9;]*[A-Za-z]|[78])")
NEW = 6


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = CostSurface.flat((1, 8), (1.0, 1.0))
    monkeypatch.setattr(assembly, "known_costs", lambda *_: curve)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(model_directory, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(talking: Path) -> LanguageModel:
    return load_model(ModelOptions(str(talking)))


def reply(model: LanguageModel, text: str, count: int = NEW) -> str:
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    return str(
        model.tokenizer.decode(plainly(model.model, tokens, count, 0), skip_special_tokens=True)
    )


def chat(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    return run(
        monkeypatch, "chat", "--model", str(folder), "--max-new-tokens", str(NEW), *arguments
    )


def test_each_line_of_a_pipe_is_a_message_and_the_model_sees_all_turns(
    talking: Path,
    model: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n\n/more\n")))
    assert chat(monkeypatch, talking, "--system", "Brief.") == 0
    first = reply(model, "s:Brief.\nu:hello\n")
    second = reply(model, f"s:Brief.\nu:hello\na:{first}\nu:/more\n")
    shown = capsys.readouterr()
    assert shown.out == f"{first}\n{second}\n"
    assert shown.err.splitlines()[-2].startswith(f"{2 * NEW} tokens, ")
    assert WORTH.match(shown.err.splitlines()[-1])


def test_bad_input_of_a_pipe_is_told(
    talking: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chat(monkeypatch, model_directory) == 1
    assert "has no chat template" in capsys.readouterr().err
    given = b"hi\n" + b"x" * 300 + b"\ncaf\xe9\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert chat(monkeypatch, talking) == 1
    told = capsys.readouterr().err
    assert "oldest turns left out, for lack of room: 1" not in told
    assert "limit is 128" in told
    assert "line 3 of standard input is not UTF-8" in told


def test_the_oldest_turns_go_where_there_is_no_room(model: LanguageModel) -> None:
    decoder = decoder_with(model.model, ScriptedDrafter(nothing))
    messages = Messages(model, decoder, None, [("a" * 30, "b" * 30), ("c" * 10, "d" * 10)])
    tokens, num_dropped = messages.prompt("e" * 20, 40)
    assert num_dropped == 1
    assert tokens == model.tokenizer.encode(f"u:{'c' * 10}\na:{'d' * 10}\nu:{'e' * 20}\n")
    assert messages.prompt("e" * 20, 40) == (tokens, 0)
    with pytest.raises(InvalidPromptError, match="limit is 128"):
        messages.prompt("e" * 200, 40)


class Screen:
    """A terminal of 40 columns: what is typed into it, and all that was written to it."""

    def __init__(self, typed: bytes) -> None:
        self._master, slave = pty.openpty()
        self.stdin = os.fdopen(slave, "r")
        self.stdout = os.fdopen(os.dup(slave), "w")
        self._written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        os.write(self._master, typed)

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 4096)
            except OSError:  # the other side is closed
                return
            if not piece:
                return
            self._written += piece

    def text(self) -> str:
        """Close it, and return what was written."""
        self.stdin.close()
        self.stdout.close()
        self._reader.join(timeout=5)
        return self._written.decode()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Screen]:
    def opened(typed: bytes) -> Screen:
        made = Screen(typed)
        for name in ("stdin", "stdout", "stderr"):
            monkeypatch.setattr(sys, name, made.stdin if name == "stdin" else made.stdout)
        return made

    for name, value in (("COLUMNS", "40"), ("LINES", "10"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return opened


@pytest.mark.parametrize(
    ("variables", "coloured", "live"),
    [({}, True, True), ({"NO_COLOR": "1"}, False, True), ({"TERM": "dumb"}, False, False)],
)
def test_a_terminal_of_40_columns_shows_all(  # noqa: PLR0913  the last three are fixtures
    variables: dict[str, str],
    *,
    coloured: bool,
    live: bool,
    talking: Path,
    screen: Callable[[bytes], Screen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = screen(b"hello\n\x04")
    assert chat(monkeypatch, talking) == 0
    text = shown.text()
    assert ("\x1b[2K" in text) == live
    assert ("\x1b[r" in text) == live  # lines scroll again
    assert ("uncoloured: the model's own" in text) == coloured
    if live:
        assert "tokens per pass, this one" in text
    statuses = re.findall("\x1b\\[2K([^\x1b]*)", text)
    assert all(len(status) < 40 for status in statuses)
    after = ESCAPES.sub("", text.rpartition("\x1b[2K")[2]).replace("\r", "").splitlines()
    told = next(line for line in after if "tokens/s" in line)
    assert re.fullmatch(r"\d\.\d\d tokens per pass, \d+\.\d tokens/s", told)
    assert len(told) <= 40


def test_lines_that_begin_with_a_slash_are_commands_at_a_terminal(
    talking: Path,
    screen: Callable[[bytes], Screen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []
    own = Messages.prompt

    def prompt(self: Messages, message: str, max_new_tokens: int) -> tuple[list[int], int]:
        seen.append((message, len(self.turns)))
        return own(self, message, max_new_tokens)

    monkeypatch.setattr(Messages, "prompt", prompt)
    shown = screen(b"a\n/help\n/nope x\n /exit\n/a/b\n/clear \nb\n/quit\nc\n")
    assert chat(monkeypatch, talking) == 0
    assert seen == [("a", 0), ("/exit", 1), ("/a/b", 2), ("b", 0)]
    text = ESCAPES.sub("", shown.text())
    assert text.count("/exit and /quit end the chat") == 2
    assert "there is no command /nope: /clear" in text
    assert "a new conversation begins" in text


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    talking: Path,
    screen: Callable[[bytes], Screen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    own = ShownPace.observe

    def observe(self: ShownPace, step: ObservedPass) -> None:
        own(self, step)
        seen.append(len(step.tokens))
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ShownPace, "observe", observe)
    shown = screen(b"hello\nmore\n\x04")
    assert chat(monkeypatch, talking) == 0
    text = ESCAPES.sub("", shown.text())
    assert text.count("stopped") == 1
    assert len(seen) > 4  # the second answer is whole


def test_a_status_line_leaves_the_cursor_and_the_screen_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "10")
    stream = io.StringIO()
    status = StatusLine(stream)
    status.close()
    assert stream.getvalue() == ""
    status.show("first")
    status.show("second")
    status.close()
    written = stream.getvalue()
    assert written.count("\x1b7") == written.count("\x1b8") == 4
    assert written.count("\x1b[1;9r") == written.count("\x1b[r") == 1
    assert written.count("\x1b[10;1H") == 3


def test_parts_are_folded_and_never_cut() -> None:
    parts = ["4.67 tokens per pass", "31.0 tokens/s", "2.9x plain"]
    assert folded(parts, 80) == [", ".join(parts)]
    assert folded(parts, 40) == ["4.67 tokens per pass, 31.0 tokens/s", "2.9x plain"]
    assert folded(parts, 5) == parts
    assert Speedup().times_plain is None
