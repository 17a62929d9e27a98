import errno
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from decoder.errors import TrainingError
from decoder.plugins.training import taught_store
from decoder.plugins.training.taught_store import Example, TaughtStore
from tests.decoder.decoding import VOCABULARY
from tests.decoder.plugins.training.teaching import drawn_texts

STAMP = {"model": "tiny", "states": [1, 2, 3]}


def assert_holds(store: TaughtStore, taught: list[Example]) -> None:
    assert len(store) == len(taught)
    assert store.lengths().tolist() == [len(each.tokens) for each in taught]
    for number, each in enumerate(taught):
        example = store[number]
        assert example.tokens.tolist() == each.tokens.tolist()
        assert example.num_prompt == each.num_prompt
        assert torch.equal(example.states[: len(each.states)], each.states)
        assert not example.states[len(each.states) :].any()
    outputs = [each.tokens[each.num_prompt :] for each in taught]
    counts = np.bincount(np.concatenate(outputs), minlength=VOCABULARY)
    assert store.token_counts(VOCABULARY).tolist() == counts.tolist()
    assert store.num_tokens == sum(map(len, outputs))
    own = [len(output) for output, each in zip(outputs, taught, strict=True) if each.is_own]
    assert store.num_own_tokens == sum(own)


def test_what_was_recorded_comes_back_from_several_files(tmp_path: Path) -> None:
    taught = drawn_texts([(3, 5), (1, 9), (12, 1), (4, 4), (2, 30)])
    taught[1] = Example(taught[1].tokens, 1, taught[1].states[:-1], is_own=True, was_asked=True)
    store = TaughtStore(tmp_path / "new" / "taught", STAMP)
    store.add(taught[:2], 1.5)
    store.add([])
    assert_holds(store, taught[:2])
    store.add(taught[2:3], 2.0)
    again = TaughtStore(tmp_path / "new" / "taught", STAMP)
    assert_holds(again, taught[:3])
    again.add(taught[3:])
    for each in (again, TaughtStore(tmp_path / "new" / "taught", STAMP)):
        assert_holds(each, taught)
        assert (each.num_shards, each.num_read, each.seconds) == (3, 1, 3.5)
    with pytest.raises(IndexError):
        again[5]


def test_an_empty_store_has_nothing(tmp_path: Path) -> None:
    store = TaughtStore(tmp_path, STAMP)
    assert (len(store), store.num_tokens, store.num_shards, store.num_read) == (0, 0, 0, 0)
    assert store.lengths().shape == (0,)
    assert store.token_counts(5).tolist() == [0] * 5


def test_what_another_training_recorded_is_refused(tmp_path: Path) -> None:
    TaughtStore(tmp_path, STAMP).add(drawn_texts([(3, 5)]))
    with pytest.raises(TrainingError, match=r"with another model and states: remove it, or train"):
        TaughtStore(tmp_path, {"model": "other", "states": [1, 2, 4]})


def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path) -> None:
    store = TaughtStore(tmp_path, STAMP)
    store.add(drawn_texts([(3, 5)]))
    store.add(drawn_texts([(3, 5)]))
    last = tmp_path / "taught-00001.safetensors"
    whole = last.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"what is this?"):
        last.write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"taught-00001\.safetensors cannot be read.*remov"):
            TaughtStore(tmp_path, STAMP)
    last.unlink()
    assert len(TaughtStore(tmp_path, STAMP)) == 1


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "taught-00000.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(TrainingError, match="cannot be read"):
        TaughtStore(tmp_path, STAMP)


def test_what_an_interrupted_writing_left_is_ignored(tmp_path: Path) -> None:
    taught = drawn_texts([(3, 5), (2, 2)])
    TaughtStore(tmp_path, STAMP).add(taught[:1])
    (tmp_path / "taught-00001.partial").write_bytes(b"half")
    store = TaughtStore(tmp_path, STAMP)
    assert_holds(store, taught[:1])
    store.add(taught[1:])
    assert_holds(TaughtStore(tmp_path, STAMP), taught)
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_is_told_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = drawn_texts([(3, 5), (2, 2)])
    store = TaughtStore(tmp_path, STAMP)
    store.add(taught[:1])

    def full(_tensors: Any, path: Path, _metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(taught_store, "save_file", full)
        with pytest.raises(TrainingError, match=r"No space left on device.*make room there"):
            store.add(taught[1:])
    assert_holds(store, taught[:1])
    assert_holds(TaughtStore(tmp_path, STAMP), taught[:1])
    store.add(taught[1:])
    assert_holds(store, taught)


def test_a_place_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="cannot be written"):
        TaughtStore(tmp_path / "file" / "taught", STAMP)


def test_ctrl_c_waits_until_a_file_is_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Any = safe_open

    def interrupted(*given: Any, **named: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            return opened(*given, **named)
        except KeyboardInterrupt:
            raise ValueError("what a library makes of it") from None

    store = TaughtStore(tmp_path, STAMP)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts us may ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(taught_store, "safe_open", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.add(drawn_texts([(3, 5)]))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert_holds(TaughtStore(tmp_path, STAMP), drawn_texts([(3, 5)]))
