"""llama-cpp-python with our drafts, with its own prompt lookup and without drafts, in one run.

    python -m benchmarks.engines.in_llama_cpp MODEL.gguf --prompts questions.jsonl.gz --output FILE

Decoding is greedy. Our drafter has answered other prompts first, and also drafts from indexes if
any are given. A pass of several tokens is rounded differently from several passes of one token,
mostly in quantised models. If an output differs from the plain output, the report has the
difference between the logits of the two tokens.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from llama_cpp import Llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.engines.engine_prompts import sample_prompts
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
from decoder.plugins.llama_cpp import DrafterDraftModel, attach, measure_costs
from retriever.sessions.embedded import EmbeddedDrafter

OUR_WIDTH: Final = 10
"""Most tokens of a draft: the default of the engine's own prompt lookup."""

_NO_TEMPLATE: Final = "{{ messages[0].content }}"
_ROOM: Final = 32
"""Tokens that are left free, because the engine's own lookup raises an error if arrays are full."""

_GGML_F32: Final = 0
_GGML_F16: Final = 1


class CountingLookup(LlamaPromptLookupDecoding):  # type: ignore[misc]  # the engine has no types
    """The engine's prompt lookup, with a count of the passes that it drafts for."""

    num_passes = 0

    def __call__(self, input_ids: Any, /, **options: Any) -> Any:
        """Draft as the engine does."""
        self.num_passes += 1
        return super().__call__(input_ids, **options)


@dataclass(frozen=True)
class Decoding:
    """A method of decoding, ready to run.

    Attributes:
        name: name in the report.
        whose: kind of the method.
        llm: the model.
        draft_model: draft model, which counts passes; None for plain decoding.
    """

    name: str
    whose: Whose
    llm: Llama
    draft_model: CountingLookup | DrafterDraftModel | None


class Benchmark:
    """One model that decodes the same prompts with several methods.

    Args:
        model: a GGUF file.
        num_tokens: most tokens to generate.
        options: options of `Llama`.
    """

    def __init__(self, model: Path, num_tokens: int, **options: Any) -> None:
        self.llm = Llama(str(model), verbose=False, **options)
        self.verifying = Llama(str(model), verbose=False, logits_all=True, **options)
        self.plain = Decoding("plain", Whose.PLAIN, self.llm, None)
        self.num_tokens = num_tokens
        self._format = Jinja2ChatFormatter(
            self.llm.metadata.get("tokenizer.chat_template", _NO_TEMPLATE),
            eos_token=self._text(self.llm.token_eos()),
            bos_token=self._text(self.llm.token_bos()),
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a user's message; the start of a long message is cut."""
        text = self._format(messages=[{"role": "user", "content": prompt.text}]).prompt
        begins = text.startswith(self._text(self.llm.token_bos()))
        tokens: list[int] = self.llm.tokenize(text.encode(), add_bos=not begins, special=True)
        return tokens[-(len(self.llm.input_ids) - self.num_tokens - _ROOM) :]

    def run(self, decoding: Decoding, prompt: Sequence[int]) -> Run:
        """Decode one prompt from an empty cache."""
        draft_model = decoding.llm.draft_model = decoding.draft_model
        before = draft_model.num_passes if draft_model else 0
        decoding.llm.reset()
        start = time.perf_counter()
        tokens = list(self._greedy(decoding.llm, prompt))
        seconds = time.perf_counter() - start
        passes = 1 + draft_model.num_passes - before if draft_model else len(tokens)
        return Run(tokens, passes, seconds)

    def gap(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> float:
        """Return the logit difference of the first two tokens that differ, read in one pass."""
        pairs = enumerate(zip(plain, other, strict=False))
        at = next((number for number, pair in pairs if pair[0] != pair[1]), None)
        if at is None:
            return 0.0
        self.verifying.reset()
        self.verifying.eval([*prompt, *plain[:at]])
        logits = self.verifying.scores[self.verifying.n_tokens - 1]
        return float(abs(logits[plain[at]] - logits[other[at]]))

    def _greedy(self, llm: Llama, prompt: Sequence[int]) -> Iterator[int]:
        generated = llm.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for _, token in zip(range(self.num_tokens), generated, strict=False):
            yield token
            if token == llm.token_eos():
                return

    def _text(self, token: int) -> str:
        text: str = self.llm._model.token_get_text(token) if token >= 0 else ""  # noqa: SLF001
        return text


def decodings(
    bench: Benchmark, lookups: Sequence[str], drafters: dict[str, DrafterDraftModel]
) -> list[Decoding]:
    """Return all methods: plain, the engine's own, and ours."""
    ways = [bench.plain]
    for setting in lookups:
        size, most = map(int, setting.split(","))
        name = f"prompt lookup, n-grams of {size}, {most} tokens"
        ways.append(Decoding(name, Whose.ENGINE, bench.verifying, CountingLookup(size, most)))
    for name, draft_model in drafters.items():
        ways.append(Decoding(name, Whose.OURS, bench.verifying, draft_model))
    return ways


def our_drafters(
    bench: Benchmark, indexes: Sequence[Path], warm: Sequence[Prompt]
) -> dict[str, DrafterDraftModel]:
    """Return our methods: with whole chains and trees, and with as many nodes as pay off here.

    Each drafter has answered other prompts first, as after some time in use.
    """

    def drafting(**settings: Any) -> DrafterDraftModel:
        return attach(bench.verifying, opened_drafter(indexes), **settings)

    most = OUR_WIDTH
    whole: dict[str, Any] = {"num_pred_tokens": most, "measure": False}
    ours = {
        f"foredraft, chains of {most} tokens, retrieved alone": drafting(
            trees=False, recycle=False, **whole
        ),
        f"foredraft, chains of {most} tokens": drafting(trees=False, **whole),
        f"foredraft, trees of {most} nodes": drafting(**whole),
        "foredraft, chains, as many as pay": drafting(trees=False),
        "foredraft, trees, as many as pay": drafting(),
    }
    for name, draft_model in ours.items():
        answering = Decoding(name, Whose.OURS, bench.verifying, draft_model)
        for prompt in warm:
            bench.run(answering, bench.encode(prompt))
    return ours


def opened_drafter(indexes: Sequence[Path]) -> EmbeddedDrafter:
    """Return a drafter whose kernels are compiled."""
    drafter = EmbeddedDrafter.open_indexes(indexes)
    drafter.warm()
    return drafter


def measure(
    bench: Benchmark, ways: Sequence[Decoding], cases: Sequence[Sequence[int]]
) -> list[Way]:
    """Decode every prompt with every method, in an order that rotates from prompt to prompt."""
    runs: list[list[Run]] = [[] for _ in ways]
    for way in ways:
        bench.run(way, cases[0][:32])
    for number, case in enumerate(cases):
        for turn in range(len(ways)):
            at = (number + turn) % len(ways)
            runs[at].append(bench.run(ways[at], case))
    return [Way(way.name, way.whose, each) for way, each in zip(ways, runs, strict=True)]


def differences(
    bench: Benchmark, cases: Sequence[Sequence[int]], ways: Sequence[Way]
) -> dict[str, Any]:
    """Return for each method the logit differences of outputs that differ from plain outputs."""
    found = {}
    for way in ways[1:]:
        gaps = [
            bench.gap(case, plain.token_ids, run.token_ids)
            for case, plain, run in zip(cases, ways[0].runs, way.runs, strict=True)
            if run.token_ids != plain.token_ids
        ]
        found[way.name] = {
            "num_different": len(gaps),
            "median_logit_gap": float(np.median(gaps)) if gaps else 0.0,
            "largest_logit_gap": max(gaps, default=0.0),
        }
    return found


def undrafted(bench: Benchmark, cases: Sequence[Sequence[int]], plain: Way) -> dict[str, Any]:
    """Return the cost of only keeping all tokens' logits, which every draft model requires."""
    decoding = Decoding("undrafted", Whose.PLAIN, bench.verifying, None)
    runs = [bench.run(decoding, case) for case in cases]
    pairs = zip(runs, plain.runs, strict=True)
    return {
        "seconds": sum(run.seconds for run in runs),
        "num_identical": sum(run.token_ids == other.token_ids for run, other in pairs),
    }


def pass_costs(bench: Benchmark) -> dict[str, Any]:
    """Return the milliseconds of passes by their width."""
    surface = measure_costs(bench.verifying)
    rounded = [round(1e3 * seconds, 2) for seconds in surface.seconds[0]]
    return {"widths": surface.widths, "milliseconds": rounded}


def main(  # noqa: PLR0913, PLR0917  a command has as many options as it has
    model: Path,
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions.")],
    output: Annotated[Path, typer.Option(help="Where the report goes.")],
    index: Annotated[list[Path] | None, typer.Option(help="An index to draft from.")] = None,
    lookup: Annotated[
        list[str] | None, typer.Option(help="Longest n-gram and most tokens: 2,10")
    ] = None,
    per_category: int = 2,
    warm_per_category: int = 8,
    max_new_tokens: int = 96,
    threads: int = 2,
    context: int = 2048,
    float32_cache: Annotated[bool, typer.Option(help="Keys and values in float32.")] = False,  # noqa: FBT002
) -> None:
    """Compare llama-cpp-python's ways of decoding with ours."""
    sample = sample_prompts(prompts, per_category, warm_per_category)
    cache_type = _GGML_F32 if float32_cache else _GGML_F16
    bench = Benchmark(
        model,
        max_new_tokens,
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        type_k=cache_type,
        type_v=cache_type,
    )
    ours = our_drafters(bench, index or [], sample.warm)
    cases = [bench.encode(prompt) for prompt in sample.measured]
    ways = measure(bench, decodings(bench, lookup or ["2,10", "3,10", "2,4"], ours), cases)
    contents = {
        **report(sample.measured, ways),
        "differences": differences(bench, cases, ways),
        "undrafted": undrafted(bench, cases, ways[0]),
        "pass_costs": pass_costs(bench),
        "drafting": {name: _counts(each) for name, each in ours.items()},
        **circumstances(
            "llama_cpp_python",
            model=model.name,
            threads=threads,
            context=context,
            cache="float32" if float32_cache else "float16",
            max_new_tokens=max_new_tokens,
            decoding="greedy, no penalties, every prompt from an empty cache",
            warm={"num_prompts": len(sample.warm)},
            indexes=[path.name for path in index or []],
        ),
    }
    write(output, contents)
    print(as_markdown(contents))
    print(json.dumps({name: contents[name] for name in ("comparison", "differences")}, indent=1))


def _counts(draft_model: DrafterDraftModel) -> dict[str, Any]:
    """Return the figures of our drafts for warm-up and measured prompts."""
    return {**draft_model.statistics.report(), "num_failures": draft_model.num_failures}


if __name__ == "__main__":
    typer.run(main)
