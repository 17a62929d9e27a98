"""The answers and runs that a benchmark stores, so that an interrupted one can continue."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from benchmarks.engines.engine_report import Run
from decoder.commands.prompts import Prompt


def kept_answers(
    path: Path | None, prompts: Sequence[Prompt], answer: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the token ids that an engine answers prompts with.

    Args:
        path: a file of JSON where answers are kept, each as soon as it is there; `None` for none.
        prompts: what is answered.
        answer: gives the new tokens for a prompt's text, where the file has none.
    """
    is_kept = path is not None and path.exists()
    kept: dict[str, list[int]] = json.loads(path.read_text("utf-8")) if is_kept and path else {}
    for prompt in prompts:
        if prompt.text not in kept:
            kept[prompt.text] = answer(prompt.text)
            if path is not None:
                path.write_text(json.dumps(kept), encoding="utf-8")
    return [kept[prompt.text] for prompt in prompts]


class KeptRuns:
    """Runs of the prompts that were decoded, by the ways in which they were.

    Args:
        path: a file of JSON where they are kept, prompt by prompt; `None` for none.

    Attributes:
        done: prompt's text to its runs, by the name of the way.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.done: dict[str, dict[str, Run]] = {}
        if path is not None and path.exists():
            for text, runs in json.loads(path.read_text("utf-8")).items():
                self.done[text] = {name: Run(*run) for name, run in runs.items()}

    def outputs_of(self, way: str) -> list[list[int]]:
        """Return what a way made of its prompts, in order: what its drafter has seen."""
        return [runs[way].token_ids for runs in self.done.values() if way in runs]

    def add(self, text: str, runs: Mapping[str, Run]) -> None:
        """Keep runs of a prompt, in addition to those that it has."""
        self.done[text] = {**self.done.get(text, {}), **runs}
        if self._path is not None:
            rows = {
                text: {name: astuple(run) for name, run in ways.items()}
                for text, ways in self.done.items()
            }
            self._path.write_text(json.dumps(rows), encoding="utf-8")
