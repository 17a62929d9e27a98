"""The harness that replays programs in turns, its report, and how programs are built."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.build_programs import (
    PROGRAMS,
    Program,
    ProgramError,
    compile_library,
    compiler,
    programs_folder,
)
from benchmarks.peers.contestants import SLOW, Absent, contenders
from benchmarks.peers.in_turns import Tally, TooManyNodesError, Turns, replay_in_turns
from benchmarks.peers.peer import Contender, Kind, drafted, path_of
from benchmarks.peers.peer_report import PeerReport, Row, Times
from benchmarks.peers.programs import (
    ArcticPeer,
    TransformersPeer,
    quickest_of_the_best,
)
from benchmarks.workloads import Workload
from decoder.contenders.prompt_lookup import PromptLookup
from decoder.contenders.suffix_decoding import Settings
from retriever.drafter import DraftRequest, TokenIds
from retriever.replay.traces import Trace
from retriever.tree import DraftTree
from tests.benchmarks.drafting import ids

ROOT = Path(__file__).parents[3]


class Knowing:
    """Drafts the next `width` tokens of what it knows; notes each call with its name."""

    def __init__(self, name: str, output: list[int], width: int, calls: list[str]) -> None:
        self.name, self.output, self.width, self.calls = name, output, width, calls
        self.seen: list[int] = []

    def open(self, prompt: TokenIds, room: int) -> None:
        self.prompt, self.room, self.seen = prompt.tolist(), room, []

    def propose(self, new_tokens: TokenIds, budget: int) -> list[int]:  # noqa: ARG002
        self.calls.append(self.name)
        self.seen += new_tokens.tolist()
        return self.output[len(self.seen) :][: self.width]

    def tree(self, proposed: list[int]) -> DraftTree:
        return path_of(ids(*proposed))

    def close(self, new_tokens: TokenIds) -> None:
        self.seen += new_tokens.tolist()


OUTPUT = [5, 6, 7, 8, 9, 10]
TRACE = Trace(ids(1, 2), ids(*OUTPUT))


@pytest.mark.parametrize("turns", Turns)
def test_each_drafter_is_told_the_whole_output_and_counted_alone(turns: Turns) -> None:
    peers = {w: Knowing(w, OUTPUT, int(w), []) for w in "012"}
    tallies = replay_in_turns(peers, [TRACE, TRACE], 2, turns)
    assert {name: tally.tokens_per_step for name, tally in tallies.items()} == {
        "0": 1.0,
        "1": 2.0,
        "2": 3.0,
    }
    for name, peer in peers.items():
        assert peer.seen == OUTPUT
        assert (peer.prompt, peer.room) == ([1, 2], len(OUTPUT))
        assert tallies[name].tokens == 12
        # the last token of an output is never drafted for nothing: the tree ends with it
        assert len(tallies[name].draft_us) == tallies[name].steps
        assert len(tallies[name].open_us) == len(tallies[name].close_us) == 2
        assert tallies[name].parts == [0, tallies[name].steps // 2]


def test_turns_change_after_each_step_or_each_trace() -> None:
    calls: list[str] = []
    peers = {name: Knowing(name, OUTPUT, 0, calls) for name in ("a", "b", "c")}
    replay_in_turns(peers, [TRACE], 2, Turns.STEP)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * len(OUTPUT)
    assert len(set(map(tuple, rounds))) > 1  # none always comes after the same other
    calls.clear()
    replay_in_turns(peers, [TRACE], 2, Turns.TRACE)
    changes = sum(a != b for a, b in pairwise(calls))
    assert changes == 2


def test_more_nodes_than_asked_for_are_refused() -> None:
    with pytest.raises(TooManyNodesError, match="3 nodes where 2"):
        replay_in_turns({"a": Knowing("a", OUTPUT, 3, [])}, [TRACE], 2, Turns.STEP)


def test_medians_are_taken_in_fifths_of_the_traces() -> None:
    tally = Tally(draft_us=[1, 1, 2, 2, 3, 3, 4, 4, 5, 9], parts=[0, 2, 4, 6, 8])
    assert tally.medians() == [1, 2, 3, 4, 7]
    assert Tally(draft_us=[1, 3], parts=[0]).medians() == [2]


def test_of_settings_that_are_level_the_quickest_is_taken() -> None:
    def tally(tokens: int, microseconds: float) -> Tally:
        return Tally(steps=1000, tokens=tokens, draft_us=[microseconds])

    reached = {"most": tally(2000, 90), "level": tally(1990, 30), "less": tally(1900, 1)}
    assert quickest_of_the_best(reached) == "level"


class Cache:
    """What `SuffixDecodingCache` offers; drafts more the higher the factor."""

    def __init__(self) -> None:
        self.active: dict[int, list[int]] = {}
        self.cached: dict[int, list[int]] = {}

    def start_request(self, request: int, prompt: TokenIds) -> None:
        assert prompt.dtype == np.int32
        assert request not in self.cached
        self.active[request], self.cached[request] = prompt.tolist(), []

    def stop_request(self, request: int) -> None:
        del self.active[request]

    def add_active_response(self, request: int, tokens: TokenIds) -> None:
        self.active[request] += tokens.tolist()
        self.cached[request] += tokens.tolist()

    def evict_cached_response(self, request: int) -> None:
        del self.cached[request]

    def speculate(self, request: int, context: TokenIds, **settings: Any) -> Any:
        assert context.tolist() == self.active[request][-64:]
        size = int(min(settings["max_spec_factor"], settings["max_spec_tokens"]))
        tokens = list(range(int(context[-1]) + 1, int(context[-1]) + 1 + size))

        class Draft:
            token_ids, parents, probs = tokens, list(range(-1, size - 1)), [1.0] * size

        return Draft


def test_best_settings_are_found_and_the_traces_forgotten() -> None:
    cache = Cache()
    peer = ArcticPeer(cache)
    peer.remember(ids(40, 41))
    choices = [Settings(factor, 0.0, 0.1) for factor in (0.0, 3.0, 1.0)]
    trace = Trace(ids(3, 4), ids(*OUTPUT))
    assert peer.best(choices, [trace, trace], 8) == choices[1]
    assert list(cache.cached.values()) == [[40, 41]]
    peer.settings = choices[1]
    tally = replay_in_turns({"": peer}, [trace], 8, Turns.STEP)[""]
    assert (tally.steps, tally.tokens) == (2, 6)
    assert list(cache.cached.values()) == [[40, 41], OUTPUT]


def test_our_reading_of_prompt_lookup_drafts_what_transformers_does() -> None:
    random = np.random.default_rng(7)
    for longest in (1, 2, 5):
        for _ in range(40):
            tokens = random.integers(0, 4, 30).astype(np.int32)
            program, reading = TransformersPeer(longest), PromptLookup(longest)
            program.open(tokens[:20], 10)
            reading.open("a", tokens[:20])
            for begin, end in ((20, 20), (20, 21), (21, 26)):
                theirs = program.tree(program.propose(tokens[begin:end], 6))
                request = DraftRequest("a", tokens[begin:end], end, 6)
                assert theirs.token_ids.tolist() == reading.draft([request])[0].token_ids.tolist()


# What is reported


def row(contender: str, kind: Kind, tokens: float, microseconds: float, **more: Any) -> Row:
    fifths = [microseconds / 2, microseconds]
    times = Times(microseconds, 3 * microseconds, fifths, 10, 10)
    return Row(
        workload="chat",
        contender=contender,
        kind=str(kind),
        evidence="all",
        reads=more.get("reads", ""),
        budget=more.get("budget", 8),
        steps=10,
        tokens_per_step=tokens,
        nodes_per_step=8,
        times=None if kind is Kind.READING else times,
        memory_mb=None if kind is Kind.READING else 5,
    )


def report(*rows: Row) -> PeerReport:
    absent = [Absent("a system", "a reason")]
    return PeerReport({"cores": 2}, "step", [{"name": "chat"}], list(rows), absent)


def test_report_says_first_where_ours_loses() -> None:
    ours = row("foredraft", Kind.OURS, 2.0, 40)
    quick = row("arctic", Kind.PROGRAM, 1.6, 20)
    ahead = row("transformers", Kind.PROGRAM, 2.5, 400)
    text = report(ours, quick, ahead).as_markdown()
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections[0] == "## Where ours loses"
    lost = text.partition("## Ours over")[0]
    assert "| Tokens per step | transformers | 8: 2.00 / 2.50 |" in lost
    assert "| Median draft, µs | arctic | 8: 40 / 20 |" in lost
    assert "Tokens per step | arctic" not in lost
    assert "Median draft, µs | transformers" not in lost
    assert "| chat | arctic | 1.25 | 2.00 (2.00 to 2.00) |" in text
    assert "| a system | a reason |" in text


def test_nothing_lost_is_said() -> None:
    text = report(row("foredraft", Kind.OURS, 2, 1), row("arctic", Kind.PROGRAM, 1, 2))
    assert "Nowhere in this run." in text.as_markdown()


def test_readings_are_held_against_programs_without_their_times() -> None:
    rows = (
        row("foredraft", Kind.OURS, 3, 31),
        row("arctic", Kind.PROGRAM, 2.0, 32),
        row("suffix-reading", Kind.READING, 2.1, 77, reads="arctic"),
        row("suffix-reading", Kind.READING, 2.2, 77, reads="arctic", budget=16),
    )
    text = report(*rows).as_markdown()
    assert "| chat | 8 | suffix-reading | 2.100 | arctic | 2.000 | +5.00% |" in text
    assert "| suffix-reading | all | 2.10 | 2.20 |  |  |  |" in text
    assert "77" not in text
    assert report(*rows).as_text().count('draft_us_p50"') == 2


def test_report_is_written_and_drawn(tmp_path: Path) -> None:
    rows = [
        replace(each, budget=budget)
        for budget in (8, 32)
        for each in (
            row("foredraft", Kind.OURS, 2, 40),
            row("arctic", Kind.PROGRAM, 1.6, 20),
            row("hd-reading", Kind.READING, 1.5, 1),
        )
    ]
    paths = report(*rows).write(tmp_path / "out" / "run")
    assert json.loads(paths[0].read_text())["rows"][1]["times"]["draft_us_p50"] == 20
    assert paths[2].read_bytes().startswith(b"\x89PNG")


# How programs are had


def test_a_program_is_built_once_and_a_failure_is_kept_with_its_reason(tmp_path: Path) -> None:
    attempts: list[str] = []

    def assemble(_archives: Path, made: Path) -> None:
        attempts.append("again")
        if len(attempts) == 1:
            raise ProgramError("no C++ compiler")
        (made / "part").touch()

    program = Program("thing-1.0", (), assemble)
    with pytest.raises(ProgramError, match=r"benchmarks\.peers\.build_programs"):
        program.require(tmp_path)
    with pytest.raises(ProgramError):
        program.build(tmp_path)
    with pytest.raises(ProgramError, match=r"no C\+\+ compiler"):
        program.require(tmp_path)
    assert program.build(tmp_path)
    assert not program.build(tmp_path)
    assert [each.name for each in program.require(tmp_path).iterdir()] == ["part"]
    assert [each.name for each in tmp_path.iterdir()] == ["thing-1.0"]
    assert len(attempts) == 2


def test_a_missing_compiler_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ProgramError, match=r"install g\+\+, or name one in the variable CXX"):
        compiler()


def test_the_first_error_of_a_compiler_is_the_message(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text('#error "such a thing"\n')
    with pytest.raises(ProgramError, match=r"lib\.so cannot be compiled: .*such a thing"):
        compile_library([source], [], "c++17", tmp_path / "lib.so")


def test_programs_are_kept_outside_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FOREDRAFT_CACHE", raising=False)
    assert ROOT not in programs_folder().parents
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert programs_folder() == tmp_path / "peers"
    assert programs_folder(tmp_path / "own") == tmp_path / "own"


def test_each_package_is_of_one_version() -> None:
    for package in {package for program in PROGRAMS for package in program.packages}:
        name, _, version = package.requirement.partition("==")
        assert name
        assert version
        assert len(bytes.fromhex(package.sha256)) == 32


# The programs themselves, where they were built


@pytest.mark.parametrize(
    "contender",
    [each for each in contenders(programs_folder()) if each.kind is Kind.PROGRAM],
    ids=lambda each: each.name,
)
def test_a_built_program_copies_what_repeats(contender: Contender) -> None:
    phrase = list(range(100, 140))
    traces = [Trace(ids(*phrase), ids(*phrase[4:]))]
    workload = Workload("copies", traces, [ids(*phrase)], [])
    try:
        made = contender.make(workload, 8, ())
    except ProgramError as error:
        pytest.skip(str(error))
    tally = replay_in_turns({"": made.peer}, traces, 8, Turns.STEP)[""]
    assert tally.tokens == 36
    assert tally.tokens_per_step > 3


# As a command

FAKE_CACHE = '''
class SuffixDecodingCache:
    """Drafts what comes next where tokens count on."""

    def __init__(self, max_tree_depth):
        assert max_tree_depth == 64

    def start_request(self, request, prompt): ...
    def stop_request(self, request): ...
    def add_active_response(self, request, tokens): ...
    def evict_cached_response(self, request): ...

    def speculate(self, request, context, max_spec_tokens, **settings):
        self.token_ids = [int(context[-1]) + 1 + i for i in range(max_spec_tokens)]
        self.parents = list(range(-1, max_spec_tokens - 1))
        self.probs = [1.0] * max_spec_tokens
        return self
'''


def command(tmp_path: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"prompt_ids": [1, 2], "output_ids": [3, 4, 5, 6, 7, 8]}) + "\n")
    line = [sys.executable, "-m", "benchmarks.peers", "--workload", f"counting={traces}"]
    line += ["--programs", str(tmp_path), "--output", str(tmp_path / "run"), *map(str, arguments)]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ}
    )


@pytest.mark.programs
def test_a_program_and_ours_are_measured_in_one_run(tmp_path: Path) -> None:
    package = tmp_path / "arctic-inference-0.3.0" / "arctic_inference" / "suffix_decoding"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_CACHE)
    done = command(tmp_path, "--budget", 2, "--budget", 8, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "run.json").read_text())
    figures = {(r["contender"], r["budget"]): r["tokens_per_step"] for r in found["rows"]}
    assert figures[("arctic", 2)] == 3
    assert figures[("arctic", 8)] == 6
    assert ("foredraft", 8) in figures
    assert ("foredraft-outputs", 8) not in figures  # without an index that is the same
    reasons = {each["name"]: each["reason"] for each in found["absent"]}
    assert "build_programs" in reasons["llama-cpp"]
    assert set(SLOW) < set(reasons)
    lost = (tmp_path / "run.md").read_text().partition("## Ours over")[0]
    assert "| Tokens per step | arctic |" in lost


@pytest.mark.programs
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--peer", "none"), "no peer 'none': choose from foredraft, "),
        (("--peer", "arctic"), "not built yet: python -m benchmarks.peers.build_programs"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    done = command(tmp_path, *arguments)
    assert done.returncode == 1
    assert reason in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_trees_of_programs_keep_their_parents() -> None:
    tree = drafted([5, 6, 7], [-1, -1, 1], [0.5, 0.4, 0.3])
    assert tree.follow(ids(6, 7)).tolist() == [1, 2]
