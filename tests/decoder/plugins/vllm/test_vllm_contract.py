"""The proposer as vLLM calls it, without vLLM."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from decoder.engines import contract as versions
from decoder.engines.engine_drafters import open_drafter
from decoder.engines.engine_options import resolve_settings
from decoder.errors import UncroppableCacheError
from decoder.plugins.vllm import hook_contract, proposer as adapter
from decoder.plugins.vllm.proposer import ForedraftProposer, is_read
from indexer.build import build_index
from indexer.tokenizer import vocabulary_of
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import SettingsError
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree, Source
from tests.indexer.engines.corpora import save_byte_tokenizer, write_corpus

LENGTH = 48
VOCABULARY = 100


def config(
    num_tokens: int = 4,
    rank: int = 0,
    length: int = LENGTH,
    vocabulary_size: int = VOCABULARY,
    **given: Any,
) -> Any:
    """The part of vLLM's configuration that a proposer reads; all drafts are worth verifying."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=length,
            get_vocab_size=lambda: vocabulary_size,
            is_hybrid=False,
            has_inner_state=False,
            is_attention_free=False,
        ),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, world_size=4, rank=rank, distributed_executor_backend="mp"
        ),
        additional_config={"foredraft": {"measure": False} | given},
    )


def opened(**options: Any) -> ForedraftProposer:
    proposer = ForedraftProposer(config(**options))
    proposer.load_model(object())
    return proposer


def with_tokenizer(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let vLLM be there as far as it gives the tokenizer of an engine."""
    for name in ("vllm", "vllm.tokenizers", "vllm.tokenizers.registry"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry: Any = sys.modules["vllm.tokenizers.registry"]
    registry.cached_tokenizer_from_config = lambda _: tokenizer


def with_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a service that never comes no longer than a moment."""
    wait = ResilientDrafter.wait
    monkeypatch.setattr(
        ResilientDrafter, "wait", lambda drafter, timeout_s: wait(drafter, min(timeout_s, 0.2))
    )


def propose(
    proposer: ForedraftProposer, rows: Sequence[Sequence[int]], new: Sequence[int]
) -> list[list[int]]:
    """Show rows as vLLM does: views of one table, in which drafts stand behind the tokens."""
    length = max(LENGTH, *map(len, rows), 0)
    table = np.full((len(rows) + 2, length), 99, np.int32)
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


def test_what_came_of_proposals_is_counted_by_source() -> None:
    proposer = opened(num_tokens=2)
    row = list(REPEATED)
    assert propose(proposer, [row], [1]) == [[8, 9]]
    row += [8, 9, 10]
    assert propose(proposer, [row], [3]) == [[11, 12]]
    row += [11, 20]
    propose(proposer, [row], [2])
    counted = proposer.statistics
    assert (counted.num_drafts, counted.num_drafted) == (2, 4)
    assert counted.accepted == {Source.CONTEXT: 3}
    assert counted.accepted_per_position() == [2, 1]
    assert proposer.statistics.num_drafts == 2  # nothing is counted twice


def test_proposals_end_before_what_the_model_cannot_embed(
    byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tokenizer(monkeypatch, byte_tokenizer)
    proposer = opened(vocabulary_size=9)
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
            assert proposer.propose([[1], []]) == [[], []]
        else:
            patched.setattr(EmbeddedDrafter, "draft", failing)
            assert propose(proposer, [REPEATED, REPEATED], [1, 0]) == [[], []]
            assert propose(proposer, [REPEATED], [1]) == [[]]
    assert len([record for record in caplog.records if "without drafts" in record.message]) == 1
    later_s = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    for _ in range(500):  # a drafter that failed is spared for some tenths of a second
        if propose(proposer, [REPEATED], [1])[0]:
            return
        time.sleep(0.02)
    pytest.fail("nothing is proposed any more")


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
    proposer = opened(num_tokens=500, length=1000, budget_nodes=256)
    row = [*range(5, 95)] * 4
    assert propose(proposer, [row], [1]) == [row[:128]]
    assert "at most 128 tokens" in caplog.text
    assert hook_contract.USUAL_MAX_TOKENS == 128


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
    with_tokenizer(monkeypatch, byte_tokenizer)
    proposer = opened(index=[index, tmp_path / "nowhere"])
    assert propose(proposer, [REPEATED], [1])[0]
    assert isinstance(proposer.drafter, EmbeddedDrafter)
    assert proposer.drafter.stats().indexes == ()
    assert proposer.drafter.vocabulary == vocabulary_of(byte_tokenizer)
    assert "another tokenizer" in caplog.text
    assert "nowhere" in caplog.text
    proposer.shut_down()


def test_a_server_that_is_away_from_the_start_costs_drafts_of_its_own_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_short_waits(monkeypatch)
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
    with pytest.raises(SettingsError, match="FOREDRAFT_BUDGET is not a setting"):
        resolve_settings({}, {"FOREDRAFT_BUDGET": "1"}, "here")


def test_outputs_are_kept_for_the_next_engine(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tokenizer(monkeypatch, byte_tokenizer)
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


class Runner:
    """What of vLLM's runner is read: requests by name, and which row is whose."""

    def __init__(self, **options: Any) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.drafter = ForedraftProposer(config(**options))
        self.load_model()

    def load_model(self) -> None:
        self.drafter.load_model(object())

    def show(
        self, rows: dict[str, Sequence[int]], new: Sequence[int], **carried: Any
    ) -> list[list[int]]:
        """Run a step of some requests; those that are named in `carried` state fields."""
        for name in rows:
            fields = {f"foredraft_{key}": value for key, value in carried.get(name, {}).items()}
            sampling = SimpleNamespace(extra_args=fields)
            self.requests.setdefault(name, SimpleNamespace(sampling_params=sampling))
        self.input_batch.req_ids = list(rows)
        return propose(self.drafter, list(rows.values()), new)


def test_the_runner_that_holds_a_proposer_is_found_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Runner()
    assert "fields of requests are ignored" not in caplog.text
    assert engine.show({"one": REPEATED}, [1], one={"drafts": False}) == [[]]
    assert engine.show({"two": REPEATED}, [1]) == [[8, 9, 10, 11]]
    opened()
    assert "no model runner of vLLM was found" in caplog.text


def test_outputs_are_drafted_from_as_soon_as_their_request_has_ended() -> None:
    engine = Runner()
    story = [1, 2, *range(40, 60)]
    for length in range(3, len(story) + 1):
        engine.show({"one": story[:length]}, [1])
    assert engine.show({"one": story, "two": [9, 42, 43]}, [0, 1])[1] == []
    del engine.requests["one"]
    assert engine.show({"two": [9, 42, 43, 44]}, [1]) == [[45, 46, 47, 48]]
    assert engine.drafter.sessions is not None
    assert len(engine.drafter.sessions) == 1


def test_a_preempted_request_goes_on_however_long_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened_prompts = []
    open_session = EmbeddedDrafter.open

    def noting(drafter: EmbeddedDrafter, name: str, prompt: TokenIds, *options: Any) -> None:
        opened_prompts.append(prompt.tolist())
        open_session(drafter, name, prompt, *options)

    monkeypatch.setattr(EmbeddedDrafter, "open", noting)
    engine = Runner()
    engine.show({"one": REPEATED}, [1])
    for length in range(3, 33):
        engine.show({"two": [20] * length}, [1])
    assert engine.show({"one": [*REPEATED, 8]}, [1]) == [[9, 10, 11, 12]]
    assert opened_prompts == [REPEATED[:-1], [20, 20]]
    assert engine.drafter.sessions is not None
    assert len(engine.drafter.sessions) == 2


def test_a_name_that_another_request_takes_is_another_sequence() -> None:
    engine = Runner(tenants=["a", "b"])
    story = [1, 2, *range(40, 60)]
    engine.show({"one": story}, [20], one={"tenant": "a"})
    del engine.requests["one"]
    longer = [*story, 60]
    assert engine.show({"one": longer}, [1], one={"tenant": "b", "remember": False}) == [[]]
    del engine.requests["one"]
    assert engine.show({"x": [9, 42, 43, 44]}, [1], x={"tenant": "b"}) == [[]]
    assert engine.show({"y": [9, 42, 43, 44]}, [1], y={"tenant": "a"}) == [[45, 46, 47, 48]]


@pytest.mark.parametrize("reason", ["service", "no runner"])
def test_nothing_is_drafted_where_tenants_could_not_be_told_apart(
    reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ResilientDrafter if reason == "service" else EmbeddedDrafter
    ended: list[Any] = []
    shut_down = kind.shut_down

    def noting(drafter: Any) -> None:
        ended.append(drafter)
        shut_down(drafter)

    made: list[Any] = []

    def noting_made(*given: Any) -> Any:
        made.append(open_drafter(*given))
        return made[-1]

    monkeypatch.setattr(kind, "shut_down", noting)
    monkeypatch.setattr(adapter, "open_drafter", noting_made)
    with_short_waits(monkeypatch)
    if reason == "service":
        proposer = Runner(tenants=["a"], server=["127.0.0.1:1"]).drafter
    else:
        proposer = opened(tenants=["a"])
    assert proposer.sessions is None
    assert propose(proposer, [REPEATED], [1]) == [[]]
    assert "vLLM runs without drafts: tenants:" in caplog.text
    assert len(made) == 1
    assert ended == made  # nothing is left running


class OtherHook:
    """A runner of a version that passes the number of tokens first, as vLLM's n-grams get it."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.speculative_config = SimpleNamespace(method="custom_class")
        self.drafter = ForedraftProposer(config())
        self.input_batch = SimpleNamespace(
            num_tokens_no_spec=np.array([len(REPEATED)], np.int32),
            token_ids_cpu=np.array([REPEATED], np.int32),
        )

    def load_model(self) -> None:
        self.drafter.load_model(object())

    def propose_draft_token_ids(self, sampled_token_ids: list[list[int]]) -> list[list[int]]:
        num_spec_tokens = 4
        if self.speculative_config.method == "custom_class":
            return self.drafter.propose(
                num_spec_tokens,
                sampled_token_ids,
                self.input_batch.num_tokens_no_spec,
                self.input_batch.token_ids_cpu,
                slot_mappings=None,
            )
        return []


def test_a_version_that_calls_the_hook_otherwise_is_refused_with_what_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = OtherHook()
    engine.load_model()
    assert engine.drafter.sessions is None
    assert (
        "it calls propose(num_spec_tokens, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, "
        "slot_mappings=), but this adapter takes propose(sampled_token_ids, num_tokens_no_spec, "
        "token_ids_cpu, ...)"
    ) in caplog.text
    assert engine.propose_draft_token_ids([[7]]) == [[]]


def hybrid(kind: str = "GDN_ATTN", mode: str = "none", **given: Any) -> Any:
    found = config(**given)
    found.model_config.is_hybrid = found.model_config.has_inner_state = True
    found.cache_config.mamba_cache_mode = mode
    layer = SimpleNamespace(mamba_type=SimpleNamespace(name=kind))
    found.compilation_config.static_forward_context = {"0": layer, "1": SimpleNamespace()}
    return found


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (hybrid(), "leave out speculative_config, or set always_propose"),
        (hybrid("MAMBA2", always_propose=True), "layers of MAMBA2"),
        (hybrid(mode="align", always_propose=True), "only tested with mamba_cache_mode 'none'"),
    ],
)
def test_a_model_with_a_recurrent_state_is_refused_at_the_start(model: Any, message: str) -> None:
    with pytest.raises(UncroppableCacheError, match=message):
        ForedraftProposer(model).load_model(object())


def test_a_model_of_which_that_cannot_be_told_is_refused() -> None:
    unknown = config()
    del unknown.model_config.is_hybrid
    with pytest.raises(UncroppableCacheError, match="cannot determine whether"):
        ForedraftProposer(unknown).load_model(object())


def test_proposals_for_gated_delta_nets_all_have_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposer = ForedraftProposer(hybrid(always_propose=True))
    proposer.load_model(object())
    chains = propose(proposer, [REPEATED, [5, 6], [20, 21]], [1, 0, 1])
    assert chains == [[8, 9, 10, 11], [], [0, 0, 0, 0]]
    monkeypatch.setattr(EmbeddedDrafter, "draft", lambda *_: [])
    assert propose(proposer, [REPEATED, [5, 6]], [1, 0]) == [[0, 0, 0, 0], []]
    assert propose(proposer, [REPEATED], [1]) == [[0, 0, 0, 0]]
    nothing: Any = None
    assert proposer.propose([[1], []], nothing, nothing) == [[0, 0, 0, 0], []]


class Clock:
    """Passes of known cost: each call of the proposer comes when the pass before it is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)


def written(kind: str, seed: int) -> list[int]:
    """Return a text that repeats itself, one of which each third token is new, or noise."""
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return [11, *rng.integers(20, 24, 1023).tolist()]
    text = [11, 12, 13, 14, 15, 16, 17, 18, 19] * 114
    if kind == "turns":
        text[2::3] = rng.integers(20, 90, len(text[2::3])).tolist()
    return text


@pytest.mark.parametrize(
    ("kind", "token_s", "times_plain", "most"),
    [
        ("copies", 0.0005, 2.0, 4.0),
        ("copies", 0.008, 1.2, 4.0),
        ("turns", 0.0005, 1.1, 4.0),
        ("turns", 0.02, 0.97, 4.0),
        ("noise", 0.02, 0.97, 0.1),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 4])
def test_as_much_is_proposed_as_pays_by_the_cost_of_the_passes_that_come(  # noqa: PLR0913, PLR0917
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    token_s: float,
    times_plain: float,
    most: float,
    num_rows: int,
) -> None:
    clock = Clock(monkeypatch)
    engine = Runner(measure=True, length=1 << 20)
    texts = [written(kind, seed) for seed in range(num_rows)]
    lengths = np.full(num_rows, 20, np.int32)
    table = np.array(texts, np.int32)
    states = [SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)) for _ in texts]
    engine.requests = {str(at): state for at, state in enumerate(states)}
    engine.input_batch.req_ids = list(engine.requests)
    new = [1] * num_rows
    num_proposed, num_tokens, late_s = 0, 0, 0.0
    for step in range(160):
        sampled = [
            text[length - num : length]
            for text, length, num in zip(texts, lengths.tolist(), new, strict=True)
        ]
        chains = engine.drafter.propose(sampled, lengths, table)
        pass_s = 0.02 + token_s * (num_rows + sum(map(len, chains)))
        clock.now_s += pass_s
        for slot, (text, chain) in enumerate(zip(texts, chains, strict=True)):
            rest = text[lengths[slot] :]
            right = [token == true for token, true in zip(chain, rest, strict=False)]
            new[slot] = 1 + (right.index(False) if False in right else len(right))
            lengths[slot] += new[slot]
        if step >= 80:
            num_proposed += sum(map(len, chains))
            num_tokens += sum(new)
            late_s += pass_s
    plain_s = (0.02 + token_s * num_rows) / num_rows
    assert num_tokens * plain_s / late_s >= times_plain
    assert num_proposed / (80 * num_rows) <= most
