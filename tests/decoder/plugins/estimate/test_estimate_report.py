"""What an estimate says, of figures that were made up."""

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from decoder.budget.costs import CostSurface
from decoder.commands.plots import check_plot
from decoder.errors import PlotError
from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.estimate_plot import draw
from decoder.plugins.estimate.estimate_report import (
    Crowded,
    Estimate,
    as_json,
    assumptions,
    beside,
    tables,
    verdict,
)
from decoder.plugins.estimate.projection import PAYING, Nodes, ProjectedOutcome, Tally
from retriever.commands.factories import OWN
from retriever.traces.traces import TokenizerFit

CURVE = CostCurve(CostSurface.flat([1, 65], [1.0, 1.0]), "a made-up machine", ("all is flat",))


def outcome(drafter: str, nodes: Nodes, *kinds: tuple[str, int, float]) -> ProjectedOutcome:
    """Each kind of 100 tokens: its steps, and seconds for each of them."""
    size = nodes if isinstance(nodes, int) else 5
    tallies = {
        name: Tally(1, 100, steps, steps * size, steps * seconds, 0.0)
        for name, steps, seconds in kinds
    }
    return ProjectedOutcome(drafter, nodes, tallies)


def estimate(*outcomes: ProjectedOutcome) -> Estimate:
    kinds = list(outcomes[0].tallies)
    plain = outcome("", 0, *((kind, 100, 1.0) for kind in kinds))
    return Estimate(plain, outcomes, CURVE, kinds, "kind", ["the log is whole"], 100)


def test_the_verdict_names_the_gain_and_the_nodes() -> None:
    made = estimate(outcome(OWN, 4, ("all", 60, 1.0)), outcome(OWN, 16, ("all", 40, 1.19)))
    assert verdict(made) == "about 2.1 times plain decoding with 16 nodes"


def test_a_gain_by_computed_passes_is_called_the_most_there_can_be() -> None:
    made = estimate(outcome(OWN, 16, ("all", 50, 1.0)))
    bound = replace(made, curve=replace(CURVE, roofline="8b-h100"), crowded=Crowded(32, 1.44))
    assert verdict(bound) == (
        "at most 2.0 times plain decoding with 16 nodes, for one sequence at a time (1.4 times for "
        "32 in a pass), computed for 8b-h100 without the engine's own time, not measured: "
        "`--model M` measures your model"
    )
    values = as_json(bound)
    assert (values["is_bound"], values["crowded"]) == (True, {"batch": 32, "speedup": 1.44})


def test_the_verdict_tells_what_paying_drafts_come_to() -> None:
    made = estimate(outcome(OWN, 4, ("all", 60, 1.0)), outcome(OWN, PAYING, ("all", 40, 1.0)))
    assert verdict(made).endswith("with as many nodes as pay off (5.0 on average)")


@pytest.mark.parametrize(
    ("steps", "seconds", "why"), [(98, 1.0, "repeat little"), (50, 1.96, "take the time")]
)
def test_where_it_does_not_help_that_is_said_with_the_reason(
    steps: int, seconds: float, why: str
) -> None:
    told = verdict(estimate(outcome(OWN, 8, ("all", steps, seconds))))
    assert told.startswith("it won't help: 1.02 times plain decoding at best, for ")
    assert why in told


def test_kinds_that_differ_from_the_whole_are_named() -> None:
    mixed = estimate(outcome(OWN, 8, ("code", 25, 1.0), ("chat", 99, 1.0)))
    assert verdict(mixed).endswith("with 8 nodes; it won't help with chat (1.01)")
    mostly = estimate(outcome(OWN, 8, ("code", 80, 1.0), ("chat", 99, 1.2)))
    assert verdict(mostly).startswith("it won't help: 1.0")
    assert verdict(mostly).endswith("; but code (1.25)")


def test_the_others_stand_beside_it_each_at_its_best() -> None:
    made = estimate(
        outcome(OWN, 8, ("all", 50, 1.0)),
        outcome("prompt lookup", 4, ("all", 80, 1.0)),
        outcome("prompt lookup", 8, ("all", 80, 1.1)),
    )
    assert beside(made) == "prompt lookup: 1.25 with 4 nodes"


def test_tables_fit_a_terminal_and_values_are_json() -> None:
    kinds = [("a-kind-of-a-long-name", 50, 1.0), ("b", 100, 1.0)]
    made = estimate(
        *(outcome(name, n, *kinds) for name in (OWN, "SuffixDecoding") for n in (4, 64, PAYING))
    )
    console = Console(width=80, file=StringIO(), record=True)
    for table in tables(made):
        console.print(table)
        assert console.measure(table).maximum <= 80
    shown = console.export_text()
    assert "2.00" in shown
    assert "1.33" in shown  # all: 200 tokens in 150 s
    values = json.loads(json.dumps(as_json(made)))
    assert values["speedup"] == pytest.approx(200 / 150)
    assert values["outcomes"][0]["kinds"]["b"]["speedup"] == 1
    assert {"all is flat", "the log is whole"} <= set(values["assumptions"])
    assert any("drafting time (processor time" in line for line in assumptions(made))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    made = estimate(*(outcome(OWN, n, ("a", 50, 1.0), ("b", 90, 1.0)) for n in (4, 16, PAYING)))
    path = tmp_path / f"plot{suffix}"
    check_plot(path)
    draw(made, path)
    begin = path.read_bytes()[:5]
    assert begin == (b"\x89PNG\r" if suffix == ".png" else b"<?xml")


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlotError, match=r"png or \.svg"):
        check_plot(tmp_path / "plot.pdf")
    with pytest.raises(PlotError, match="no folder"):
        check_plot(tmp_path / "none" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install 'foredraft\[bench\]'"):
        check_plot(tmp_path / "plot.png")


def test_there_is_no_verdict_where_tokens_are_parts_of_characters() -> None:
    fit = TokenizerFit()
    fit.count("abc", [(0, 1), (1, 2), (2, 3)])
    fit.count("\u6e2f", [(0, 1), (0, 1), (0, 1)])
    assert (fit.num_characters, fit.num_tokens, fit.num_parts) == (4, 6, 3)
    made = estimate(outcome(OWN, 4, ("all", 60, 1.0)))
    told = verdict(replace(made, fit=fit))
    assert told.startswith("no verdict: 50% of the tokens are parts of characters")
    few = verdict(replace(made, num_outputs=3))
    assert few.endswith("; 3 outputs are few: more outputs may change the verdict")
