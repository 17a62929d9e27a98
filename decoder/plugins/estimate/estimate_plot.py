"""Plots of an estimate: tokens per step and projected speed-up by the nodes of a draft."""

from pathlib import Path
from typing import Any, Final

from decoder.commands.plots import figure_class, save
from decoder.plugins.estimate.estimate_report import Estimate
from decoder.plugins.estimate.projection import PAYING
from retriever.commands.factories import OWN

_MAX_COLUMNS: Final = 6
"""Most kinds of traffic in one plot; more columns would be too narrow to read."""

_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""


def draw(estimate: Estimate, path: Path) -> None:
    """Write the plot: a column for each kind of traffic, a line for each drafting rule.

    Raises:
        PlotError: the file cannot be written.
    """
    kinds = estimate.shown_kinds[::-1][:_MAX_COLUMNS]
    figure = figure_class()(figsize=(max(3.4 * len(kinds), 6.4), 6.4), layout="constrained")
    axes = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    for column, kind in enumerate(kinds):
        _draw_kind(axes[0, column], axes[1, column], estimate, kind)
    axes[0, 0].set_ylabel("tokens per step")
    axes[1, 0].set_ylabel("projected speed-up")
    lines, names = axes[1, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(estimate.drafters))
    figure.suptitle(f"passes: {estimate.curve.source}", fontsize="medium", wrap=True)
    save(figure, path)


def _draw_kind(above: Any, below: Any, estimate: Estimate, kind: str) -> None:
    budgets = [nodes for nodes in estimate.budgets if isinstance(nodes, int)]
    for drafter, colour in zip(estimate.drafters, _COLOURS, strict=False):
        width = 2.4 if drafter == OWN else 1.4
        style = {"color": colour, "linewidth": width, "marker": "o", "markersize": 4}
        outcomes = [estimate.of(drafter, nodes) for nodes in budgets]
        tokens = [1.0, *(outcome.tally(kind).tokens_per_step for outcome in outcomes)]
        speedups = [1.0, *(outcome.speedup(estimate.plain, kind) for outcome in outcomes)]
        above.plot([0, *budgets], tokens, **style)
        below.plot([0, *budgets], speedups, label=drafter, **style)
        if PAYING in estimate.budgets:
            paying = estimate.of(drafter, PAYING).speedup(estimate.plain, kind)
            below.axhline(
                paying, color=colour, linewidth=1, linestyle=":", label=f"{drafter}, paying"
            )
    below.axhline(1, color="0.6", linewidth=1)
    above.set_title(kind)
    below.set(xlabel="nodes", xticks=[0, *budgets])
    below.set_xscale("symlog", base=2, linthresh=max(min(budgets, default=1), 1))
    below.set_xticks([0, *budgets], [str(nodes) for nodes in (0, *budgets)])
    for axes in (above, below):
        axes.grid(alpha=0.3)
