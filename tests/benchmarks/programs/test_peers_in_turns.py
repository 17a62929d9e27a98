"""The harness that replays programs in turns, and its report."""

import numpy as np
import pytest

from benchmarks.peers.contestants import Absent
from benchmarks.peers.in_turns import TooManyNodesError, Turns, replay_in_turns
from benchmarks.peers.peer import Kind, path_of
from benchmarks.peers.peer_report import PeerReport, Row, Times
from benchmarks.peers.programs import TransformersPeer
from decoder.plugins.contenders.prompt_lookup import PromptLookup
from retriever.drafter import DraftRequest, TokenIds
from retriever.traces.traces import Trace
from retriever.tree import DraftTree
from tests.benchmarks.drafting import ids


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


def test_more_nodes_than_asked_for_are_refused() -> None:
    with pytest.raises(TooManyNodesError, match="3 nodes where 2"):
        replay_in_turns({"a": Knowing("a", OUTPUT, 3, [])}, [TRACE], 2, Turns.STEP)


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


def row(contender: str, kind: Kind, tokens: float, microseconds: float) -> Row:
    times = Times(microseconds, 3 * microseconds, [microseconds / 2, microseconds], 10, 10)
    return Row("chat", contender, str(kind), "all", "", 8, 10, tokens, 8, times, memory_mb=5)


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
