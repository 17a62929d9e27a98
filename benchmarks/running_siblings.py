"""Measures what sequences that run at once bring one another, and what older versions cost.

    python -m benchmarks.running_siblings --workload NAME=FILE[,warm=FILE]... --output FILE

Records of a `group` are replayed together, some lanes at once, as `foredraft replay --lanes` does:
with nothing remembered, with outputs remembered as they are closed, and as one group. `,lane=id`
takes an agent's turns as one lane: records whose `id` differs in its last part alone; `,least=N`
leaves out groups of fewer lanes. `--change
NAME=BEFORE,NOW` replays the second half of NOW after another model's outputs, BEFORE.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks.comparison import circumstances
from indexer.reader import Index
from retriever.drafter import DraftRequest, Kin, TokenIds
from retriever.replay.replay import Lane, ReplayReport, replay_lanes
from retriever.replay.traces import ChatEncoder, Trace
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree

_BUDGETS: Final = (8, 32, 64)


class _Alone:
    """A drafter that takes no groups, and remembers outputs or not."""

    def __init__(self, drafter: EmbeddedDrafter, kin: Kin, *, remember: bool) -> None:
        self._drafter = drafter
        self._kin = kin
        self._remember = remember

    def open(self, session: str, prompt: TokenIds, **_: object) -> None:
        self._drafter.open(
            session,
            prompt,
            remember=self._remember,
            policy_version=self._kin.policy_version,
            oldest_version=self._kin.oldest_version,
        )

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return self._drafter.draft(requests)

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        self._drafter.close(session, new_tokens)


def main(  # noqa: PLR0913, PLR0917  (options of a command)
    workload: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE[,warm=FILE][,lane=id][,least=N]. Repeatable."),
    ] = None,
    change: Annotated[list[str] | None, typer.Option(help="NAME=BEFORE,NOW. Repeatable.")] = None,
    index: Annotated[Path | None, typer.Option(help="An index to draft from, too.")] = None,
    lanes: Annotated[list[int] | None, typer.Option(help="Lanes at once. Repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most records of each file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measure tokens per step of sequences that run at once, and after a change of policy."""
    encoder = ChatEncoder(None)
    figures: dict[str, Any] = {"circumstances": circumstances(), "lanes": {}, "changes": {}}
    for stated in workload or ():
        name, _, parts = stated.partition("=")
        groups, warm = _groups(parts.split(","), encoder, limit)
        runs = _of_lanes(groups, warm, index, lanes or [4])
        figures["lanes"][name] = {"groups": len(groups), **runs}
        print(name, json.dumps(figures["lanes"][name]), flush=True)
    for stated in change or ():
        name, _, parts = stated.partition("=")
        before, now = (_read(Path(each), encoder, limit) for each in parts.split(","))
        figures["changes"][name] = _of_change(before, now, index)
        print(name, json.dumps(figures["changes"][name]), flush=True)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")


def _of_lanes(
    groups: list[list[Lane]], warm: list[TokenIds], index: Path | None, lanes: Sequence[int]
) -> dict[str, Any]:
    """Replay groups in all ways; return tokens per step and the time of a draft."""
    found: dict[str, Any] = {}
    for budget in _BUDGETS:
        of_budget = found[f"{budget} nodes"] = {}
        of_budget["one after another, nothing remembered"] = _figures(
            replay_lanes(_Alone(_drafter(warm, index), Kin(), remember=False), groups, budget, 1)
        )
        of_budget["one after another"] = _figures(
            replay_lanes(_Alone(_drafter(warm, index), Kin(), remember=True), groups, budget, 1)
        )
        for each in lanes:
            alone = _Alone(_drafter(warm, index), Kin(), remember=True)
            of_budget[f"{each} at once"] = _figures(replay_lanes(alone, groups, budget, each))
            grouped = _drafter(warm, index)
            of_budget[f"{each} at once, as a group"] = _figures(
                replay_lanes(grouped, groups, budget, each)
            )
    return found


def _of_change(
    before: list[tuple[str, str, Trace]], now: list[tuple[str, str, Trace]], index: Path | None
) -> dict[str, Any]:
    """Replay the second half of the newer outputs behind what is remembered by then."""
    middle = len(now) // 2
    fresh = [trace.output for _, _, trace in now[:middle]]
    stale = [trace.output for _, _, trace in before[:middle]]
    same_prompts = [trace.output for _, _, trace in before[middle:]]
    histories: dict[str, tuple[list[tuple[int, list[TokenIds]]], Kin, bool]] = {
        "none": ([], Kin(), False),
        "its own from then on": ([], Kin(), True),
        "its own": ([(2, fresh)], Kin(policy_version=2), True),
        "another version's, and its own from then on": (
            [(1, stale)],
            Kin(policy_version=2),
            True,
        ),
        "the same, three versions older": ([(1, stale)], Kin(policy_version=4), True),
        "the same, dropped": ([(1, stale)], Kin(policy_version=2, oldest_version=2), True),
        "another version's to the same prompts, and its own from then on": (
            [(1, same_prompts)],
            Kin(policy_version=2),
            True,
        ),
        "another version's and its own": ([(1, stale), (2, fresh)], Kin(policy_version=2), True),
    }
    found: dict[str, Any] = {}
    for name, (history, kin, remember) in histories.items():
        of_name = found[name] = {}
        for budget in _BUDGETS:
            drafter = _drafter([], index)
            for version, outputs in history:
                for output in outputs:
                    drafter.open("w", output[:0], policy_version=version)
                    drafter.close("w", output)
            rows = [[_lane_of([trace])] for _, _, trace in now[middle:]]
            report = replay_lanes(_Alone(drafter, kin, remember=remember), rows, budget, 1)
            of_name[f"{budget} nodes"] = _figures(report)["tokens_per_step"]
    return found


def _figures(report: ReplayReport) -> dict[str, float]:
    return {
        "tokens_per_step": round(report.tokens / report.steps, 4),
        "draft_us": round(float(np.median(report.draft_us)), 1),
    }


def _drafter(warm: Sequence[TokenIds], index: Path | None) -> EmbeddedDrafter:
    drafter = EmbeddedDrafter([Index.open(index)] if index is not None else [])
    for output in warm:
        drafter.remember(output)
    return drafter


def _groups(
    parts: list[str], encoder: ChatEncoder, limit: int | None
) -> tuple[list[list[Lane]], list[TokenIds]]:
    """Return the lanes of each group of a file, and the outputs that count as recent."""
    options = [each.split("=", 1) for each in parts[1:]]
    by_id = ["lane", "id"] in options
    least = max([1, *(int(value) for name, value in options if name == "least")])
    warm = [
        trace.output
        for name, value in options
        if name == "warm"
        for _, _, trace in _read(Path(value), encoder, None)
    ]
    rows = _read(Path(parts[0]), encoder, limit)
    groups: dict[str, dict[str, list[Trace]]] = {}
    for number, (group, record_id, trace) in enumerate(rows):
        lane = record_id.rsplit("/", 1)[0] if by_id else str(number)
        groups.setdefault(group or str(number), {}).setdefault(lane, []).append(trace)
    some = [each.values() for each in groups.values() if len(each) >= least]
    return [[_lane_of(lane) for lane in each] for each in some], warm


def _lane_of(traces: list[Trace]) -> Lane:
    return lambda: iter(traces)


def _read(path: Path, encoder: ChatEncoder, limit: int | None) -> list[tuple[str, str, Trace]]:
    """Return the group, the id and the trace of each record with a prompt and an output."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    rows = []
    for line in text.splitlines()[:limit]:
        record = json.loads(line)
        prompt = encoder.encode_prompt(record.get("prompt", ""))
        written = encoder.encode_output(record["output"])
        trace = Trace(np.array(prompt, np.int32), np.array(written, np.int32))
        rows.append((str(record.get("group", "")), str(record.get("id", "")), trace))
    return rows


if __name__ == "__main__":
    typer.run(main)
