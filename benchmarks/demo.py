"""The program of `make demo`: from a corpus to faster decoding, end to end.

It indexes the standard library of this interpreter and serves the index over gRPC. Then a model
completes, rewrites and explains code, plainly (`model.generate`) and with drafts from the service.
Decoding is greedy and in float32, so the outputs must be identical.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from decoder.assembly import assemble, connect_drafter
from decoder.drafters.options import DraftOptions
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from decoder.plugins.bench.bench import circumstances
from decoder.plugins.contenders.contender import FOREDRAFT, PLAIN, Contender, Run, contenders
from indexer.errors import IndexerError
from indexer.reader import Index
from indexer.tokenizer import DEFAULT_MODEL

STDLIB = Path(sysconfig.get_paths()["stdlib"])
NOT_STDLIB = ("site-packages", "__pycache__")
CACHE = Path(__file__).parent.parent / ".cache" / "demo"
INDEX = CACHE / f"stdlib-{sys.version_info.major}.{sys.version_info.minor}.index"
SOURCES = {
    "context": "context",
    "generations": "recent",
    "phrases": "phrases",
    "corpus": "index",
    "model": "own",
}

console = Console(stderr=True)


@dataclass(frozen=True)
class Task:
    """A task for the model.

    Attributes:
        kind: complete, rewrite or answer.
        name: subject of the task.
        prompt: prompt for the model.
        is_chat: whether the prompt is a user's message; otherwise it is a text to continue.
    """

    kind: str
    name: str
    prompt: str
    is_chat: bool = True


def from_line(module: str, beginning: str, num_lines: int) -> str:
    """Return lines of a standard library module, from the line that starts with `beginning`."""
    text = (STDLIB / f"{module}.py").read_text()
    return "\n".join(text[text.index(f"\n{beginning}") + 1 :].splitlines()[:num_lines])


def up_to(module: str, definition: str, num_lines: int) -> str:
    """Return the end of a module's text up to the first line of a definition."""
    text = (STDLIB / f"{module}.py").read_text()
    before = text[: text.index(definition) + len(definition)]
    return "\n".join(before.splitlines()[-num_lines:])


def tasks() -> list[Task]:
    """Return the tasks; the kinds take turns."""
    return [
        Task("complete", "bisect", up_to("bisect", "def bisect_right(", 30), False),
        Task(
            "rewrite",
            "keyword",
            "Rewrite this Python code with the variable kwlist renamed to keywords. Reply with the "
            f"whole code only.\n\n```python\n{from_line('keyword', '__all__', 50)}\n```",
        ),
        Task("answer", "contexts", "What is a context manager in Python?"),
        Task("complete", "heapq", up_to("heapq", "def heappop(heap):", 40), False),
        Task(
            "rewrite",
            "colorsys",
            "Add type hints to these Python functions and change nothing else. Reply with the "
            f"whole code only.\n\n```python\n{from_line('colorsys', 'def rgb_to_yiq', 50)}\n```",
        ),
        Task("answer", "search", "When is bisect faster than a linear search?"),
    ]


def build_index() -> None:
    """Index the standard library, unless there already is a usable index."""
    with suppress(IndexerError):
        Index.open(INDEX).close()
        return
    sources = sorted(path for path in STDLIB.iterdir() if path.name not in NOT_STDLIB)
    kept = [str(path) for path in sources if path.is_dir() or path.suffix == ".py"]
    build = [sys.executable, "-m", "indexer", "build", "--overwrite", "--json"]
    command = [*build, *kept, "--output", str(INDEX)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    console.print(
        f"{report['documents']:,} documents, {report['tokens']:,} tokens "
        f"in {report['seconds']:.0f} s"
    )


@contextmanager
def draft_service() -> Iterator[str]:
    """Serve the index from a separate process, and yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/drafts.sock"
        command = [sys.executable, "-m", "retriever", "serve"]
        options = ["--index", str(INDEX), "--address", address, "--log-level", "warning"]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        try:
            # The line comes when kernels are warm and drafts are served.
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise SystemExit("error: the draft service did not start; see above")
            yield address
        finally:
            process.terminate()
            process.wait()


def run(
    ways: dict[str, Contender], language_model: LanguageModel, task: Task, order: tuple[str, str]
) -> dict[str, Any]:
    """Do one task plainly and with drafts, in the given order, and return the figures."""
    if task.is_chat:
        prompt = language_model.encode(task.prompt)
    else:
        prompt = list(language_model.tokenizer.encode(task.prompt))
    runs: dict[str, Run] = {name: ways[name]([prompt], remember=True) for name in order}
    plain, drafted = runs[PLAIN], runs[FOREDRAFT]
    pace = {name: len(done.token_ids) / done.seconds for name, done in runs.items()}
    return {
        "task": f"{task.kind} {task.name}",
        "tokens": len(drafted.token_ids),
        "plain_tokens_per_s": pace[PLAIN],
        "tokens_per_s": pace[FOREDRAFT],
        "ratio": pace[FOREDRAFT] / pace[PLAIN],
        "tokens_per_step": len(drafted.token_ids) / drafted.num_passes,
        "drafted_from": drafted.statistics.accepted_by_source(),
        "identical": drafted.token_ids == plain.token_ids,
    }


def pace_in_words(row: dict[str, Any]) -> str:
    """Return one line with the effect of drafts on a task."""
    return (
        f"{row['plain_tokens_per_s']:6.1f} tokens/s plainly, {row['tokens_per_s']:5.1f} with "
        f"drafts: {row['ratio']:.2f}x"
    )


def print_table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Print the figures as a table."""
    title = f"{facts['model']}, {facts['dtype']}, {facts['machine']['num_cpus']} cores, greedy"
    caption = (
        "plain, draft: tokens/s; tok: per step; context to own: drafted tokens accepted\n"
        "from each, own: what the model found likely before"
    )
    table = Table(title=title, caption=caption, box=None, padding=(0, 1, 0, 0))
    table.add_column("task", no_wrap=True)
    for heading in ("plain", "draft", "ratio", "tok", *SOURCES.values(), "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}x",
            f"{row['tokens_per_step']:.2f}",
            *(str(row["drafted_from"].get(name, 0)) for name in SOURCES),
            "yes" if row["identical"] else "NO",
        )
    Console().print(table)
    ratio = median(row["ratio"] for row in rows)
    same = all(row["identical"] for row in rows)
    print(f"{ratio:.1f}x plain decoding (median); {'all' if same else 'NOT all'} outputs identical")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:
        console.print(
            f"Other programs kept the processors busy (load {load:.0f} on {cores}): times, "
            "and so ratios, say little. Tokens per step do not depend on that."
        )


def main(
    *,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each task.")] = 128,
    limit: Annotated[int, typer.Option(min=1, help="Do only the first tasks.")] = 99,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode real tasks plainly and with drafts, and compare."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    console.print(f"[bold]1/3[/] index the standard library of Python {version}")
    build_index()
    console.print("[bold]2/3[/] serve the index over gRPC")
    with draft_service() as address:
        console.print(f"[bold]3/3[/] decode with {DEFAULT_MODEL}, plainly and with drafts")
        console.print("loading the model")
        language_model = load_model(ModelOptions(DEFAULT_MODEL))
        with connect_drafter(DraftOptions(server=[address]), language_model) as drafter:
            decoder = assemble(language_model, drafter)
            ways = contenders(language_model, decoder, max_new_tokens)
            selected = tasks()[:limit]
            for contender in ways.values():
                contender([language_model.encode("Count from one to ten.")], remember=False)
            rows = []
            for number, task in enumerate(selected, start=1):
                name = f"{task.kind} {task.name}"
                console.print(f"  {number}/{len(selected)} {name:18}", end="")
                order = (PLAIN, FOREDRAFT) if number % 2 else (FOREDRAFT, PLAIN)
                rows.append(run(ways, language_model, task, order))
                console.print(pace_in_words(rows[-1]))
    facts = circumstances(language_model)
    if as_json:
        print(json.dumps({"tasks": rows, **facts}))
    else:
        print_table(rows, facts)
    if not all(row["identical"] for row in rows):
        raise SystemExit("error: an output differs from plain decoding")


if __name__ == "__main__":
    typer.run(main)
