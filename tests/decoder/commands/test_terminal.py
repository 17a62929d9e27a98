"""What a terminal shows: colours are right and leave the text the same, progress is seen."""

import io
import re

import pytest
from rich.console import Console

from decoder.commands import terminal
from decoder.commands.answers import together
from decoder.commands.generate import AnswerOptions, Interruption, Task, answer
from decoder.commands.options import Colouring
from decoder.commands.terminal import Painter, Palette, sources_of, watching
from decoder.model.pretrained import LanguageModel
from decoder.observation import ObservedPass
from decoder.stopping import StopStrings
from retriever.tree import ROOT, DraftTree, Source
from tests.decoder.decoding import ScriptedDrafter, decoder_with, plainly, tree_of

PROMPT = "abcabc"
ESCAPES = re.compile("\x1b\\[[0-9;]*m")
MOVES = re.compile("\x1b\\[[?0-9;]*[A-Zhl]|\r")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("colouring", "environment", "on_terminal", "elsewhere"),
    [
        ("auto", {}, True, False),
        ("auto", {"NO_COLOR": "1"}, False, False),
        ("auto", {"NO_COLOR": ""}, True, False),
        ("auto", {"TERM": "dumb"}, False, False),
        ("always", {"NO_COLOR": "1"}, True, True),
        ("never", {}, False, False),
    ],
)
def test_text_is_coloured_on_terminals_that_want_it(
    colouring: str, environment: dict[str, str], *, on_terminal: bool, elsewhere: bool
) -> None:
    chosen = Colouring(colouring)
    assert chosen.applies_to(Terminal(), environment) == on_terminal
    assert chosen.applies_to(io.StringIO(), environment) == elsewhere


@pytest.mark.parametrize("stops", [(), ("a",), ("\u00e9", "xyz")])
def test_colours_follow_the_sources_and_change_no_text(
    language_model: LanguageModel, stops: tuple[str, ...]
) -> None:
    prompt = language_model.encode(PROMPT)
    truth = prompt + plainly(language_model.model, prompt, 60)

    def guess(tokens: list[int], _budget: int) -> DraftTree:
        """Three right tokens, from one source and then from another."""
        source = (Source.CORPUS, Source.GENERATIONS, Source.MODEL)[len(tokens) % 3]
        ahead = truth[len(tokens) : len(tokens) + 3]
        return tree_of([(node - 1 if node else ROOT, t) for node, t in enumerate(ahead)], source)

    def answered(palette: Palette | None) -> tuple[str, str, list[Source | None]]:
        pieces: list[str] = []
        sources: list[Source | None] = []
        painter = Painter(language_model.tokenizer, pieces.append, palette)

        def note(step: ObservedPass) -> None:
            sources.extend(sources_of(step))

        result = answer(
            decoder_with(language_model.model, ScriptedDrafter(guess)),
            language_model,
            Task(prompt, painter.text, together([painter.observe, note])),
            AnswerOptions(40, StopStrings(stops)),
            Interruption(),
        )
        painter.finish()
        assert "".join(pieces) == painter.painted
        return result.text, painter.painted, sources

    palette = Palette()
    plain, uncoloured, _ = answered(None)
    text, coloured, sources = answered(palette)
    assert uncoloured == plain == text == ESCAPES.sub("", coloured)
    assert {Source.CORPUS, Source.GENERATIONS, None} <= set(sources)
    # A token is a byte here, so where all bytes are characters each has its token's colour.
    if plain.isascii() and not stops:
        pairs = zip(plain, sources, strict=True)
        assert coloured == "".join(palette.painted(c, source) for c, source in pairs)


@pytest.mark.parametrize(
    ("colour_term", "term"),
    [("truecolor", "xterm"), ("", "xterm-256color"), ("", "xterm"), ("", "")],
)
def test_every_source_has_a_colour_of_its_own(
    monkeypatch: pytest.MonkeyPatch, colour_term: str, term: str
) -> None:
    monkeypatch.setenv("COLORTERM", colour_term)
    monkeypatch.setenv("TERM", term)
    palette = Palette()
    painted = {palette.painted("x", source) for source in Source}
    assert len(painted) == len(Source)
    uncoloured = [source.label for source in Source if palette.painted("x", source) == "x"]
    assert uncoloured == []  # each needs a colour in decoder/commands/terminal.py
    assert palette.painted("a\nb", Source.CORPUS).count("\x1b[0m\n") == 1
    assert palette.painted("a", None) == "a"


def test_progress_without_a_terminal_is_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 20.0, 32.0, 40.0, 41.0, 42.0])
    monkeypatch.setattr("decoder.commands.terminal.time.monotonic", lambda: next(clock))
    with watching() as watcher:
        watcher("recording", 0.1, "10 tokens")
        watcher("recording", 0.2, "20 tokens")  # too soon
        watcher("recording", 0.3, "30 tokens")
        watcher("recording", 0.9, "90 tokens")  # the last of its stage
        watcher("training", 0.1, "loss 4")
        watcher("training", 1.0, "loss 3")  # the last of all
    assert capsys.readouterr().err.splitlines() == [
        "0.0 min: recording, 10%, 10 tokens",
        "0.5 min: recording, 30%, 30 tokens",
        "0.7 min: recording, 90%, 90 tokens",
        "0.7 min: training, 10%, loss 4",
        "0.7 min: training, 100%, loss 3",
    ]


def test_progress_on_a_terminal_is_a_bar_under_the_stages_that_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        terminal, "Console", lambda **_: Console(file=shown, force_terminal=True, width=80)
    )
    words = (
        "4 nodes, temperature 0.7, seed 12 (1 of 2), round 1 of 2, measuring",
        "1 of 3 prompts",
    )
    with watching() as watcher:
        for number in range(30):  # more than a terminal has lines
            watcher(f"recording [{number}]", 1.0, "10 tokens")
        watcher(words[0], 0.5, f"{words[1]}, foredraft 2.00 tokens a pass")
    assert "\x1b[" in shown.getvalue()
    text = MOVES.sub("\n", ESCAPES.sub("", shown.getvalue()))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert all(f"recording [{number}], 10 tokens" in lines for number in range(30))
    last = " ".join(lines[-3:])  # at the end, in columns that wrap
    assert all(word in last for words_of in words for word in words_of.split())
    assert "foredraft" in last
    assert "\u2501" in last  # the bar itself
    assert "0:00:0" in last
    assert "\u2026" not in last  # nothing is cut
