"""Outputs outlive the drafter that remembered them, of each tenant for itself."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from indexer.reader import Vocabulary
from retriever.drafter import DraftRequest, SequenceOptions, TokenIds
from retriever.errors import StateError, VocabularyMismatchError
from retriever.limits import Limits
from retriever.log.options import LogOptions
from retriever.predict.generations import Output
from retriever.predict.pool import Entry
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from tests.retriever.log.state_folders import drafter_on, keep, kept, knows, log_on, output, tree_of
from tests.retriever.token_ids import ids


@pytest.mark.parametrize("num_outputs", [1, 40, 400])
def test_a_drafter_opened_again_drafts_as_before(tmp_path: Path, num_outputs: int) -> None:
    """Of few words, so that the live table has room for what followed each."""
    rng = np.random.default_rng(41)
    limits = Limits(generations_tokens=1 << 15)
    contexts = [rng.integers(0, 3, 20).astype(np.int32) for _ in range(100)]
    with drafter_on(tmp_path, limits) as drafter:
        for _ in range(num_outputs):
            drafter.remember(rng.integers(0, 3, int(rng.integers(0, 80))))
        before = [tree_of(drafter, context) for context in contexts]
    assert num_outputs == 1 or any(trees[0] for trees in before)
    with drafter_on(tmp_path, limits) as drafter:
        assert [tree_of(drafter, context) for context in contexts] == before


def test_closed_sequences_are_kept_and_those_that_opted_out_are_not(tmp_path: Path) -> None:
    with drafter_on(tmp_path) as drafter:
        for session, remember in (("kept", True), ("forgotten", False)):
            drafter.open(session, ids(9), SequenceOptions(remember=remember))
            number = 1 if remember else 2
            drafter.draft([DraftRequest(session, output(number)[:5], 6, 4)])
            drafter.close(session, output(number)[5:])
    with drafter_on(tmp_path) as drafter:
        assert knows(drafter, 1)
        assert not knows(drafter, 2)


@pytest.mark.parametrize("tokens", [ids(5), ids(0, 65535), ids(65536), ids((1 << 31) - 2)])
def test_tokens_of_every_size_come_back_as_they_were(tmp_path: Path, tokens: TokenIds) -> None:
    with log_on(tmp_path) as log:
        keep(log, tokens, time_s=12.5)
    with log_on(tmp_path) as log:
        (found,) = log.load("").outputs
        assert found.tokens.tolist() == tokens.tolist()
        assert found.tokens.dtype == np.int32
        assert found.time_s == 12.5


def test_the_log_is_trimmed_to_what_the_ring_holds(tmp_path: Path) -> None:
    with log_on(tmp_path, LogOptions(capacity=1024)) as log:
        for number in range(100):
            keep(log, output(number, 100))
        assert kept(log) == [output(number, 100).tolist() for number in range(89, 100)]
        keep(log, output(0, 5000))
        assert kept(log) == [output(0, 5000)[-1023:].tolist()]
    with log_on(tmp_path, LogOptions(capacity=1024)) as log:
        keep(log, ids(7))
        assert kept(log) == [output(0, 5000)[-1023:].tolist(), [7]]


def test_the_log_forgets_what_is_too_old(tmp_path: Path) -> None:
    now = 0.0
    options = LogOptions(max_age_s=60)
    with log_on(tmp_path, options, lambda: now) as log:
        for tenant in ("a", "b"):
            keep(log, output(1), tenant, time_s=0)
            keep(log, output(2), tenant, time_s=50)
        now = 70
        assert kept(log, "a") == [output(2).tolist()]  # not read any more
        log.remove_expired()
        now = 0
        assert kept(log, "a") == kept(log, "b") == [output(2).tolist()]  # and not there either
        now = 200
        keep(log, output(3), "a", time_s=200)
        now = 0
        assert kept(log, "a") == [output(3).tolist()]


def test_a_drafter_forgets_what_is_too_old(tmp_path: Path) -> None:
    with drafter_on(tmp_path) as drafter:
        drafter.remember(output(1))
    with drafter_on(tmp_path, Limits(generations_age_s=3600)) as drafter:
        assert knows(drafter, 1)
    with drafter_on(tmp_path, Limits(generations_age_s=1e-6)) as drafter:
        assert not knows(drafter, 1)


def test_statistics_are_kept_with_outputs_and_alone(tmp_path: Path) -> None:
    with log_on(tmp_path) as log:
        assert log.load("a").statistics is None
        log.put_statistics("a", b"first")
        log.append(Entry("b", Output(output(1), 0.0), b"with an output"))
        log.commit()
        assert log.load("a").statistics == b"first"
        log.put_statistics("a", b"x" * 100_000)
    with log_on(tmp_path) as log:
        assert log.load("a").statistics == b"x" * 100_000
        assert log.load("b").statistics == b"with an output"
        log.delete("b")
        assert log.load("b").statistics is None


def test_outputs_of_another_tokenizer_are_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    other = Vocabulary(50, "cd" * 32)
    with drafter_on(tmp_path, vocabulary=vocabulary) as drafter:
        drafter.remember(ids(1, 2, 3))
    with pytest.raises(VocabularyMismatchError, match=r"abababababab.*not of cdcdcdcdcdcd"):
        EmbeddedDrafter(state=tmp_path, vocabulary=other)
    with drafter_on(tmp_path) as drafter:  # takes the tokenizer of the directory
        with pytest.raises(VocabularyMismatchError):
            ServiceFace(drafter.state).check_vocabulary(other.fingerprint)
        ServiceFace(drafter.state).check_vocabulary(vocabulary.fingerprint)


def test_the_tokenizer_that_is_named_first_is_that_of_the_directory(tmp_path: Path) -> None:
    with drafter_on(tmp_path) as drafter:
        ServiceFace(drafter.state).check_vocabulary("ab" * 32)
        drafter.remember(ids(1, 2, 3))
    with pytest.raises(VocabularyMismatchError, match="a directory of its own"):
        EmbeddedDrafter(state=tmp_path, vocabulary=Vocabulary(50, "cd" * 32))


def test_outputs_of_no_known_tokenizer_are_refused_by_a_known_one(tmp_path: Path) -> None:
    with drafter_on(tmp_path):
        pass
    with drafter_on(tmp_path, vocabulary=Vocabulary(50, "ab" * 32)):
        pass  # there was none yet
    with drafter_on(tmp_path / "other") as drafter:
        drafter.remember(ids(1, 2, 3))
    with pytest.raises(VocabularyMismatchError, match="not named"):
        EmbeddedDrafter(state=tmp_path / "other", vocabulary=Vocabulary(50, "ab" * 32))


def test_threads_that_close_sessions_at_once_lose_nothing(tmp_path: Path) -> None:
    def work(worker: int) -> None:
        for number in range(50):
            name = f"{worker}/{number}"
            drafter.open(name, ids(9), SequenceOptions(tenant=str(number % 3)))
            drafter.close(name, output(100 * worker + number))

    with drafter_on(tmp_path) as drafter:
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        contexts = [output(number)[:9] for number in range(400)]
        before = [tree_of(drafter, context) for context in contexts]
        assert drafter.stats().log_failures == 0
    with drafter_on(tmp_path) as drafter:
        assert [tree_of(drafter, context) for context in contexts] == before
        for worker in range(4):
            for number in range(50):
                assert knows(drafter, 100 * worker + number, str(number % 3))


def test_one_drafter_at_a_time_uses_a_directory(tmp_path: Path) -> None:
    with drafter_on(tmp_path):
        for _ in range(2):
            with pytest.raises(StateError, match="another drafter uses"):
                EmbeddedDrafter(state=tmp_path)
    with drafter_on(tmp_path) as drafter:
        drafter.remember(output(1))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # that is the point
def test_a_forked_process_does_not_touch_the_log(tmp_path: Path) -> None:
    with log_on(tmp_path) as log:
        keep(log, output(1))
        child = os.fork()
        if child == 0:
            keep(log, output(2))
            log.close()
            os._exit(0 if log.failures == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert kept(log) == [output(1).tolist()]


def test_shutting_down_twice_is_well_and_what_comes_later_is_counted(tmp_path: Path) -> None:
    drafter = EmbeddedDrafter(state=tmp_path)
    drafter.shut_down()
    drafter.shut_down()
    drafter.remember(output(1))
    assert knows(drafter, 1)
    assert drafter.stats().log_failures == 1
    with drafter_on(tmp_path) as reopened:
        assert not knows(reopened, 1)
