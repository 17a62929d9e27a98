"""One vLLM engine in a process of its own: `python -m tests.decoder.plugins.vllm.engine REPORT`.

It reads a job as JSON from standard input and writes what it saw to the file.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

OURS = "foredraft.vllm.ForedraftProposer"


class NeverProposes:
    """A proposer that proposes nothing: with it all should be as without one."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *_: Any) -> None:
        """Load nothing."""

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled]


class Watched:
    """Stands before a proposer, and compares each sequence that is drafted for with the rows.

    Attributes:
        num_rows: rows that were shown.
        num_asked: rows that were drafted for.
        num_moved: requests that were shown in another row than before.
        mixed_up: what the drafter was told and no row holds.
        most_sessions: sequences that were held at once.
        proposed: tokens.
    """

    def __init__(self, proposer: Any, runner: Any) -> None:
        self.proposer = proposer
        self.num_rows = self.num_asked = self.num_moved = 0
        self.mixed_up: list[str] = []
        self.most_sessions = 0
        self.proposed = 0
        self._runner = runner
        self._rows: dict[str, int] = {}
        self._told: dict[str, list[int]] = {}
        self._asked: list[list[int]] = []
        self._watch(proposer.drafter)

    def propose(
        self, sampled: list[list[int]], lengths: Any, table: Any, **others: Any
    ) -> list[list[int]]:
        self._asked = []
        chains: list[list[int]] = self.proposer.propose(sampled, lengths, table, **others)
        rows = [table[slot, : lengths[slot]].tolist() for slot, new in enumerate(sampled) if new]
        self.num_rows += len(rows)
        self.num_asked += len(self._asked)
        for tokens in self._asked:
            if tokens in rows:
                rows.remove(tokens)  # of each row for one draft
            else:
                self.mixed_up.append(f"{len(tokens)} tokens that no row holds")
        self._count_moves()
        self.proposed += sum(len(chain) for chain in chains)
        self.most_sessions = max(self.most_sessions, len(self.proposer.sessions))
        return chains

    def _count_moves(self) -> None:
        rows = {name: row for row, name in enumerate(self._runner.input_batch.req_ids)}
        self.num_moved += sum(self._rows.get(name, row) != row for name, row in rows.items())
        self._rows |= rows

    def _watch(self, drafter: Any) -> None:
        """Note what a drafter is told of each session, and what it is asked to draft behind."""
        begin, draft = drafter.open, drafter.draft

        def noting_open(session: str, prompt: Any, *options: Any) -> None:
            begin(session, prompt, *options)
            self._told[session] = prompt.tolist()

        def noting_draft(requests: Any) -> Any:
            for each in requests:
                self._told[each.session] += each.new_tokens.tolist()
                self._asked.append(list(self._told[each.session]))
            return draft(requests)

        drafter.open, drafter.draft = noting_open, noting_draft


def start(job: dict[str, Any]) -> LLM:
    """Start an engine as a user would; in this process if it is to be watched."""
    speculative = None
    if "num_speculative_tokens" in job:
        speculative = {
            "method": "custom_class",
            "model": job.get("proposer", OURS),
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    return LLM(
        job["model"],
        dtype=job.get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=job.get("max_model_len", 512),
        max_num_seqs=8,
        seed=0,
        disable_log_stats=False,
        enable_prefix_caching=job.get("enable_prefix_caching", True),
        num_gpu_blocks_override=job.get("num_blocks"),
        block_size=job.get("block_size"),
        kv_cache_memory_bytes=1 << 28,
        speculative_config=speculative,
        **job.get("more", {}),
        additional_config={"foredraft": job.get("settings", {})},
    )


def watched(llm: LLM) -> Watched:
    """Put a watcher before the proposer of an engine in this process."""
    core: Any = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    watcher = Watched(runner.drafter, runner)
    runner.drafter = watcher
    return watcher


def outcome(output: Any) -> dict[str, Any]:
    """Return what was generated, and by how much each token was more probable than the next."""
    completion = output.outputs[0]
    gaps = []
    for step in completion.logprobs or []:
        best = sorted((entry.logprob for entry in step.values()), reverse=True)
        gaps.append(best[0] - best[1])
    return {"tokens": list(completion.token_ids), "gaps": gaps, "end": completion.finish_reason}


def counts(llm: LLM) -> dict[str, float]:
    """Return vLLM's own figures of speculation, and of preemption."""
    kept = ("spec_decode", "preemptions", "generation_tokens")
    return {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if any(name in metric.name for name in kept) and hasattr(metric, "value")
    }


def exposed() -> dict[str, float]:
    """Return our own series among those that this process exposes."""
    from prometheus_client import REGISTRY  # noqa: PLC0415  (as vLLM imports it)

    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("foredraft:") and sample.name.endswith("_total")
    }


def one_by_one(llm: LLM, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Decode the prompts one after the other; end a process in the middle of one, if asked to."""
    logprobs = None if job.get("dtype") or "num_speculative_tokens" in job else 2
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], logprobs=logprobs)
    for number, prompt in enumerate(job["prompts"]):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        num_steps = 0
        while llm.llm_engine.has_unfinished_requests():
            done = [output for output in llm.llm_engine.step() if output.finished]
            num_steps += 1
            if number == job.get("kill_at") and num_steps == 5:
                os.kill(job["server"], signal.SIGKILL)
            yield from (outcome(output) | {"num_steps": num_steps} for output in done)


def all_at_once(llm: LLM, job: dict[str, Any]) -> dict[str, Any]:
    """Decode the prompts at the same time, in turns of arrival, aborting some on the way."""
    engine = llm.llm_engine
    waiting = list(enumerate(job["prompts"]))
    finished: dict[str, Any] = {}
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        for number, prompt in waiting[: 8 if num_steps == 0 else 1]:
            length = job["max_tokens"] - 5 * (number % 3)  # they end at different times
            sampling = SamplingParams(temperature=0, max_tokens=length, n=1)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        waiting = waiting[8 if num_steps == 0 else 1 :]
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = outcome(output)
        num_steps += 1
        if num_steps in job.get("abort", {}).values():
            engine.abort_request([key for key, at in job["abort"].items() if at == num_steps])
    return finished


def carrying(llm: LLM, groups: list[list[dict[str, Any]]], max_tokens: int) -> list[Any]:
    """Decode requests that carry fields, group by group; those of a group run at once.

    Each is a prompt, its fields, and after how many steps of its group it comes.
    """
    engine, report = llm.llm_engine, []
    for number, group in enumerate(groups):
        waiting = {f"{number}-{at}": each for at, each in enumerate(group)}
        seen: dict[str, dict[str, Any]] = {}
        num_steps = 0
        while waiting or engine.has_unfinished_requests():
            for name in [
                name for name, each in waiting.items() if each.get("after", 0) <= num_steps
            ]:
                each = waiting.pop(name)
                sampling = SamplingParams(
                    temperature=0, max_tokens=max_tokens, extra_args=each.get("fields")
                )
                engine.add_request(name, {"prompt_token_ids": each["prompt"]}, sampling)
            for output in engine.step():
                so_far = seen.setdefault(output.request_id, {"num_steps": 0})
                so_far["num_steps"] += 1
                so_far |= outcome(output)
            num_steps += 1
        report.append([seen[f"{number}-{at}"] for at in range(len(group))])
    return report


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job."""
    llm = start(job)
    watcher = watched(llm) if job.get("watch") else None
    alone = job["prompts"][: job.get("alone")]
    report: dict[str, Any] = {"alone": list(one_by_one(llm, job | {"prompts": alone}))}
    if job.get("carrying"):
        report["carrying"] = carrying(llm, job["carrying"], job["max_tokens"])
    if job.get("together"):
        report["together"] = all_at_once(llm, job)
    if watcher is not None:
        last = {"max_tokens": 80, "prompts": job["prompts"][5:6]}
        list(one_by_one(llm, last | {"num_speculative_tokens": 0}))
        sessions = watcher.proposer.sessions
        report |= {
            "num_rows": watcher.num_rows,
            "num_asked": watcher.num_asked,
            "mixed_up": watcher.mixed_up,
            "most_sessions": watcher.most_sessions,
            "sessions_left": len(sessions),
            "tokens_left": sessions.num_tokens,
            "moved": watcher.num_moved,
            "failures": sessions.num_failures,
        }
        proposer = watcher.proposer
        if hasattr(proposer.drafter, "stats"):  # one of this process
            report["sessions_of_drafter"] = proposer.drafter.stats(census=False).num_sessions
        proposer.shut_down()
        report["exposed"] = exposed()
    return report | {"counts": counts(llm)}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(main(json.load(sys.stdin))))
