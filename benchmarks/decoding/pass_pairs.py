"""Passes of the target in two checkouts, in turn: what a change of the target costs or saves.

`python -m benchmarks.decoding.pass_pairs OTHER_CHECKOUT` times passes of 1, 4, 16 and 64 rows
behind 512 tokens, of the default model. Both sides stay loaded and are asked in turns, so that what
else the machine does counts for both; a ratio is the median of those of the rounds.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Annotated, Any, Final

import numpy as np
import typer

WIDTHS: Final = (1, 4, 16, 64)
CONTEXT: Final = 512
_PASSES: Final = 7


def main(
    other: Annotated[Path, typer.Argument(help="The checkout to compare this one with.")],
    *,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 12,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time passes of two checkouts, in turn."""
    here = Path(__file__).resolve().parents[2]
    sides = [_started(root, precision, threads) for root in (other.resolve(), here)]
    found: list[list[dict[str, float]]] = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        times = {at: _asked(sides[at]) for at in order}
        found.append([times[0], times[1]])
    for side in sides:
        side.kill()
    rows = [_row(str(width), found) for width in WIDTHS]
    if as_json:
        about = {"precision": precision, "rounds": rounds, "threads": threads, "context": CONTEXT}
        print(json.dumps({**about, "rows": rows}, indent=1))
        return
    for row in rows:
        print(
            f"{row['width']:>3} rows: {row['other_ms']:.1f} ms there, {row['own_ms']:.1f} here, "
            f"{row['ratio']:.3f} times as long"
        )


def _row(width: str, found: list[list[dict[str, float]]]) -> dict[str, Any]:
    there, here = ([pair[side][width] for pair in found] for side in range(2))
    ratio = statistics.median(own / other for own, other in zip(here, there, strict=True))
    medians = {"other_ms": statistics.median(there), "own_ms": statistics.median(here)}
    return {"width": int(width), **{k: round(v, 2) for k, v in medians.items()}, "ratio": ratio}


def _started(root: Path, precision: str, threads: int) -> "subprocess.Popen[str]":
    """Return a process of a checkout that times passes whenever it is asked."""
    command = [sys.executable, str(Path(__file__).resolve()), precision, str(threads)]
    side = subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _line_of(side)
    return side


def _asked(side: "subprocess.Popen[str]") -> dict[str, float]:
    given: IO[str] = side.stdin  # type: ignore[assignment]  # a pipe
    given.write("\n")
    given.flush()
    times: dict[str, float] = json.loads(_line_of(side))
    return times


def _line_of(side: "subprocess.Popen[str]") -> str:
    told: IO[str] = side.stdout  # type: ignore[assignment]  # a pipe
    line = told.readline()
    if not line:
        sys.exit(f"error: a side ended with status {side.wait()}")
    return line


def serve(precision: str, threads: int) -> None:
    """Print the least milliseconds of a pass of each width, for each line of standard input."""
    import torch  # noqa: PLC0415  of the checkout that is timed

    from decoder.model.pretrained import ModelOptions, Precision, load_model  # noqa: PLC0415
    from decoder.model.target import Target  # noqa: PLC0415
    from indexer.tokenizer import DEFAULT_MODEL  # noqa: PLC0415
    from retriever.tree import DraftTree  # noqa: PLC0415

    torch.set_num_threads(threads)
    options = ModelOptions(DEFAULT_MODEL, precision=Precision(precision))
    target = Target(load_model(options).model)
    prompt = np.arange(5, 40, dtype=np.int32)
    for _ in range(20):
        target.prefill(prompt)
    target.pretend(CONTEXT)
    nodes = [np.arange(width - 1) for width in WIDTHS]
    trees = [
        DraftTree.checked(
            (at + 100).tolist(), (at // 2 - 1).tolist(), np.linspace(0.9, 0.1, len(at)), 0 * at
        )
        for at in nodes
    ]

    def seconds(tree: DraftTree) -> float:
        target.rewind()
        began_s = time.perf_counter()
        target.verify(7, tree)
        return time.perf_counter() - began_s

    print("ready", flush=True)
    for _ in sys.stdin:
        least = {
            width: 1e3 * min(seconds(tree) for _ in range(_PASSES))
            for width, tree in zip(WIDTHS, trees, strict=True)
        }
        print(json.dumps(least), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():  # noqa: PLR2004  as `_started` says
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        typer.run(main)
