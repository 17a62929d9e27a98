import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.ablations import CORPUS_PARTS, LEARNING, PARTS, TREES, tokens_per_step
from benchmarks.workloads import Workload, WorkloadError, WorkloadFiles
from retriever.commands import app
from retriever.drafter import TokenIds
from retriever.replay.traces import Trace
from tests.benchmarks.drafting import IndexMaker

ROOT = Path(__file__).parent.parent.parent
TRACE = {"prompt_ids": [9, 2, 3, 4, 5, 6], "output_ids": [2, 3, 4, 5, 6, 7]}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(TRACE) + "\n")
    return path


def compare(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.compare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.programs
def test_comparison_is_written_for_programs_and_people(
    traces: Path, tmp_path: Path, make_index: IndexMaker
) -> None:
    index = make_index([1, 2, 3, 4])
    workload = f"copying={traces},warm={traces},index={index.path}"
    chosen = ("--drafter", "prompt-lookup", "--drafter", "hd", "--budget", 8, "--budget", 2)
    done = compare("--workload", workload, *chosen, "--output", tmp_path / "out" / "run")
    assert done.returncode == 0, done.stderr
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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--workload", "nothing"), "a workload is NAME=TRACES"),
        (("--workload", "a=missing.jsonl"), "cannot read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], reason: str) -> None:
    done = compare(*arguments)
    assert done.returncode == 1
    assert reason in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_unknown_drafter_is_refused_before_anything_is_read(traces: Path) -> None:
    done = compare("--workload", f"a={traces}", "--drafter", "none")
    assert done.returncode == 1
    assert "choose from foredraft, prompt-lookup" in done.stderr


def test_workload_names_its_files() -> None:
    files = WorkloadFiles.parse("edits=a.jsonl,warm=b.jsonl,index=c,warm=d.jsonl")
    assert files.name == "edits"
    assert files.traces == Path("a.jsonl")
    assert files.warm == (Path("b.jsonl"), Path("d.jsonl"))
    assert files.indexes == (Path("c"),)


@pytest.mark.parametrize("text", ["", "a", "=b", "a=", "a=b,c=d", "a=b,warm="])
def test_workload_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="NAME=TRACES"):
        WorkloadFiles.parse(text)


def replay(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_replay_drafts_by_the_rule_that_is_named(traces: Path) -> None:
    done = replay(traces, "--drafter", "prompt-lookup", "--budget", 8, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["steps"] == 2


def test_unknown_names_are_listed(traces: Path) -> None:
    done = replay(traces, "--drafter", "none")
    assert done.exit_code == 1
    assert "no drafter 'none': choose from foredraft, prompt-lookup, rest" in done.stderr


@pytest.mark.parametrize("module", ["no.such.module", "json", ".", ""])
def test_module_without_drafters_is_a_clear_error(traces: Path, module: str) -> None:
    done = replay(traces, "--drafter", "hd", "--drafters", module)
    assert done.exit_code == 1
    assert "root of a checkout" in done.stderr


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


def test_suffix_arrays_and_tables_are_left_out_by_themselves(make_index: IndexMaker) -> None:
    workload = copied_from("corpus", make_index)
    assert all(tokens_per_step(workload, part, BUDGET) > 2 for part in CORPUS_PARTS[1:])


def test_every_part_can_be_left_out_of_a_workload_that_has_all(make_index: IndexMaker) -> None:
    workload = copied_from("corpus", make_index)
    workload.outputs.append(text(5))
    for part in PARTS:
        assert tokens_per_step(workload, part, BUDGET) >= 1
