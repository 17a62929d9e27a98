"""Jobs for a real vLLM, each in a process of its own, and how their outputs are compared.

Greedy outputs are compared in float32. A pass over several tokens adds up in another order than
one over a single token, in vLLM as elsewhere, so where two tokens are equally probable to some
1e-4, either may come: an output may leave the plain one at such a tie and nowhere else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TIE = 1e-3
TOKENS = 40
TEXTS = (
    "Repeat this list three times: red, green, blue, yellow, black, white, orange, purple.",
    "Repeat this list three times: red, green, blue, yellow, black, white, orange, purple!",
    "Write the numbers from one to thirty, separated by commas.",
    "What is the capital of France? Answer in one sentence, then repeat the sentence.",
    "Write a Python function that adds two numbers, and then one that subtracts them.",
    "Tell me a short story about a fox and a crow.",
    "Explain why the sky is blue in simple words.",
    "Translate to French: the cat sits on the table and the dog lies under the table.",
    "Write the numbers from one to thirty, separated by commas.",
    "Write a poem in which every line begins with the words: in the morning.",
)


def run(folder: Path, job: dict[str, Any], **more: Any) -> Any:
    """Do a job in a process of its own; in one that can be watched, if that is asked for.

    Everything is proposed, whatever passes cost on this machine, unless a job says otherwise.
    """
    more["settings"] = {"measure": False} | more.get("settings", {})
    report = folder / "report.json"
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not more.get("watch")))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.decoder.plugins.vllm.engine", str(report)],
        input=json.dumps(job | more),
        env={**os.environ, **inside, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {**json.loads(report.read_text()), "log": done.stdout + done.stderr}


def assert_identical(outputs: list[Any], plain: list[Any]) -> int:
    """Return how many are equal; every other one leaves the plain one at a tie."""
    num_equal = 0
    for ours, reference in zip(outputs, plain, strict=True):
        pairs = zip(ours["tokens"], reference["tokens"], strict=False)
        apart = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        num_equal += apart is None
        assert apart is None or reference["gaps"][apart] < TIE
    return num_equal
