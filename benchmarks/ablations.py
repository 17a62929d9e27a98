"""Ablations: tokens per step without each source, table and idea of the drafter.

    python -m benchmarks.ablations --workload NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]...

Recordings are replayed once with all parts, and once without each single part. Parts overlap: if
one part is missing, another often finds the same tokens. So the losses do not add up.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.comparison import circumstances, describe
from benchmarks.workloads import Workload, WorkloadFiles
from indexer.reader import PhraseTables
from retriever.commands.options import clear_errors
from retriever.drafter import DraftRequest
from retriever.kernels.cursors import TRAIL_SIZE
from retriever.plugins.replay.replay import replay
from retriever.predict.databases import Databases
from retriever.predict.draft import Predictor, Prior
from retriever.predict.searched_corpus import Corpus, to_kernel
from retriever.predict.stores import CONTEXT_LIMITS, ChainStore, orders_of
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.options import DEFAULT_LIMITS
from retriever.traces.traces import ChatEncoder
from retriever.tree import DraftTree

BUDGETS: Final = (8, 32, 64)
_NOWHERE: Final = np.array([-1] + [0] * (TRAIL_SIZE - 1))
_SHORT: Final = 4  # matches of fewer tokens are short

Removal = Callable[[Databases], None]
"""Empties a part of a sequence's databases before each draft."""

console = Console(stderr=True)


def _store(databases: Databases) -> ChainStore:
    return databases.context._store  # noqa: SLF001  (a measurement takes parts out)


def _without_sequence(databases: Databases) -> None:
    store = _store(databases)
    store.orders.max_rows[:] = 0
    store.chains.last[:] = -1
    _without_cursors(databases)


def _without_short_matches(databases: Databases) -> None:
    store = _store(databases)
    store.orders.max_rows[store.orders.orders < _SHORT] = 0


def _without_cursor(databases: Databases) -> None:
    _store(databases).cursor.cursor[:] = _NOWHERE[:2]


def _without_trail(databases: Databases) -> None:
    _store(databases).cursor.trail[:] = _NOWHERE


def _without_cursors(databases: Databases) -> None:
    _without_cursor(databases)
    _without_trail(databases)


def _without_generations(databases: Databases) -> None:
    if databases.pool.generations.num_tokens:
        databases.pool.generations.clear()


def _without_live_table(databases: Databases) -> None:
    databases.pool.generations.live[:] = 0


def _without_corpus(databases: Databases) -> None:
    _turn_to(databases, has_segments=False, has_tables=False)


def _without_suffix_arrays(databases: Databases) -> None:
    _turn_to(databases, has_segments=False, has_tables=True)


def _without_phrase_tables(databases: Databases) -> None:
    _turn_to(databases, has_segments=True, has_tables=False)


_corpora: dict[tuple[int, bool, bool], tuple[Corpus, Corpus]] = {}


def _turn_to(databases: Databases, *, has_segments: bool, has_tables: bool) -> None:
    """Draft only from a part of the corpus."""
    whole = databases.corpus
    if any(whole is part for part, _ in _corpora.values()):
        return
    key = id(whole), has_segments, has_tables
    if key not in _corpora:
        empty = PhraseTables.empty(len(whole.tables.counts1), whole.tables.tokens2.dtype)
        tables = whole.tables if has_tables else to_kernel(empty)
        _corpora[key] = Corpus(whole.segments if has_segments else [], tables), whole
    databases.set_corpus(_corpora[key][0])


def _with_all(_: Databases) -> None:
    """Remove nothing."""


PARTS: Final[Mapping[str, Removal]] = {
    "the sequence itself": _without_sequence,
    "its matches of one and two tokens": _without_short_matches,
    "cursors": _without_cursor,
    "trails": _without_trail,
    "cursors and trails": _without_cursors,
    "earlier outputs": _without_generations,
    "their live table": _without_live_table,
    "the corpus": _without_corpus,
    "its suffix arrays": _without_suffix_arrays,
    "its phrase tables": _without_phrase_tables,
}
CORPUS_PARTS: Final = ("the corpus", "its suffix arrays", "its phrase tables")
LEARNING: Final = "learning"
TREES: Final = "trees (the best chain alone)"


class Without(Predictor):
    """A predictor that drafts without a part of the databases.

    Args:
        removal: empties that part.
        learns: whether the weights are trained.
    """

    def __init__(self, removal: Removal, *, learns: bool) -> None:
        prior = Prior() if learns else Prior(rate=0.0)
        super().__init__(DEFAULT_LIMITS.max_budget_nodes, prior)
        self._removal = removal

    def step(self, databases: Databases, request: DraftRequest) -> DraftTree:
        """Commit and draft in two calls, with the removal between them; see `Predictor.step`."""
        self.commit(databases, request.new_tokens)
        self._removal(databases)
        return self.draft(databases, request.budget_nodes, request.min_probability)


class ChainDrafter(EmbeddedDrafter):
    """Drafts the best chain of each tree."""

    def draft(self, requests: Any) -> list[DraftTree]:
        """Return a chain for each request."""
        asked: list[DraftRequest] = list(requests)
        trees = super().draft(asked)
        return [tree.best_chain(each.budget_nodes) for tree, each in zip(trees, asked, strict=True)]


def main(
    workload: Annotated[
        list[str], typer.Option(help="NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]... Repeatable.")
    ],
    budget: Annotated[
        list[int] | None, typer.Option(min=1, help="Nodes in each tree. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Replay only the first traces of each workload.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for text. Default: SmolLM2's.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Replay recordings with each part of the drafter left out; print a table for each workload."""
    with clear_errors():
        encoder = ChatEncoder(tokenizer)
        workloads = [WorkloadFiles.parse(each).load(encoder, limit) for each in workload]
    budgets = sorted(budget or BUDGETS)
    results = [
        {**describe(each), "tokens_per_step": _measured(each, budgets)} for each in workloads
    ]
    for each in results:
        print(_table(each["name"], each["tokens_per_step"], budgets))
    if output is not None:
        figures = {"circumstances": circumstances(), "budgets": budgets, "workloads": results}
        output.write_text(json.dumps(figures, indent=1) + "\n")


def _measured(workload: Workload, budgets: list[int]) -> dict[str, list[float]]:
    """Return tokens per step by what was left out ("nothing" first), for each budget."""
    parts = [name for name in PARTS if workload.indexes or name not in CORPUS_PARTS]
    names = ["nothing", *parts, LEARNING, TREES]
    return {
        name: [tokens_per_step(workload, name, budget) for budget in budgets]
        for name in track(names, f"replaying {workload.name}", console=console)
    }


def tokens_per_step(workload: Workload, name: str, budget: int) -> float:
    """Return the tokens per step of a replay without one part, or with "nothing" left out."""
    predictor = Without(PARTS.get(name, _with_all), learns=name != LEARNING)
    made = ChainDrafter if name == TREES else EmbeddedDrafter
    drafter = made(workload.indexes, predictor=predictor)
    for output in workload.outputs:
        drafter.remember(output)
    rows = orders_of(CONTEXT_LIMITS).max_rows  # of all sequences of this process
    whole = rows.copy()
    try:
        figures = replay(drafter, workload.traces, budget).as_json()
    finally:
        rows[:] = whole
        _corpora.clear()
    return round(float(figures["tokens_per_step"]), 4)


def _table(name: str, figures: Mapping[str, list[float]], budgets: list[int]) -> str:
    """Return Markdown: tokens per step with everything, and the change without each part."""
    whole = np.array(figures["nothing"])
    lines = [
        f"## {name}\n",
        "| without | " + " | ".join(f"{each} nodes" for each in budgets) + " |",
        "|---" * (len(budgets) + 1) + "|",
        "| nothing | " + " | ".join(f"{each:.2f}" for each in whole) + " |",
    ]
    for part, each in list(figures.items())[1:]:
        changes = 100 * (np.array(each) / whole - 1)
        lines.append(f"| {part} | " + " | ".join(f"{change:+.1f}%" for change in changes) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
