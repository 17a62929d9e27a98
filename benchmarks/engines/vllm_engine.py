"""One vLLM engine in its own process, which answers warm-up prompts and then measures others.

`in_vllm` starts it. It reads a job as JSON from standard input, and writes its results to a file.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_BATCH: Final = 16
_WARM_UP: Final = 4


def answer(llm: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Decode prompts many at a time, like real traffic; return the outputs in order."""
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"warm-{number}", {"prompt_token_ids": prompt}, _greedy(max_tokens))
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    return [answers[f"warm-{number}"] for number in range(len(prompts))]


def run(llm: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Decode one prompt alone and count the engine's steps, including the prompt's step."""
    engine = llm.llm_engine
    start_s, num_steps, tokens = time.perf_counter(), 0, []
    engine.add_request("measured", {"prompt_token_ids": prompt}, _greedy(max_tokens))
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
        num_steps += 1
    seconds = time.perf_counter() - start_s
    return {"token_ids": tokens, "num_steps": num_steps, "seconds": seconds}


def at_once(
    llm: Any, prompts: Sequence[list[int]], max_tokens: int, num_running: int
) -> dict[str, Any]:
    """Decode prompts, `num_running` at a time; return the outputs, the time and vLLM's figures."""
    engine, waiting = llm.llm_engine, list(enumerate(prompts))
    answers: dict[str, list[int]] = {}
    before, start_s, num_steps, num_unfinished = figures(llm), time.perf_counter(), 0, 0
    while waiting or num_unfinished:
        while waiting and num_unfinished < num_running:
            number, prompt = waiting.pop(0)
            name = f"at-once-{num_running}-{number}"
            engine.add_request(name, {"prompt_token_ids": prompt}, _greedy(max_tokens))
            num_unfinished += 1
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
                num_unfinished -= 1
        num_steps += 1
    return {
        "num_running": num_running,
        "seconds": time.perf_counter() - start_s,
        "num_steps": num_steps,
        "answers": [answers[f"at-once-{num_running}-{at}"] for at in range(len(prompts))],
        "figures": {name: value - before.get(name, 0.0) for name, value in figures(llm).items()},
    }


def figures(llm: Any) -> dict[str, float]:
    """Return vLLM's own figures of speculation."""
    return {
        metric.name.removeprefix("vllm:spec_decode_"): metric.value
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job: warm up, then measure prompts one by one, or `num_running` of them at once."""
    from vllm import LLM  # noqa: PLC0415  takes seconds, and reads the environment

    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=_BATCH,
        seed=0,
        disable_log_stats=False,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        speculative_config=job["speculative_config"],
        **job.get("options", {}),
    )
    max_tokens = job["max_tokens"]
    answers = answer(llm, job["warm"], max_tokens)
    answer(llm, job["measured"][:1], _WARM_UP)
    before = figures(llm)
    if num_running := job.get("num_running"):
        return at_once(llm, job["measured"], max_tokens, num_running)
    runs = [run(llm, prompt, max_tokens) for prompt in job["measured"]]
    spent = {name: value - before.get(name, 0.0) for name, value in figures(llm).items()}
    return {"answers": answers, "runs": runs, "figures": spent}


def _greedy(max_tokens: int) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415  as above

    return SamplingParams(temperature=0, max_tokens=max_tokens)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    Path(sys.argv[1]).write_text(json.dumps(main(json.load(sys.stdin))), encoding="utf-8")
