"""The proposer as vLLM calls it, without vLLM."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from decoder.engines import engine_options as versions
from decoder.engines import vllm as adapter
from decoder.engines.engine_options import resolve_settings
from decoder.engines.vllm import ForedraftProposer, is_read
from indexer.build import build_index
from indexer.tokenizer import vocabulary_of
from retriever.drafter import DraftRequest
from retriever.errors import SettingsError
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.indexer.engines.corpora import save_byte_tokenizer, write_corpus

LENGTH = 48
VOCABULARY = 100


def config(num_tokens: int = 4, rank: int = 0, **given: Any) -> Any:
    """The part of vLLM's configuration that a proposer reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=LENGTH, get_vocab_size=lambda: VOCABULARY),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, world_size=4, rank=rank, distributed_executor_backend="mp"
        ),
        additional_config={"foredraft": given},
    )


def opened(**options: Any) -> ForedraftProposer:
    proposer = ForedraftProposer(config(**options))
    proposer.load_model(object())
    return proposer


def propose(
    proposer: ForedraftProposer, rows: Sequence[Sequence[int]], new: Sequence[int]
) -> list[list[int]]:
    """Show rows as vLLM does: views of one table, in which drafts stand behind the tokens."""
    table = np.full((len(rows) + 2, LENGTH), 99, np.int32)
    lengths = np.zeros(len(rows) + 2, np.int32)
    for slot, row in enumerate(rows):
        table[slot, : len(row)] = row
        lengths[slot] = len(row)
    sampled = [list(row[len(row) - num :]) for row, num in zip(rows, new, strict=True)]
    return proposer.propose(sampled, lengths, table, slot_mappings=None)


REPEATED = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7]


def test_chains_go_on_and_are_clamped() -> None:
    proposer = opened(num_tokens=4)
    reading, fresh = [5, 6, 7, 5, 6], [20, 21, 22]
    chains = propose(proposer, [REPEATED, reading, fresh], [1, 0, 1])
    assert chains[0] == [8, 9, 10, 11]
    assert chains[1] == []  # its prompt is not read to the end
    long = [*range(30, 40), *[1] * (LENGTH - 16), 30, 31, 32]
    assert len(long) == LENGTH - 3
    assert propose(proposer, [long], [1]) == [[33, 34]]
    assert propose(proposer, [[*long, 33, 34]], [2]) == [[]]


def test_proposals_end_before_what_the_model_cannot_embed() -> None:
    proposer = opened()
    proposer._vocabulary_size = 9
    assert propose(proposer, [REPEATED], [1]) == [[8]]


@pytest.mark.parametrize("fault", ["raises", "too few trees", "no table"])
def test_nothing_is_raised(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = opened()

    def failing(_drafter: EmbeddedDrafter, _requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if fault == "raises":
            raise ZeroDivisionError
        return []

    with monkeypatch.context() as patched:
        if fault == "no table":
            nothing: Any = None
            assert proposer.propose([[1], []], nothing, nothing) == [[], []]
        else:
            patched.setattr(EmbeddedDrafter, "draft", failing)
            assert propose(proposer, [REPEATED, REPEATED], [1, 0]) == [[], []]
            assert propose(proposer, [REPEATED], [1]) == [[]]
    assert len([record for record in caplog.records if "goes on without" in record.message]) == 1
    monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
    proposer.sessions = proposer.sessions and type(proposer.sessions)(proposer._drafter)
    assert propose(proposer, [REPEATED], [1])[0]


@pytest.mark.parametrize(
    ("rank", "backend", "expected"),
    [(0, "mp", True), (1, "mp", False), (2, "mp", True), (0, "external_launcher", False)],
)
def test_one_rank_of_a_stage_drafts(rank: int, backend: str, expected: bool) -> None:  # noqa: FBT001
    parallel = config(rank=rank).parallel_config
    parallel.distributed_executor_backend = backend
    assert is_read(parallel) is expected


def test_other_ranks_open_nothing() -> None:
    proposer = opened(rank=1)
    assert proposer.sessions is None
    assert propose(proposer, [REPEATED], [1]) == [[]]


def test_more_tokens_than_vllm_verifies_are_not_proposed(caplog: pytest.LogCaptureFixture) -> None:
    assert ForedraftProposer(config(num_tokens=500))._max_tokens == adapter.MAX_TOKENS
    assert "at most 128 tokens" in caplog.text


def test_another_version_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "0.99.0")
    for _ in range(2):
        assert propose(opened(), [REPEATED], [1])[0]
    told = [record.message for record in caplog.records if "0.99.0" in record.message]
    assert len(told) == 1
    assert adapter.TESTED in told[0]


def test_an_index_of_another_tokenizer_is_left_out(
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1, 50)
    index = tmp_path / "index"
    build_index([corpus], index, str(save_byte_tokenizer(tmp_path / "tokenizer")))
    monkeypatch.setattr(adapter, "_tokenizer", lambda _: byte_tokenizer)
    proposer = opened(index=[index, tmp_path / "nowhere"])
    assert propose(proposer, [REPEATED], [1])[0]
    assert isinstance(proposer._drafter, EmbeddedDrafter)
    assert proposer._drafter.indexes == ()
    assert proposer._drafter.vocabulary == vocabulary_of(byte_tokenizer)
    assert "another tokenizer" in caplog.text
    assert "nowhere" in caplog.text
    proposer.shut_down()


def test_a_server_that_is_away_from_the_start_costs_drafts_of_its_own_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = opened(server=["127.0.0.1:1"])
    assert propose(proposer, [REPEATED], [1])[0] == [8, 9, 10, 11]
    assert "cannot be reached" in caplog.text
    proposer.shut_down()


@pytest.mark.parametrize("wrong", [{"indices": []}, {"budget_nodes": "many"}, {"deadline_s": -1}])
def test_a_wrong_setting_costs_drafts_and_is_named(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    proposer = opened(**wrong)
    assert propose(proposer, [REPEATED], [1]) == [[]]
    assert f"foredraft: {next(iter(wrong))}" in caplog.text


def test_settings_come_from_engine_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    file.write_text('index = ["a"]\nbudget_nodes = 8\ndeadline_s = 0.5\n')
    environment = {
        "FOREDRAFT_CONFIG": str(file),
        "FOREDRAFT_BUDGET_NODES": "16",
        "FOREDRAFT_INDEX": "b:c",
        "FOREDRAFT_ADDRESS": "127.0.0.1:7777",  # of a service on the same machine
        "PATH": "",
    }
    settings = resolve_settings({"index": ["d"]}, environment, "here")
    assert settings.index == [Path("d")]
    assert (settings.budget_nodes, settings.deadline_s) == (16, 0.5)
    with pytest.raises(SettingsError, match="FOREDRAFT_BUDGET is no setting"):
        resolve_settings({}, {"FOREDRAFT_BUDGET": "1"}, "here")


def test_outputs_are_kept_for_the_next_engine(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_tokenizer", lambda _: byte_tokenizer)
    first = opened(state=tmp_path / "state")
    second = opened(state=tmp_path / "state")  # in use: drafts, but keeps nothing
    row = [1, 2, 3]
    for token in range(40, 60):
        row.append(token)
        propose(first, [row], [1])
        assert len(propose(second, [row], [1])) == 1
    first.shut_down()
    second.shut_down()
    third = opened(state=tmp_path / "state")
    propose(third, [[9, 42, 43, 44]], [1])
    assert propose(third, [[9, 42, 43, 44, 45]], [1]) == [[46, 47, 48, 49]]
    third.shut_down()


def test_a_running_engine_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        proposer = opened()
        for length in range(2, 20):
            propose(proposer, [[1] * length], [1])
        proposer.shut_down()
    assert not caplog.records
