"""Leaving a part out takes its evidence away, and nothing else."""

import numpy as np
import pytest

from benchmarks.ablations import CORPUS_PARTS, LEARNING, PARTS, TREES, tokens_per_step
from benchmarks.workloads import Workload
from retriever.drafter import TokenIds
from retriever.replay.traces import Trace
from tests.benchmarks.drafting import IndexMaker

LENGTH = 45
BUDGET = 16


def text(seed: int) -> TokenIds:
    """Tokens of which each comes once."""
    return np.random.default_rng(seed).permutation(50)[:LENGTH].astype(np.int32)


def copied_from(where: str, make_index: IndexMaker) -> Workload:
    """Two recordings whose outputs stand in their prompts, in earlier outputs, or in an index."""
    wanted = [text(1), text(2)]
    prompts = wanted if where == "sequence" else [text(3)[:9], text(4)[:9]]
    outputs = wanted if where == "outputs" else []
    indexes = [make_index(*(each.tolist() for each in wanted))] if where == "corpus" else []
    traces = [Trace(prompt, output) for prompt, output in zip(prompts, wanted, strict=True)]
    return Workload(where, traces, outputs, indexes)


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("sequence", "the sequence itself"),
        ("outputs", "earlier outputs"),
        ("corpus", "the corpus"),
    ],
)
def test_without_its_source_nothing_is_drafted(
    where: str, part: str, make_index: IndexMaker
) -> None:
    workload = copied_from(where, make_index)
    assert tokens_per_step(workload, "nothing", BUDGET) > 4
    assert tokens_per_step(workload, part, BUDGET) < 2
    for other in ("cursors and trails", TREES, LEARNING):
        assert tokens_per_step(workload, other, BUDGET) > 4


def test_suffix_arrays_and_tables_are_left_out_by_themselves(make_index: IndexMaker) -> None:
    workload = copied_from("corpus", make_index)
    assert all(tokens_per_step(workload, part, BUDGET) > 2 for part in CORPUS_PARTS[1:])


def test_every_part_can_be_left_out_of_a_workload_that_has_all(make_index: IndexMaker) -> None:
    workload = copied_from("corpus", make_index)
    workload.outputs.append(text(5))
    for part in PARTS:
        assert tokens_per_step(workload, part, BUDGET) >= 1
