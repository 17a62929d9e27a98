import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from typer.testing import CliRunner

from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions
from retriever.plugins.replay.reliability_report import Bin, Group, Reliability
from retriever.plugins.replay.replay import replay
from retriever.plugins.replay.replay_cli import app
from retriever.traces.traces import Trace
from retriever.tree import ROOT, DraftTree, Source
from tests.retriever.token_ids import ids


def chain(probabilities: ArrayLike, source: Source = Source.CORPUS) -> DraftTree:
    """The tokens 0, 1, 2 and so on, one after the other."""
    size = len(np.atleast_1d(probabilities))
    return DraftTree.checked(
        np.arange(size), np.arange(-1, size - 1), probabilities, np.full(size, source)
    )


def star(probabilities: list[float]) -> DraftTree:
    size = len(probabilities)
    return DraftTree.checked(np.arange(size), [ROOT] * size, probabilities, [1] * size)


def on_path(*nodes: int) -> Any:
    return np.array(nodes, np.int64)


class Oracle:
    """Drafts 0, 1, 2 with known probabilities, whatever comes before."""

    def open(self, session: str, prompt: ArrayLike, options: SequenceOptions = DEFAULT) -> None:
        pass

    def close(self, session: str, new_tokens: ArrayLike | None = None) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [chain([0.9375, 0.625, 0.015625]) for _ in requests]


def test_known_probabilities_give_the_known_table() -> None:
    """The first draft is accepted to 0, 1; the second to 0; then the output ends."""
    report = replay(Oracle(), [Trace(ids(7), ids(0, 1, 9, 0, 9))], 8, calibrate_after=0)
    calibration = report.calibration
    assert calibration is not None
    assert calibration.nodes == report.nodes == 6
    assert calibration.bins() == [
        Bin(0.01, 0.02, 2, 0.015625, 0.0),
        Bin(0.6, 0.7, 2, 0.625, 0.5),
        Bin(0.9, 0.95, 2, 0.9375, 1.0),
    ]
    assert calibration.ece() == (0.015625 + 0.125 + 0.0625) / 3
    assert list(calibration.by_depth()) == ["1", "2", "3-4"]
    mean = (0.9375 + 0.625 + 0.015625) / 3
    assert calibration.by_source() == {"corpus": Group(6, mean, 0.5, calibration.ece())}


def test_traces_at_the_beginning_can_be_left_out() -> None:
    traces = [Trace(ids(7), ids(0, 1, 2)), Trace(ids(7), ids(9))]
    for after, nodes in ((0, 6), (1, 3), (2, 0), (9, 0)):
        report = replay(Oracle(), traces, 8, calibrate_after=after)
        assert report.calibration is not None
        assert report.calibration.nodes == nodes
    assert replay(Oracle(), traces, 8).calibration is None


def test_bins_are_counted_as_one_by_one() -> None:
    rng = np.random.default_rng(3)
    calibration, outcomes = Reliability(), []
    for _ in range(300):
        probabilities = np.sort(rng.choice(np.linspace(0, 1, 101), 8)).astype(np.float32)[::-1]
        path = np.arange(rng.integers(0, 9))
        calibration.add(chain(probabilities), path)
        outcomes += [(float(p), node < len(path)) for node, p in enumerate(probabilities)]
    for each in calibration.bins():
        last = each.end == 1
        within = [(p, hit) for p, hit in outcomes if each.start <= p and (p < each.end or last)]
        expected = np.mean(within, axis=0)
        assert each.nodes == len(within)
        assert (each.probability, each.accepted) == pytest.approx(tuple(expected))
    assert sum(each.nodes for each in calibration.bins()) == len(outcomes)


def drawn(probabilities: np.ndarray[Any, Any], true: np.ndarray[Any, Any]) -> Reliability:
    """Nodes with outcomes that are drawn with other probabilities than they are given."""
    rng, calibration = np.random.default_rng(11), Reliability()
    for given, chance in zip(probabilities, true, strict=True):
        hit = on_path(0) if rng.random() < chance else on_path()
        calibration.add(star([given]), hit)
    return calibration


@pytest.mark.soak
def test_error_of_calibrated_nodes_is_near_none() -> None:
    probabilities = np.random.default_rng(5).random(20_000)
    assert drawn(probabilities, probabilities).ece() < 0.02


@pytest.mark.soak
def test_error_of_overconfident_nodes_is_by_how_much_they_are() -> None:
    true = np.random.default_rng(5).random(20_000)
    calibration = drawn((1 + true) / 2, true)  # on average a quarter too much
    assert calibration.ece() == pytest.approx(0.25, abs=0.02)


def test_errors_of_opposite_sign_do_not_cancel() -> None:
    calibration = Reliability()
    for _ in range(10):
        calibration.add(star([0.92]), on_path())
        calibration.add(star([0.08]), on_path(0))
    assert calibration.ece() == pytest.approx(0.92)
    assert calibration.by_source()["context"].ece == pytest.approx(0.92)


def test_depths_are_counted_in_buckets() -> None:
    calibration = Reliability()
    calibration.add(chain(np.full(12, 0.5), Source.GENERATIONS), on_path(0, 1, 2))
    counts = {name: (each.nodes, each.accepted) for name, each in calibration.by_depth().items()}
    assert counts == {"1": (1, 1), "2": (1, 1), "3-4": (2, 0.5), "5-8": (4, 0), "9+": (4, 0)}
    assert list(calibration.by_source()) == ["generations"]


@pytest.mark.parametrize("probability", [0.0, 1.0, np.nextafter(np.float32(1), np.float32(2))])
def test_certain_nodes_have_a_bin(probability: float) -> None:
    calibration = Reliability()
    calibration.add(star([probability]), on_path())
    assert sum(each.nodes for each in calibration.bins()) == 1


def test_nothing_drafted_is_no_error() -> None:
    calibration = Reliability()
    calibration.add(DraftTree.empty(), on_path())
    for empty in (calibration, replay(Oracle(), [], 8, calibrate_after=0).calibration):
        assert empty is not None
        assert (empty.nodes, empty.ece(), empty.bins(), empty.by_source()) == (0, 0.0, [], {})
        json.dumps(empty.as_json(), allow_nan=False)


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_reports_it_on_demand(tmp_path: Path) -> None:
    row = json.dumps({"prompt_ids": [2, 3, 4, 5], "output_ids": [2, 3, 4, 5]})
    traces = tmp_path / "t.jsonl"
    traces.write_text(f"{row}\n{row}\n")
    assert "calibration" not in json.loads(command(traces, "--json"))
    report = json.loads(command(traces, "--json", "--calibration"))
    calibration = report["calibration"]
    assert calibration["nodes"] == report["mean_nodes"] * report["steps"]
    assert sum(each["nodes"] for each in calibration["bins"]) == calibration["nodes"]
    accepted = sum(each["nodes"] * each["accepted"] for each in calibration["bins"])
    assert accepted == pytest.approx(6)  # 3, 4 and 5, twice
    fewer = json.loads(command(traces, "--json", "--calibration", "--calibration-after", 1))
    assert 0 < fewer["calibration"]["nodes"] < calibration["nodes"]
    table = command(traces, "--calibration")
    assert f"expected calibration error {calibration['ece']:.4f}" in table
    assert "source context" in table
