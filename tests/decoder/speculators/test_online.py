import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from decoder.assembly import DrafterSettings, assemble, draft_limits
from decoder.budget.budget import FixedBudget
from decoder.drafters.following import Verified, states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.errors import ContradictoryOptionsError, HeadFileError, UnsupportedModelError
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.speculators import online
from decoder.speculators.head_files import HeadTarget, load_head, save_head
from decoder.speculators.online import LearningSpeculator, Order, write_message
from decoder.training import learner
from decoder.training.learner import TRAINED_ONLINE
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from tests.decoder.decoding import ScriptedDrafter, tiny_llama, tree_of
from tests.decoder.speculators.published_heads import official_eagle
from tests.decoder.training.teaching import (
    counting_llama,
    language_model_of,
    prompts_of,
    successors,
    undecided_head,
)

COLUMNS = 40
PATIENCE_S = 240.0
READING = "import sys; sys.stdin.buffer.read()"


@pytest.fixture
def language_model(byte_tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    return language_model_of(counting_llama(), byte_tokenizer)


@pytest.fixture
def head(language_model: LanguageModel, tmp_path: Path) -> Path:
    target = HeadTarget.of(language_model.model, "tiny", language_model.vocabulary)
    save_head(tmp_path / "head", undecided_head(language_model, COLUMNS), target.origin(("a",)))
    return tmp_path / "head"


@pytest.fixture
def learning(
    language_model: LanguageModel, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LearningSpeculator]:
    """A speculator whose learner takes in what it is sent and never says anything."""
    stand_in(monkeypatch, READING)
    with LearningSpeculator(head, tmp_path / "learned", language_model.model) as made:
        yield made


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let processes that learn run so much code, without importing what they would learn with."""
    start = subprocess.Popen

    def started(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert command[:4] == [sys.executable, "-P", "-m", "decoder.training.learner"]
        return start([sys.executable, "-I", "-S", "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", started)


def settings(**given: Any) -> DrafterSettings:
    return DrafterSettings(recycle=False, **given)


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


def decoder_of(language_model: LanguageModel, speculator: LearningSpeculator) -> Decoder:
    limits = draft_limits(language_model)
    drafter = FusedDrafter([ScriptedDrafter(counting)], limits, readers=[speculator])
    assert states_of(drafter) == speculator.states
    target = Target(language_model.model, states=states_of(drafter), verdicts=None)
    return Decoder(target, drafter, FixedBudget(16))


def teach(
    language_model: LanguageModel, speculator: LearningSpeculator, count: int, seed: int = 0
) -> list[list[int]]:
    """Decode prompts with a speculator; return the outputs."""
    decoder = decoder_of(language_model, speculator)
    return [
        list(chain.from_iterable(decoder.generate(prompt.tolist(), 60)))
        for prompt in prompts_of([6] * count, seed)
    ]


def test_what_is_learned_is_drafted_from_and_kept(
    language_model: LanguageModel,
    head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "decoder")
    monkeypatch.setattr(online, "_NICENESS", 0)  # other tests keep all cores busy
    folder = tmp_path / "learned"

    def has_told(count: int) -> bool:
        return caplog.text.count("held-out worth") >= count

    with LearningSpeculator(head, folder, language_model.model, share=1.0) as learning:
        first, found, rounds = learning._current, sent(learning, monkeypatch), 0
        outputs = teach(language_model, learning, 6)
        while learning._current is first:
            for message in found[:6] * 16:  # enough for a round: the learner takes all as new
                learning._learner._waiting.put(message, timeout=PATIENCE_S)
            rounds += 1
            assert rounds < 20
            waits_until(partial(has_told, rounds))
        assert teach(language_model, learning, 6) == outputs
        assert "foretells more and is drafted from" in caplog.text
        target = HeadTarget.of(language_model.model, "tiny", language_model.vocabulary)
        assert load_head(head, target).origin.trained_on == ("a",)
    kept = load_head(folder, target)
    assert kept.origin.trained_on == ("a", TRAINED_ONLINE)
    stand_in(monkeypatch, READING)
    with LearningSpeculator(head, folder, language_model.model) as again:
        assert again._current.name.endswith("learned")


def test_a_folder_learns_in_one_process_at_a_time(
    language_model: LanguageModel, learning: LearningSpeculator, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(HeadFileError, match="another process trains a head there"):
        LearningSpeculator(head, tmp_path / "learned", language_model.model)
    learning.close()
    learning.close()
    LearningSpeculator(head, tmp_path / "learned", language_model.model).close()


def test_a_learner_that_dies_is_told_and_drafting_goes_on(
    language_model: LanguageModel,
    learning: LearningSpeculator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    os.kill(learning._learner._process.pid, signal.SIGKILL)
    waits_until(lambda: "the speculator learns no more" in caplog.text)
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
        waits_until(lambda: "the speculator learns no more" in caplog.text)
    assert "config.json is missing" in caplog.text


def sent(learning: LearningSpeculator, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list of what is to be sent from now on; the end is sent all the same."""
    found: list[dict[str, Any]] = []
    put = learning._learner._waiting.put_nowait

    def note(message: dict[str, Any] | None) -> None:
        if message is None:
            put(None)
        else:
            found.append(message)

    monkeypatch.setattr(learning._learner._waiting, "put_nowait", note)
    return found


def test_the_states_of_committed_tokens_are_sent(
    learning: LearningSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sent(learning, monkeypatch)
    prompt = prompts_of([9], 3)[0]
    sequence = TokenSequence(prompt)
    reading = learning.follow(sequence)
    rows = {number: torch.randn(9, 32) for number in learning.states}
    nothing = np.zeros(0, np.int64)
    reading.learn(
        Verified(int(prompt[-1]), DraftTree.empty(), torch.zeros(1, 48), nothing, 7, rows)
    )
    sequence.extend(np.array([7], np.int32))
    tree = DraftTree.checked([5, 6], [-1, 0], [0.9, 0.8], [0, 0])
    more = {number: torch.randn(3, 32) for number in learning.states}
    path = np.array([0])
    reading.learn(Verified(7, tree, torch.zeros(3, 48), path, 8, more))
    sequence.extend(np.array([5, 8], np.int32))
    reading.close()
    (example,) = found
    assert example["tokens"].tolist() == [*prompt.tolist(), 7, 5, 8]
    assert int(example["num_prompt"]) == 9
    wanted = torch.cat(
        [torch.cat([rows[each], more[each][:2]]) for each in learning._numbers], dim=-1
    )
    assert torch.equal(example["states"], wanted.bfloat16())


def test_what_is_not_remembered_is_not_learned(
    language_model: LanguageModel, learning: LearningSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sent(learning, monkeypatch)
    decoder = decoder_of(language_model, learning)
    list(decoder.generate(prompts_of([6])[0].tolist(), 40, remember=False))
    assert not found
    list(decoder.generate(prompts_of([6])[0].tolist(), 40))
    assert len(found) == 1


def test_only_the_last_tokens_are_sent(
    learning: LearningSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sent(learning, monkeypatch)
    monkeypatch.setattr(online, "_MOST_TOKENS", 10)
    states = torch.randn(30, 128)
    sequence = TokenSequence(np.arange(40, dtype=np.int32), 35)
    learning._learner.send(states, 9, sequence)
    assert found[0]["tokens"].tolist() == list(range(29, 40))
    assert int(found[0]["num_prompt"]) == 6
    assert torch.equal(found[0]["states"], states[-10:].bfloat16())
    learning._learner.send(states[:3], 0, TokenSequence(np.arange(4, dtype=np.int32)))
    assert len(found) == 1


def test_the_command_line_teaches_and_ends_its_learner(
    language_model: LanguageModel, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LearningSpeculator] = []
    init = LearningSpeculator.__init__

    def noted(self: LearningSpeculator, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(LearningSpeculator, "__init__", noted)
    stand_in(monkeypatch, READING)
    drafts = settings(speculator=head, online=tmp_path / "learned", online_share=0.5)
    with drafts.connect(language_model) as drafter:
        list(assemble(language_model, drafter).generate(prompts_of([6])[0].tolist(), 10))
    assert made[0]._learner._process.poll() == 0


def test_contradictions_are_refused(
    language_model: LanguageModel, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(ContradictoryOptionsError, match="give its --speculator"):
        settings(online=tmp_path)
    with pytest.raises(ValueError, match="above 0"):
        LearningSpeculator(head, tmp_path / "x", language_model.model, share=0.0)
    with pytest.raises(UnsupportedModelError, match="does not go on learning"):
        LearningSpeculator(official_eagle().write(tmp_path / "other"), tmp_path / "x", tiny_llama())
    (tmp_path / "file").touch()
    with pytest.raises(HeadFileError, match="is a file"):
        LearningSpeculator(head, tmp_path / "file", language_model.model)
