import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from decoder.assembly import assemble, connect_drafter, draft_limits
from decoder.budget.budget import FixedBudget
from decoder.drafters.following import Verified, states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.options import DraftOptions
from decoder.drafters.readers import SequenceReader, TreeReader
from decoder.errors import ContradictoryOptionsError, HeadFileError, UnsupportedModelError
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.model.states import FINAL, num_states
from decoder.model.target import Target
from decoder.plugins.speculators.head_files import HeadTarget, load_head, save_head
from decoder.plugins.training import learner
from decoder.plugins.training.head_start import trained_states
from decoder.plugins.training.learner import TRAINED_ONLINE
from decoder.plugins.training.online import LearningSpeculator, Order, read_messages, write_message
from retriever.drafter import FORGOTTEN, TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from tests.decoder.decoding import VOCABULARY, ScriptedDrafter, tiny_llama, tree_of
from tests.decoder.plugins.speculators.published_heads import official_eagle
from tests.decoder.plugins.training.teaching import (
    counting_llama,
    language_model_of,
    prompts_of,
    successors,
    undecided_head,
)

COLUMNS = 40
PATIENCE_S = 240.0
NOTING = "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, open({path!r}, 'wb'))"


@pytest.fixture
def language_model(byte_tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    return language_model_of(counting_llama(), byte_tokenizer)


@pytest.fixture
def head(language_model: LanguageModel, tmp_path: Path) -> Path:
    target = HeadTarget.of(language_model.model, "tiny", language_model.vocabulary)
    save_head(tmp_path / "head", undecided_head(language_model, COLUMNS), target.origin(("a",)))
    return tmp_path / "head"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "list[subprocess.Popen[bytes]]":
    """Learners that were started: they write down what they are sent and never say anything."""
    return stand_in(monkeypatch, NOTING.format(path=str(tmp_path / "sent")))


@pytest.fixture
def learning(
    language_model: LanguageModel,
    head: Path,
    tmp_path: Path,
    started: "list[subprocess.Popen[bytes]]",
) -> Iterator[LearningSpeculator]:
    with LearningSpeculator(head, tmp_path / "learned", language_model.model) as made:
        assert len(started) == 1
        yield made


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> "list[subprocess.Popen[bytes]]":
    """Let processes that learn run so much code, without importing what they would learn with.

    Return the list of those that are started.
    """
    start = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def begin(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert command[:4] == [sys.executable, "-P", "-m", "decoder.plugins.training.learner"]
        started.append(start([sys.executable, "-I", "-S", "-c", code], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", begin)
    return started


def sent_by(learning: LearningSpeculator, tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """End a learner; return the sequences that it was sent, behind the target's layers."""
    learning.close()
    with (tmp_path / "sent").open("rb") as stream:
        outer, *found = read_messages(stream)
    assert outer.keys() == {"embedding", "rows"}
    return found


def settings(**given: Any) -> DraftOptions:
    return DraftOptions(recycle=False, **given)


def waits_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def counting(tokens: list[int], budget: int) -> DraftTree:
    """Draft what `counting_llama` mostly writes, so that outputs take few passes."""
    chain, following = [tokens[-1]], successors().tolist()
    for _ in range(min(budget, 12)):
        chain.append(following[chain[-1]])
    return tree_of([(node - 1, token) for node, token in enumerate(chain[1:])])


class Remembered:
    """A reader that notes what the readings of another are shown, to show it again."""

    def __init__(self, reader: LearningSpeculator) -> None:
        self._reader = reader
        self.name, self.columns, self.source = reader.name, reader.columns, reader.source
        self.max_depth, self.reads_paths = reader.max_depth, reader.reads_paths
        self.states = reader.states
        self.shown: list[tuple[TokenIds, list[Verified]]] = []

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        reading = self._reader.follow(sequence)
        passes: list[Verified] = []
        self.shown.append((sequence.tokens.copy(), passes))
        learn = reading.learn

        def noted(verified: Verified) -> None:
            passes.append(verified)
            learn(verified)

        reading.learn = noted  # type: ignore[method-assign]
        return reading

    def show_again(self) -> None:
        """Have all sequences come once more."""
        for prompt, passes in self.shown:
            sequence = TokenSequence(prompt)
            reading = self._reader.follow(sequence)
            for verified in passes:
                show(reading, sequence, verified)
            reading.close()


def show(reading: SequenceReader, sequence: TokenSequence, verified: Verified) -> None:
    """Show a pass to a reading, and commit what came of it."""
    reading.learn(verified)
    path = verified.tree.token_ids[verified.path].tolist()
    sequence.extend(np.array([*path, verified.next_token], np.int32))


def prompt_pass(states: dict[int, torch.Tensor], last_token: int, next_token: int) -> Verified:
    """Return a pass over a prompt that brought one token."""
    nothing = np.zeros(0, np.int64)
    return Verified(
        last_token, DraftTree.empty(), torch.zeros(1, VOCABULARY), nothing, next_token, states
    )


def told_by(reader: LearningSpeculator) -> torch.Tensor:
    """Return the logits of a new sequence, which is not to be learned from."""
    sequence = TokenSequence(prompts_of([9], 3)[0], options=FORGOTTEN)
    generator = torch.Generator().manual_seed(0)
    states = {each: torch.randn(9, 32, generator=generator) for each in sorted(reader.states)}
    reading = reader.follow(sequence)
    show(reading, sequence, prompt_pass(states, int(sequence.tokens[-1]), 7))
    logits = reading.begin()
    assert logits is not None
    reading.close()
    return logits


def decoder_of(language_model: LanguageModel, reader: TreeReader) -> Decoder:
    limits = draft_limits(language_model)
    drafter = FusedDrafter([ScriptedDrafter(counting)], limits, readers=[reader])
    assert states_of(drafter) == reader.states
    target = Target(language_model.model, states=states_of(drafter), verdicts=None)
    return Decoder(target, drafter, FixedBudget(16))


def teach(language_model: LanguageModel, reader: TreeReader, count: int) -> list[list[int]]:
    """Decode prompts with a reader; return the outputs."""
    decoder = decoder_of(language_model, reader)
    return [
        list(chain.from_iterable(decoder.generate(prompt.tolist(), 60)))
        for prompt in prompts_of([6] * count)
    ]


@pytest.mark.training
def test_what_is_learned_is_drafted_from_and_kept(
    language_model: LanguageModel,
    head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "decoder")
    folder = tmp_path / "learned"
    options: dict[str, Any] = {
        "share": 1.0,
        "held_bytes": 4 << 20,
        "niceness": 0,  # other tests keep all cores busy
    }
    with LearningSpeculator(head, folder, language_model.model, **options) as learning:
        remembered, before = Remembered(learning), told_by(learning)
        outputs = teach(language_model, remembered, 6)

        def is_learned() -> bool:  # the learner takes all that comes again as new
            if learning._learner._waiting.empty():  # or it would be left out
                remembered.show_again()
            return "has improved and is now in use" in caplog.text

        waits_until(is_learned)
        waits_until(lambda: not torch.equal(told_by(learning), before))
        assert teach(language_model, learning, 6) == outputs
        target = HeadTarget.of(language_model.model, "tiny", language_model.vocabulary)
        assert load_head(head, target).origin.trained_on == ("a",)
    kept = load_head(folder, target)
    assert kept.origin.trained_on == ("a", TRAINED_ONLINE)
    stand_in(monkeypatch, "")
    with LearningSpeculator(head, folder, language_model.model) as again:
        assert again.name.endswith("learned")
        assert not torch.equal(told_by(again), before)


def test_a_folder_learns_in_one_process_at_a_time(
    language_model: LanguageModel, learning: LearningSpeculator, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(HeadFileError, match="another process is training a head there"):
        LearningSpeculator(head, tmp_path / "learned", language_model.model)
    learning.close()
    learning.close()
    LearningSpeculator(head, tmp_path / "learned", language_model.model).close()


def test_a_learner_that_dies_is_told_and_drafting_goes_on(
    language_model: LanguageModel,
    learning: LearningSpeculator,
    started: "list[subprocess.Popen[bytes]]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    started[0].kill()
    waits_until(lambda: "online training has stopped" in caplog.text)
    assert len(teach(language_model, learning, 3)) == 3


def test_a_head_that_the_learner_cannot_load_is_told(  # noqa: PLR0913, PLR0917  fixtures
    language_model: LanguageModel,
    head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The learner runs here, without its head, and a process then says what it said."""
    target = replace(HeadTarget.of(language_model.model, None), vocabulary=None)
    order = Order(str(head), str(tmp_path / "learned"), asdict(target), 1.0, 1 << 20, niceness=0)
    stream = io.BytesIO()
    write_message(stream, {"embedding": torch.zeros(48, 32), "rows": torch.zeros(COLUMNS, 32)})
    stream.seek(0)
    config = (head / "config.json").rename(tmp_path / "config.json")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["learner", json.dumps(asdict(order))])
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        learner.main()
    config.rename(head / "config.json")
    stand_in(monkeypatch, f"print({capsys.readouterr().out!r}, end='')")
    with LearningSpeculator(head, tmp_path / "learned", language_model.model):
        waits_until(lambda: "online training has stopped" in caplog.text)
    assert "config.json is missing" in caplog.text


def test_the_states_of_committed_tokens_are_sent(
    language_model: LanguageModel, learning: LearningSpeculator, tmp_path: Path
) -> None:
    prompt = prompts_of([9], 3)[0]
    sequence = TokenSequence(prompt)
    reading = learning.follow(sequence)
    rows = {number: torch.randn(9, 32) for number in learning.states}
    show(reading, sequence, prompt_pass(rows, int(prompt[-1]), 7))
    tree = DraftTree.checked([5, 6], [-1, 0], [0.9, 0.8], [0, 0])
    more = {number: torch.randn(3, 32) for number in learning.states}
    logits = torch.zeros(3, VOCABULARY)
    show(reading, sequence, Verified(7, tree, logits, np.array([0]), 8, more))
    reading.close()
    (example,) = sent_by(learning, tmp_path)
    assert example["tokens"].tolist() == [*prompt.tolist(), 7, 5, 8]
    assert int(example["num_prompt"]) == 9
    numbers = (*trained_states(num_states(language_model.model)), FINAL)
    wanted = torch.cat([torch.cat([rows[each], more[each][:2]]) for each in numbers], dim=-1)
    assert torch.equal(example["states"], wanted.bfloat16())


def test_what_is_not_remembered_is_not_learned(
    language_model: LanguageModel, learning: LearningSpeculator, tmp_path: Path
) -> None:
    decoder = decoder_of(language_model, learning)
    secret, told = (prompt.tolist() for prompt in prompts_of([6, 6]))
    list(decoder.generate(secret, 40, FORGOTTEN))
    list(decoder.generate(told, 40))
    (example,) = sent_by(learning, tmp_path)
    assert example["tokens"][:6].tolist() == told


def test_only_the_last_tokens_are_sent(learning: LearningSpeculator, tmp_path: Path) -> None:
    tokens = np.arange(1400, dtype=np.int32)
    for length, num_prompt in ((4, 3), (1400, 1300)):  # too short a sequence teaches nothing
        sequence = TokenSequence(tokens[: length - 1], num_prompt)
        reading = learning.follow(sequence)
        states = {number: torch.randn(length - 1, 32) for number in learning.states}
        show(reading, sequence, prompt_pass(states, length - 2, length - 1))
        reading.close()
    (example,) = sent_by(learning, tmp_path)
    count = len(example["states"])
    assert 1000 < count < 1100
    assert example["tokens"].tolist() == list(range(1399 - count, 1400))
    assert int(example["num_prompt"]) == 1300 - (1399 - count)
    assert torch.equal(example["states"][:, -32:], states[FINAL][-count:].bfloat16())


def test_the_command_line_teaches_and_ends_its_learner(
    language_model: LanguageModel,
    head: Path,
    tmp_path: Path,
    started: "list[subprocess.Popen[bytes]]",
) -> None:
    drafts = settings(speculator=head, online=tmp_path / "learned", online_share=0.5)
    with connect_drafter(drafts, language_model) as drafter:
        list(assemble(language_model, drafter).generate(prompts_of([6])[0].tolist(), 10))
    assert started[0].poll() == 0


def test_contradictions_are_refused(
    language_model: LanguageModel, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(ContradictoryOptionsError, match="give one with --speculator"):
        settings(online=tmp_path)
    with pytest.raises(ValueError, match="above 0"):
        LearningSpeculator(head, tmp_path / "x", language_model.model, share=0.0)
    with pytest.raises(UnsupportedModelError, match="cannot be trained online"):
        LearningSpeculator(
            official_eagle().write(tmp_path / "other"), tmp_path / "x", tiny_llama(layers=3)
        )
    (tmp_path / "file").touch()
    with pytest.raises(HeadFileError, match="is a file"):
        LearningSpeculator(head, tmp_path / "file", language_model.model)
