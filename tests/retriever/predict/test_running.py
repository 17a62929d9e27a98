"""Sequences that run at once draft from one another, within their group and then their tenant."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever.drafter import DraftRequest, SequenceOptions, TokenIds
from retriever.errors import InvalidRequestError
from retriever.kernels.chains import FADING, LEAST_FADED
from retriever.kernels.entries import append_to_lane, move_lanes, withdraw_lane
from retriever.kernels.layout import LANE_BLOCK, MAX_MATCH, Scratch
from retriever.limits import Limits
from retriever.plugins.admin.administration import Administration
from retriever.predict.context import Context
from retriever.predict.draft import Predictor
from retriever.predict.pool import Pool
from retriever.predict.running import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    RUNNING_LIMITS,
    RunningOutput,
    RunningOutputs,
    group_number,
    lane_fields,
    running_bytes,
)
from retriever.sequences import SessionKey, checked_options
from retriever.sessions.cold_start import warm_rare
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.sessions.session_table import CheckedRequest
from retriever.tree import DraftTree, Source
from tests.retriever.kernels.stages import collect_running
from tests.retriever.kernels.twins.lane_twin import LaneTwin, RunningTwin
from tests.retriever.open_sessions import WatchedDrafter
from tests.retriever.token_ids import ids
from tests.suite_parts import cases

PROMPT = np.array([2000, 2001, 2002], np.int32)
DEPTH = 12


class Talk:
    """Sequences that are decoded side by side."""

    def __init__(self, drafter: EmbeddedDrafter) -> None:
        self.drafter = drafter
        self.lengths: dict[str, int] = {}

    def open(self, name: str, prompt: TokenIds = PROMPT, **options: object) -> None:
        self.drafter.open(name, prompt, SequenceOptions(**options))  # type: ignore[arg-type]
        self.lengths[name] = len(prompt)

    def step(self, name: str, new: Sequence[int] = (), nodes: int = 32) -> DraftTree:
        self.lengths[name] += len(new)
        request = DraftRequest(name, ids(*new), self.lengths[name], nodes)
        return self.drafter.draft([request])[0]


def holds(tree: DraftTree, tokens: Sequence[int]) -> bool:
    """Whether a tree goes on with these tokens from its root."""
    return len(tree.follow(ids(*tokens))) == len(tokens)


def tokens_held(pool: Pool) -> set[int]:
    """The tokens that are in the memory of running outputs."""
    return set() if pool.running is None else set(pool.running.tokens.tolist()) - {-1}


def test_what_one_commits_serves_its_group_in_the_next_step() -> None:
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g")
    talk.open("b", group="g")
    assert len(talk.step("a")) == len(talk.step("b")) == 0
    talk.step("a", [7, 8, 9, 10])
    tree = talk.step("b")
    assert holds(tree, [7, 8, 9, 10])
    assert set(tree.sources.tolist()) == {Source.SIBLINGS}
    talk.step("a", [11, 12])
    assert holds(talk.step("b", [7, 8]), [9, 10, 11, 12])
    assert Source.SIBLINGS not in talk.step("a").sources  # nobody drafts from oneself so


def test_groups_serve_the_rest_of_the_tenant_once_a_block_is_full() -> None:
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g")
    talk.open("kin", group="g")
    talk.open("other", group="h")
    talk.open("alone")
    output = list(range(100, 100 + 3 * LANE_BLOCK))
    for place, token in enumerate(output[: 2 * LANE_BLOCK]):
        talk.step("a", [token])
        seen = [holds(talk.step(name), output[:1]) for name in ("kin", "other", "alone")]
        # The lane begins with the end of the prompt.
        is_full = len(PROMPT) + place + 1 >= LANE_BLOCK
        assert seen == [True, is_full, is_full], place
    bare = talk.drafter.draft_context(PROMPT, 8)
    assert holds(bare, output[:2])


def test_a_sequence_to_forget_serves_its_group_alone() -> None:
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g", remember=False)
    talk.open("kin", group="g")
    talk.open("other", group="h")
    talk.step("a", list(range(100, 100 + 4 * LANE_BLOCK)))
    assert holds(talk.step("kin"), [100, 101])
    assert len(talk.step("other")) == 0
    talk.drafter.close("a", ids(5))
    assert len(talk.step("kin")) == 0
    assert tokens_held(talk.drafter.state.pool("")) <= {*PROMPT.tolist()}


def test_groups_of_one_name_do_not_cross_tenants() -> None:
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g", tenant="one")
    talk.open("b", group="g", tenant="two")
    talk.open("c", tenant="two")
    talk.step("a", list(range(100, 100 + 4 * LANE_BLOCK)))
    assert len(talk.step("b")) == len(talk.step("c")) == 0
    assert talk.drafter.draft_context(PROMPT, 8, tenant="two").token_ids.size == 0


@pytest.mark.parametrize("ends", ["discarded", "idle", "deleted", "forgotten"])
def test_a_lane_that_dies_leaves_nothing(ends: str) -> None:
    drafter = WatchedDrafter(limits=Limits(idle_session_s=3600.0))
    talk, empty = Talk(drafter), drafter.state.census().reserved_bytes
    talk.open("a", group="g")
    talk.open("kin", group="g", remember=False)
    talk.step("a", list(range(100, 200)))
    talk.step("kin", [1])
    key = SessionKey("", "a")
    session = drafter.session("a")
    if ends == "discarded":
        ServiceFace(drafter.state).discard([(key, session)])
    elif ends == "idle":
        session.last_used_s -= 7200.0
        ServiceFace(drafter.state).end_idle()
    elif ends == "deleted":
        drafter.delete(session=key.name)
    else:
        drafter.close("a", remember=False)
    assert len(drafter.state.sessions) == 1
    assert not tokens_held(drafter.state.pool("")) & set(range(100, 200))
    assert len(talk.step("kin", [100, 101, 102])) == 0
    drafter.close("kin")
    del session
    assert drafter.state.pool("").running is None
    assert drafter.state.census().reserved_bytes == empty


def test_an_output_is_a_generation_once_its_sequence_is_closed() -> None:
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g")
    talk.open("kin", group="g")
    talk.step("a", list(range(100, 120)))
    talk.drafter.close("a", ids(120, 121))
    tree = talk.step("kin", [100, 101, 102, 103])
    assert holds(tree, range(104, 122))
    assert set(tree.sources[:4].tolist()) == {Source.GENERATIONS}


def test_deleting_a_tenant_takes_what_runs_too() -> None:
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g")
    talk.open("kin", group="g")
    talk.step("a", list(range(100, 200)))
    talk.drafter.delete("")
    assert not tokens_held(talk.drafter.state.pool(""))
    assert len(talk.step("kin", [100, 101, 102])) == 0
    talk.step("a", list(range(300, 400)))  # which goes on, and serves its group alone
    assert tokens_held(talk.drafter.state.pool("")) >= set(range(300, 400))
    assert not tokens_held(talk.drafter.state.pool("")) & set(range(103, 200))
    talk.open("other")
    assert holds(talk.step("kin", [300, 301]), [302, 303])
    assert len(talk.step("other", [300, 301, 302, 303])) == 0


def test_a_long_commit_is_noted_afterwards() -> None:
    """It is written without the lock, while others may read the ring."""
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g")
    talk.open("kin", group="g")
    new = np.arange(100_000, 150_000, dtype=np.int32)
    request = DraftRequest("a", new, len(PROMPT) + len(new), 8)
    (commit,) = ServiceFace(talk.drafter.state).commit_each([request], "")
    assert isinstance(commit, CheckedRequest)
    assert commit.session.is_committing
    assert len(talk.step("kin")) == 0
    ServiceFace(talk.drafter.state).commit_long(commit)
    talk.lengths["a"] = request.length
    talk.step("a", [1, 2, 3])
    assert holds(talk.step("kin", [149_990, 149_991]), [149_992, 149_993])
    assert holds(talk.step("kin", [149_998, 149_999]), [1, 2, 3])


def test_a_group_of_thousands_stays_within_its_memory() -> None:
    limits = Limits(max_sessions=20_000, max_tenant_sessions=20_000)
    drafter = EmbeddedDrafter(limits=limits)
    talk, empty = Talk(drafter), drafter.state.census().reserved_bytes
    number = cases(2500, of=10_000)
    tokens_each = 60_000 // number
    for each in range(number):
        talk.open(f"s{each}", PROMPT, group="g", remember=False)
    before = drafter.state.census().reserved_bytes
    for each in range(number):
        talk.step(f"s{each}", [each % 50, *range(1000 + each, 1000 + each + tokens_each)], nodes=0)
    running = drafter.state.pool("").running
    assert running is not None
    assert running.num_bytes == running_bytes(len(running.tokens))
    assert len(running.tokens) <= MOST_TOKENS
    assert drafter.state.census().reserved_bytes - before <= 2 * running_bytes(MOST_TOKENS)
    began = time.perf_counter()
    for each in range(200):
        talk.step(f"s{each}", [7])
    assert (time.perf_counter() - began) / 200 < 0.02  # it was far less with one
    for each in range(number):
        drafter.close(f"s{each}")
    del running
    assert drafter.state.pool("").running is None
    assert drafter.state.census().reserved_bytes == empty


def test_rare_kernels_of_groups_are_all_that_groups_need() -> None:
    kernels = (append_to_lane, move_lanes, withdraw_lane)
    warm_rare()
    known = [len(each.signatures) for each in kernels]
    assert all(known)
    talk = Talk(EmbeddedDrafter())
    talk.open("a", group="g")
    talk.step("a", [1] * FEWEST_TOKENS)
    talk.drafter.close("a")
    assert [len(each.signatures) for each in kernels] == known


@pytest.mark.parametrize("beyond", [-1, 1 << 20])
def test_where_there_is_no_room_sequences_run_as_without_a_group(beyond: int) -> None:
    drafter = EmbeddedDrafter()
    talk, room = Talk(drafter), running_bytes(FEWEST_TOKENS) + beyond
    Administration(drafter.state).change_limits({"max_tenant_bytes": room})
    talk.open("a", group="g")
    talk.step("a", list(range(100, 110)))
    assert (drafter.state.pool("").running is None) == (beyond < 0)


def test_an_older_version_counts_less_and_can_be_dropped() -> None:
    drafter = EmbeddedDrafter()
    talk = Talk(drafter)
    for version, last in ((1, 30), (2, 40)):
        talk.open("w", policy_version=version)
        drafter.close("w", ids(1, 2, 3, 4, 5, 6, 7, 8, last))
    context = [1, 2, 3, 4, 5, 6, 7, 8]

    def shares(**kin: Any) -> dict[int, float]:
        talk.open("s", ids(*context), remember=False, **kin)
        tree = talk.step("s")
        drafter.close("s")
        roots = tree.parents == -1
        return dict(zip(tree.token_ids[roots].tolist(), tree.probabilities[roots], strict=True))

    full, now, back = shares(), shares(policy_version=2), shares(policy_version=1)
    assert now[40] / now[30] > full[40] / full[30]
    assert back[30] / back[40] > full[30] / full[40]  # versions may go backwards
    assert 30 not in shares(policy_version=2, oldest_version=2)
    assert set(shares(policy_version=9, oldest_version=1)) >= {30, 40}
    assert not shares(policy_version=9, oldest_version=3)


def test_evidence_fades_at_the_stated_rate() -> None:
    assert (FADING, LEAST_FADED) == (0.5, 0.125)
    drafter = WatchedDrafter()
    predictor = drafter.predictor
    talk = Talk(drafter)
    for version in (0, 5, 3, 4):
        talk.open("w", policy_version=version or None)
        drafter.close("w", ids(1, 2, 3, 4, 5, 6, 7, 8, 100 + version, 9))
    talk.open("s", ids(1, 2, 3, 4, 5, 6, 7, 8), policy_version=5)
    talk.step("s")
    rows = predictor.scratch.rows[: predictor.num_rows]
    continuations = predictor.scratch.continuations
    of_first = {
        int(continuations[place, 0]): float(row["count"])
        for place, row in enumerate(rows)
        if row["source"] == Source.GENERATIONS and row["match"] == 8
    }
    assert of_first == {100: 0.125, 103: 0.25, 104: 0.5, 105: 1.0}


def test_versions_survive_the_ring_and_a_deletion() -> None:
    drafter = EmbeddedDrafter(limits=Limits(generations_tokens=1024))
    generations = drafter.state.pool("").generations
    for version in range(1, 400):
        drafter.open(f"w{version}", ids(), SequenceOptions(policy_version=version))
        drafter.close(f"w{version}", np.arange(version, version + 19, dtype=np.int32))
    versions = [each.version for each in generations.outputs()]
    assert versions == list(range(versions[0], 400))
    assert len(generations.versions) < 400
    drafter.delete(session="w390")
    kept = generations.outputs()
    assert [each.version for each in kept] == [each for each in versions if each != 390]
    for output in kept:
        assert int(output.tokens[-1]) == output.version + 18


def test_versions_are_kept_on_disk(tmp_path: Path) -> None:
    first = EmbeddedDrafter(state=tmp_path)
    for number, version in enumerate((None, 7, 1 << 40)):
        first.open("w", ids(), SequenceOptions(policy_version=version))
        first.close("w", ids(1, 2, 3, number))
    first.shut_down()
    again = EmbeddedDrafter(state=tmp_path)
    outputs = again.state.pool("").generations.outputs()
    assert [(each.tokens.tolist()[3], each.version) for each in outputs] == [
        (0, 0),
        (1, 7),
        (2, 1 << 40),
    ]
    again.shut_down()


@pytest.mark.parametrize(
    "kin",
    [
        {"group": "g" * 257},
        {"group": "\ud800"},
        {"group": 7},
        {"policy_version": -1},
        {"policy_version": 1 << 62},
        {"policy_version": 1.5},
        {"policy_version": True},
        {"oldest_version": 3},
        {"policy_version": 3, "oldest_version": -3},
    ],
)
def test_what_is_no_group_or_version_is_refused(kin: dict[str, object]) -> None:
    drafter = EmbeddedDrafter()
    with pytest.raises(InvalidRequestError):
        checked_options(SequenceOptions(**kin))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        drafter.open("s", PROMPT, SequenceOptions(**kin))  # type: ignore[arg-type]
    assert len(drafter.state.sessions) == 0


class Sides:
    """Running outputs and their twin, told the same."""

    def __init__(self, rng: np.random.Generator, most_tokens: int = MOST_TOKENS) -> None:
        self.rng = rng
        self.running = RunningOutputs(most_tokens=most_tokens)
        num_heads = len(self.running.tokens) // 2
        self.twin = RunningTwin(RUNNING_LIMITS.orders, RUNNING_LIMITS.max_rows, num_heads)
        self.contexts: list[Context] = []
        self.outputs: list[RunningOutput] = []
        self.scratch = Scratch(DEPTH)

    def some(self, most: int) -> list[int]:
        return [int(each) for each in self.rng.integers(0, 5, self.rng.integers(1, most))]

    def begin(self) -> None:
        prompt, group = self.some(20), f"g{self.rng.integers(3)}"
        kin = SequenceOptions(group=group, policy_version=int(self.rng.integers(-1, 4)))
        kin = kin if kin.policy_version != -1 else SequenceOptions(group=group)
        is_shared = bool(self.rng.random() < 0.7)
        context = Context(ids(*prompt))
        fields = lane_fields(kin, self.running.join(), is_shared=is_shared)
        self.outputs.append(RunningOutput(self.running, fields, context, len(prompt)))
        self.contexts.append(context)
        version = -1 if kin.policy_version is None else kin.policy_version
        begin = max(0, len(prompt) - 8)
        twin = LaneTwin(group_number(group), is_shared, version, prompt, begin, len(prompt))
        self.twin.lanes.append(twin)

    def commit(self, number: int) -> None:
        tokens = self.some(12)
        self.contexts[number].commit(ids(*tokens))
        self.outputs[number].commit(ids(*tokens))
        self.twin.commit(number, tokens)

    def end(self, number: int) -> None:
        self.outputs[number].leave()
        self.twin.lanes[number].is_over = True

    def check(self, number: int) -> None:
        scratch = self.scratch
        query = self.contexts[number].last(MAX_MATCH)
        end = collect_running(
            self.running.packed, self.outputs[number].address, 7, query, DEPTH, scratch.packed, 0
        )
        found = [
            (
                tuple(scratch.continuations[row, : each["length"]].tolist()),
                each["match"],
                each["count"],
            )
            for row, each in enumerate(scratch.rows[:end])
        ]
        expected = self.twin.rows(self.twin.lanes[number], query.tolist(), DEPTH)
        assert found == [(each.continuation, each.match, each.count) for each in expected]


@pytest.mark.seeds
def test_evidence_of_siblings_is_what_a_plain_search_finds() -> None:
    for seed in range(cases(8, of=600)):
        search_among_siblings(np.random.default_rng(seed))


def search_among_siblings(rng: np.random.Generator) -> None:
    sides = Sides(rng)
    for _ in range(60):
        running = [n for n, each in enumerate(sides.twin.lanes) if not each.is_over]
        if len(running) < 2 or rng.random() < 0.1:
            sides.begin()
        elif rng.random() < 0.05:
            sides.end(int(rng.choice(running)))
        else:
            number = int(rng.choice(running))
            sides.commit(number)
            sides.check(number)


def test_a_ring_that_grows_keeps_what_it_has() -> None:
    """After that the order of places differs, so all are compared as a set of the longest."""
    rng = np.random.default_rng(5)
    running = RunningOutputs()
    texts = [rng.integers(0, 5000, 600).astype(np.int32) for _ in range(12)]
    lanes = []
    for text in texts:
        context = Context(text[:5])
        output = RunningOutput(
            running,
            lane_fields(SequenceOptions(group="g"), running.join(), is_shared=True),
            context,
            5,
        )
        lanes.append((context, output))
    sizes = set()
    for begin in range(5, 600, 5):
        for text, (context, output) in zip(texts, lanes, strict=True):
            context.commit(text[begin : begin + 5])
            output.commit(text[begin : begin + 5])
        sizes.add(len(running.tokens))
    assert len(sizes) > 1
    reader = RunningOutput(None, lane_fields(SequenceOptions(group="g"), 10**6))
    for text in texts:
        for place in (20, 300, 590):
            scratch = Scratch(DEPTH)
            end = collect_running(
                running.packed,
                reader.address,
                7,
                text[place - 10 : place],
                DEPTH,
                scratch.packed,
                0,
            )
            assert end > 0
            row = scratch.rows[0]
            assert row["match"] == 10
            follows = text[place : place + DEPTH]
            assert scratch.continuations[0, : row["length"]].tolist() == follows.tolist()


@pytest.mark.parametrize("seed", range(cases(2, of=60)))
def test_a_full_ring_overwrites_the_oldest_and_invents_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sides = Sides(rng, most_tokens=64 * LANE_BLOCK)
    for _ in range(300):
        running = [n for n, each in enumerate(sides.twin.lanes) if not each.is_over]
        if len(running) < 20:
            sides.begin()
        elif rng.random() < 0.05:
            sides.end(int(rng.choice(running)))
        number = int(rng.choice([n for n, e in enumerate(sides.twin.lanes) if not e.is_over]))
        sides.commit(number)
        scratch, asking = sides.scratch, sides.twin.lanes[number]
        query = sides.contexts[number].last(MAX_MATCH)
        address = sides.outputs[number].address
        end = collect_running(sides.running.packed, address, 7, query, DEPTH, scratch.packed, 0)
        for row, each in enumerate(scratch.rows[:end]):
            wanted = query.tolist()[-each["match"] :]
            wanted += scratch.continuations[row, : each["length"]].tolist()
            assert any(
                not lane.is_over
                and lane is not asking
                and (lane.group == asking.group or lane.is_shared)
                and _occurs(wanted, lane.tokens)
                for lane in sides.twin.lanes
            )
        assert len(sides.running.tokens) <= 64 * LANE_BLOCK


def _occurs(part: list[int], whole: list[int]) -> bool:
    return bytes(part) in bytes(whole)  # of tokens below 256


def test_a_step_over_threads_drafts_the_same() -> None:
    trees = []
    for threads in (1, 3):
        drafter = EmbeddedDrafter(predictor=Predictor(32, num_threads=threads))
        rng = np.random.default_rng(1)
        text = rng.integers(0, 50, 400).astype(np.int32)
        for number in range(16):
            drafter.open(f"s{number}", PROMPT, SequenceOptions(group="g" if number % 2 else ""))
        drawn = []
        for begin in range(0, 40, 4):
            drawn += drafter.draft(
                [
                    DraftRequest(f"s{n}", text[9 * n : 9 * n + begin][-4:], len(PROMPT) + begin, 16)
                    for n in range(16)
                ]
            )
        trees.append([(t.token_ids.tolist(), t.probabilities.tolist()) for t in drawn])
    assert trees[0] == trees[1]
    assert any(tokens for tokens, _ in trees[0])
