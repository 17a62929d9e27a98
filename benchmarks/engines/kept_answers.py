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
        path: JSON file that stores each answer as soon as it is complete; `None` for no file.
        prompts: the prompts.
        answer: returns the new tokens for a prompt's text; called if the file lacks them.
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
    """Runs of decoded prompts, by method.

    Args:
        path: JSON file that stores the runs, prompt by prompt; `None` for no file.

    Attributes:
        done: runs by the text of the prompt, and then by the name of the method.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.done: dict[str, dict[str, Run]] = {}
        if path is not None and path.exists():
            for text, runs in json.loads(path.read_text("utf-8")).items():
                self.done[text] = {name: Run(*run) for name, run in runs.items()}

    def outputs_of(self, way: str) -> list[list[int]]:
        """Return the outputs of a method, in order; its drafter has seen these."""
        return [runs[way].token_ids for runs in self.done.values() if way in runs]

    def add(self, text: str, runs: Mapping[str, Run]) -> None:
        """Store runs of a prompt, in addition to its earlier runs."""
        self.done[text] = {**self.done.get(text, {}), **runs}
        if self._path is not None:
            rows = {
                text: {name: astuple(run) for name, run in ways.items()}
                for text, ways in self.done.items()
            }
            self._path.write_text(json.dumps(rows), encoding="utf-8")
