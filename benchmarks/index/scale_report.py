"""What an index of a billion tokens cost, for people: first what did not reach its aim."""

from collections.abc import Iterator
from typing import Any, Final

BILLION: Final = 1_000_000_000

MOST_MEMORY_MIB: Final = 3814
"""Four GB."""
LEAST_TOKENS_PER_S: Final = 300_000
MOST_BYTES_PER_TOKEN: Final = 7.5
MOST_DRAFT_RATIO: Final = 1.5

_MIB: Final = 1 << 20
_BUILD_HEADER: Final = (
    "| index | tokens | segments | s | tokens/s | processor, s "
    "| reading, s | sorting, s | counting, s "
    "| bytes per token | memory, MiB | mapped files, MiB | disk, MiB |"
)
_DRAFT_HEADER: Final = (
    "| index | segments | tokens per step | warm, \u00b5s: p50 | p90 | p99 "
    "| first draft, cold, \u00b5s: p50 | p90 | later ones: p50 | p90 | opening, ms |"
)
_LATER_DRAFTS: Final = (
    ("drafts_added", "large", "large, added to"),
    ("drafts_compacted", "large", "large, compacted"),
    ("drafts_joined", "large", "large, in one segment"),
    ("drafts_joined", "small", "small, beside that"),
    ("drafts_held", "large", "large, in one segment, held"),
    ("drafts_held", "small", "small, held, beside that"),
)
_STAGES: Final = ("reading", "sorting", "counting")


def judged(done: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the aims whose figures are there, those that were missed first.

    Args:
        done: what has been measured so far, by step.
    """
    gates = [*_of_build(done), *_of_drafts(done)]
    for gate in gates:
        is_least = gate["rule"] == "at least"
        gate["met"] = (gate["figure"] >= gate["aim"]) if is_least else gate["figure"] <= gate["aim"]
    return sorted(gates, key=lambda gate: bool(gate["met"]))


def _of_build(done: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "large" not in done:
        return
    large = done["large"]
    peak = _most(large, "memory_mib")
    yield _gate("peak memory of the process tree, MiB", peak, "at most", MOST_MEMORY_MIB)
    rate = large["report"]["tokens"] / build_seconds(large)
    yield _gate(
        "tokens/s from text to index, the killed run included",
        round(rate),
        "at least",
        LEAST_TOKENS_PER_S,
    )
    per_token = large["bytes_on_disk"] / large["report"]["tokens"]
    yield _gate(
        "bytes per token, with tables", round(per_token, 2), "at most", MOST_BYTES_PER_TOKEN
    )


def _of_drafts(done: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "drafts" not in done:
        return
    small, large = (done["drafts"][name]["warm"]["draft_us"]["p50"] for name in ("small", "large"))
    yield _gate(
        "median draft, warm, to that of the small index",
        round(large / small, 2),
        "at most",
        MOST_DRAFT_RATIO,
    )


def _gate(name: str, figure: float, rule: str, aim: float) -> dict[str, Any]:
    return {"name": name, "figure": figure, "rule": rule, "aim": aim}


def build_seconds(built: dict[str, Any]) -> float:
    """Return what a build took by the clock: all runs until it was whole."""
    return float(sum(run["seconds"] for run in built["runs"]))


def _most(built: dict[str, Any], figure: str) -> float:
    """Return the most of a figure in all runs of a build."""
    return float(max(run[figure] for run in built["runs"]))


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report for people, of as many steps as there are."""
    parts = [
        _heading(report),
        _losses(report["gates"]),
        *(_text(report["text"]) if "text" in report else ()),
        *(_builds(report) if "large" in report else ()),
        *(_drafts(report) if "drafts" in report else ()),
        *(_changes(report) if "add" in report else ()),
        *(_for_a_billion(report) if "large" in report else ()),
    ]
    return "\n\n".join(parts) + "\n"


def _heading(report: dict[str, Any]) -> str:
    plan = report["plan"]
    machine = f"{report['machine']}, {report['cores']} cores, load {report['load']} at the start"
    return (
        f"# An index of {plan['tokens']:,} tokens\n\n{machine}; --memory {plan['memory']}, "
        f"--segment-tokens {plan['segment_tokens']}, --workers {plan['workers']}, "
        f"{plan['tokenizer']}."
    )


def _losses(gates: list[dict[str, Any]]) -> str:
    lines = ["| aim | measured | aimed at | |", "|---" * 4 + "|"]
    for gate in gates:
        verdict = "met" if gate["met"] else "**missed**"
        aim = f"{gate['rule']} {gate['aim']:,}"
        lines.append(f"| {gate['name']} | {gate['figure']:,} | {aim} | {verdict} |")
    return "\n".join(lines)


def _text(text: dict[str, Any]) -> Iterator[str]:
    shares = text["distinct_ngram_shares"]
    rows = [
        f"| {name} | " + " | ".join(f"{share:.3f}" for share in of.values()) + " |"
        for name, of in shares.items()
    ]
    orders = " | ".join(str(order) for order in shares["real"])
    yield (
        f"{text['documents']:,} documents; {text['made_share']:.0%} of the text was made: real "
        "documents rewritten, with other names, numbers and order of paragraphs. How many of all "
        "n-grams are distinct, in real text and in two rewritings of half as much:"
    )
    yield "\n".join([f"| tokens | {orders} |", "|---" * (len(shares["real"]) + 1) + "|", *rows])


def _builds(report: dict[str, Any]) -> Iterator[str]:
    names = [name for name in ("small", "real", "large") if name in report]
    lines = [
        _BUILD_HEADER,
        "|---" * 13 + "|",
        *(_build_row(name, report[name]) for name in names),
    ]
    yield "\n".join(lines)
    yield (
        "Memory is what the system cannot take back, of all processes at one moment; disk is the "
        "most that all indexes here and their temporary files took, text not counted. Small: one "
        "document in so many of the large one's; real: the same, of real ones alone. Seconds are "
        "by the clock, of all runs, beside whatever else the machine did; processor seconds are "
        "of all processes."
    )
    large = report["large"]
    by_stage = [
        (stage, max(run["memory_mib_by_stage"].get(stage, 0.0) for run in large["runs"]))
        for stage in _STAGES
    ]
    stages = ", ".join(f"{stage} {mib:,.0f}" for stage, mib in by_stage)
    yield f"Memory of the large build by stage, MiB: {stages}."
    yield " ".join(_ends(large["runs"]))


def _ends(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Say how each run of a build ended."""
    for run in runs:
        if "killed_in" in run:
            yield (
                f"The large build was killed (SIGKILL, the whole tree) while {run['killed_in']}, "
                f"after {run['seconds']:,.0f} s, and begun again with --resume."
            )
        elif "interrupted" in run:
            yield f"One run was interrupted with the benchmark after {run['seconds']:,.0f} s."
        else:
            yield f"The last run was whole after {run['seconds']:,.0f} s."
        if run["suspended_s"]:
            yield f"For {run['suspended_s']:,.0f} s more all was suspended."


def _build_row(name: str, built: dict[str, Any]) -> str:
    done, seconds = built["report"], build_seconds(built)
    processor = sum(run["processor_s"] for run in built["runs"])
    stages = " | ".join(f"{_stage_seconds(built, stage):,.1f}" for stage in _STAGES)
    figures = ("memory_mib", "mapped_files_mib", "disk_mib")
    sizes = " | ".join(f"{_most(built, figure):,.0f}" for figure in figures)
    return (
        f"| {name} | {done['tokens']:,} | {done['segments']} | {seconds:,.0f} "
        f"| {done['tokens'] / seconds:,.0f} | {processor:,.0f} | {stages} "
        f"| {built['bytes_on_disk'] / done['tokens']:.2f} | {sizes} |"
    )


def _stage_seconds(built: dict[str, Any], stage: str) -> float:
    """Return the seconds of a stage by the watch, in all runs."""
    return sum(float(run["seconds_by_stage"].get(stage, 0.0)) for run in built["runs"])


def _drafts(report: dict[str, Any]) -> Iterator[str]:
    drafts = report["drafts"]
    names = [name for name in ("small", "real", "large") if name in drafts]
    lines = [
        _DRAFT_HEADER,
        "|---" * 11 + "|",
    ]
    rows = [(name, drafts[name]) for name in names]
    for step, of, name in _LATER_DRAFTS:
        if step in report:
            rows.append((name, report[step][of]))
    yield "\n".join([*lines, *(_draft_row(name, figures) for name, figures in rows)])
    cold = drafts[names[-1]]["cold"]
    yield (
        f"{drafts['traces']} held-out real documents at {drafts['budget']} nodes; cold: "
        f"{cold['sequences']} sequences, the index dropped from the page cache before each (at "
        f"most {cold['cached_share_before']:.1%} of its pages were left). Held: copies of the "
        "files in large pages of memory (`--hold-indexes`)."
    )


def _draft_row(name: str, figures: dict[str, Any]) -> str:
    warm = figures["warm"]
    times = " | ".join(f"{warm['draft_us'][key]:,.1f}" for key in ("p50", "p90", "p99"))
    drafts = " | ".join(_cold_cells(figures["cold"]) if "cold" in figures else 5 * [""])
    return f"| {name} | {warm['segments']} | {warm['tokens_per_step']:.3f} | {times} | {drafts} |"


def _cold_cells(cold: dict[str, Any]) -> Iterator[str]:
    for kind in ("first_draft_us", "later_drafts_us"):
        yield from (f"{cold[kind][key]:,.0f}" for key in ("p50", "p90"))
    yield f"{cold['opening_ms']:,.1f}"


def _changes(report: dict[str, Any]) -> Iterator[str]:
    lines = [
        "| change | tokens | segments after | s | memory, MiB | disk, MiB |",
        "|---" * 6 + "|",
    ]
    for verb in ("add", "compact", "join"):
        if verb in report:
            done, (run,) = report[verb]["report"], report[verb]["runs"]
            lines.append(
                f"| {verb} | {done['tokens']:,} | {done['segments']} | {run['seconds']:,.0f} "
                f"| {run['memory_mib']:,.0f} | {run['disk_mib']:,.0f} |"
            )
    yield "\n".join(lines)
    if "verify" in report:
        findings = report["verify"]["report"]["findings"]
        yield (f"Verified in {build_seconds(report['verify']):,.0f} s: {len(findings)} findings.")


def _for_a_billion(report: dict[str, Any]) -> Iterator[str]:
    large = report["large"]
    tokens = large["report"]["tokens"]
    if tokens >= BILLION:
        return
    factor = BILLION / tokens
    changes = [report[verb] for verb in ("large", "add", "compact") if verb in report]
    disk = max(_most(each, "disk_mib") for each in changes) * factor
    processor = sum(run["processor_s"] for run in large["runs"]) * factor
    text = report["text"]["characters"] * factor / _MIB
    yield (
        f"In proportion, which is not a measurement, a billion tokens take "
        f"{build_seconds(large) * factor / 3600:.1f} hours to build here "
        f"({processor / 3600:.1f} of a processor), {disk / 1024:,.1f} GiB of disk for indexes and "
        f"temporary files, and {text / 1024:,.1f} GiB for the text."
    )
