"""What a first start takes where no kernel is kept: `python -m benchmarks.first_starts`.

Each part runs in a process of its own, with an empty folder for kernels and once more with all of
them. Told are seconds by the clock and of processors; what an engine has compiled beside is not in
them, as it goes on after its end. Another checkout's are taken in turn.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer

HERE: Final = Path(__file__).resolve().parents[1]
_TOKENS: Final = 40


def first_draft() -> None:
    """Open a drafter, draft once, and end the sequence."""
    import numpy as np  # noqa: PLC0415  (of the checkout that is measured, as all below)

    from retriever.drafter import DraftRequest  # noqa: PLC0415
    from retriever.sessions.embedded import EmbeddedDrafter  # noqa: PLC0415

    drafter, tokens = EmbeddedDrafter(), np.arange(300, dtype=np.int32) % 50
    drafter.open("a", tokens)
    drafter.draft([DraftRequest("a", tokens[:2], len(tokens) + 2, 8)])
    drafter.close("a")
    drafter.shut_down()


def everything() -> None:
    """Have all kernels of retrieval ready."""
    from retriever.sessions.embedded import EmbeddedDrafter  # noqa: PLC0415

    drafter = EmbeddedDrafter()
    drafter.warm()
    drafter.shut_down()


def plain_llama_cpp() -> None:
    """Load a model in llama.cpp and write some tokens."""
    _written(_llama())


def llama_cpp() -> None:
    """Do so with drafts."""
    from foredraft import EmbeddedDrafter  # noqa: PLC0415
    from foredraft.llama_cpp import attach  # noqa: PLC0415

    llm, drafter = _llama(), EmbeddedDrafter()
    attach(llm, drafter, measure=False)
    _written(llm)


def _llama() -> Any:
    import llama_cpp  # noqa: PLC0415

    return llama_cpp.Llama(sys.argv[2], n_ctx=512, logits_all=True, verbose=False, n_threads=1)


def _written(llm: Any) -> None:
    prompt = llm.tokenize(b"The history of the steam engine begins with")
    list(islice(llm.generate(prompt, temp=0.0), _TOKENS))


PARTS: Final[dict[str, Callable[[], None]]] = {
    "everything": everything,
    "first draft": first_draft,
    "llama.cpp, plain": plain_llama_cpp,
    "llama.cpp": llama_cpp,
}


def spent(part: str, root: Path, kernels: Path, *arguments: str) -> tuple[float, float]:
    """Return the seconds of a part by the clock, and of the processors that worked for it."""
    began_s, before = time.perf_counter(), os.times()
    subprocess.run(
        [sys.executable, __file__, part, *arguments],
        env=os.environ | {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(kernels)},
        cwd=root,
        check=True,
        stdout=subprocess.DEVNULL,  # no pipe: what compiles beside would hold it open
        stderr=subprocess.DEVNULL,
    )
    after = os.times()
    of_children = after.children_user + after.children_system
    return (
        time.perf_counter() - began_s,
        of_children - before.children_user - before.children_system,
    )


def main(
    against: Annotated[Path | None, typer.Option(help="Root of another checkout.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="A model, to start llama.cpp with.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measure first starts."""
    roots = {"ours": HERE, **({} if against is None else {"against": against.resolve()})}
    given = [] if gguf is None else [str(gguf.resolve())]
    parts = [part for part in PARTS if gguf is not None or not part.startswith("llama.cpp")]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        filled = {name: Path(folder) / name for name in roots}
        for part in parts:
            for name, root in roots.items():
                with tempfile.TemporaryDirectory() as unused:
                    empty = filled[name] if part == "everything" else Path(unused)
                    measured = {
                        "empty": spent(part, root, empty, *given),
                        "kept": spent(part, root, filled[name], *given),
                    }
                found[f"{part}, {name}"] = {
                    state: {"clock_s": round(clock_s, 2), "processor_s": round(processor_s, 2)}
                    for state, (clock_s, processor_s) in measured.items()
                }
                print(f"{part}, {name}: {json.dumps(found[f'{part}, {name}'])}", flush=True)
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in PARTS:
        PARTS[sys.argv[1]]()
    else:
        typer.run(main)
