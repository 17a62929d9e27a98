import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ablations import LEARNING, PARTS, TREES, tokens_per_step
from benchmarks.workloads import Workload, WorkloadError, WorkloadFiles
from retriever.drafter import TokenIds
from retriever.traces.traces import Trace
from tests.benchmarks.conftest import Runner
from tests.benchmarks.drafting import IndexMaker

TRACE = {"prompt_ids": [9, 2, 3, 4, 5, 6], "output_ids": [2, 3, 4, 5, 6, 7]}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(TRACE) + "\n")
    return path


def test_comparison_is_written_for_programs_and_people(
    traces: Path, tmp_path: Path, make_index: IndexMaker, run: Runner
) -> None:
    index = make_index([1, 2, 3, 4])
    workload = f"copying={traces},warm={traces},index={index.path}"
    chosen = ("--drafter", "prompt-lookup", "--drafter", "hd", "--budget", 8, "--budget", 2)
    done = run(
        "benchmarks.compare", "--workload", workload, *chosen, "--output", tmp_path / "out" / "run"
    )
    assert done.status == 0, done.stderr
    written = json.loads((tmp_path / "out" / "run.json").read_text())
    figures = {(m["drafter"], m["budget"]): m["tokens_per_step"] for m in written["measurements"]}
    # the model's own 2, then 3, 4, 5, 6 and a last one from the draft; two by two; HD knows
    # the output already, but not what follows the 6 of the prompt
    assert figures[("prompt-lookup", 8)] == 3
    assert figures[("prompt-lookup", 2)] == 2
    assert set(figures) == {(d, b) for d in ("prompt-lookup", "hd") for b in (2, 8)}
    assert written["workloads"][0]["indexed_tokens"] == 4
    assert "| prompt-lookup (our reading) | 2.00 | 3.00 |" in (tmp_path / "out/run.md").read_text()
    assert {m["draft_us_p50"] for m in written["measurements"]} == {None}
    assert (tmp_path / "out" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "copying, hd, 8 nodes" in done.stderr
    with pytest.raises(WorkloadError, match="NAME=TRACES"):
        WorkloadFiles.parse("a=b,warm=")


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


def test_what_was_left_out_is_there_again(make_index: IndexMaker) -> None:
    workload = copied_from("sequence", make_index)
    whole = tokens_per_step(workload, "nothing", BUDGET)
    for part in PARTS:
        tokens_per_step(workload, part, BUDGET)
        assert tokens_per_step(workload, "nothing", BUDGET) == whole, part
