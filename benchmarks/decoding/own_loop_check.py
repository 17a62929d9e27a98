"""The own loop of docs/how-to/generating.md beside `generate` and our decoder, at equal nodes.

    python -m benchmarks.decoding.own_loop_check --prompts QUESTIONS --limit 130 --json RESULT

Outputs in float32 must be the same; both loops draft from what they wrote before, and from nothing
else. Prints the prompts whose outputs differ, and the tokens of a pass.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from decoder.budget.budget import FixedBudget
from decoder.commands.prompts import read_prompts
from decoder.loop import Decoder
from decoder.model.target import Target
from decoder.plugins.contenders.contender import LibraryContender
from examples import own_loop
from foredraft import EmbeddedDrafter


def main(
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    limit: Annotated[int, typer.Option(help="Most prompts.")] = 130,
    tokens: Annotated[int, typer.Option(help="Of each output.")] = 32,
    nodes: Annotated[int, typer.Option(help="Of each draft.")] = 16,
    output: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
) -> None:
    """Decode every prompt in three ways and compare."""
    torch.set_num_threads(1)
    language_model = own_loop.loaded
    budget, drafter = FixedBudget(nodes), EmbeddedDrafter()
    decoder = Decoder(Target(language_model.model), drafter, budget, stop_ids=())
    plainly = LibraryContender(language_model, decoder.target, tokens)
    different: list[int] = []
    own, ours = [0, 0], [0, 0]
    cases = read_prompts(prompts, limit)
    for number, case in enumerate(cases, 1):
        prompt = language_model.encode(case.text)
        truth = plainly([prompt], remember=False).token_ids
        written, passes = own_loop.generate(prompt, tokens, nodes)
        generation = decoder.generate(prompt, tokens)
        decoded = [token for step in generation for token in step]
        same = written[: len(truth)] == truth and decoded[: len(truth)] == truth
        different += [] if same else [number]
        own = [own[0] + len(written) - 1, own[1] + passes]
        statistics = generation.statistics
        ours = [ours[0] + len(decoded) - 1, ours[1] + statistics.num_passes - 1]
        if number % 5 == 0:
            typer.echo(f"{number}: {own[0] / own[1]:.3f} and {ours[0] / ours[1]:.3f}", err=True)
    report = {
        "prompts": len(cases),
        "different": different,
        "nodes": nodes,
        "tokens_per_pass_own_loop": own[0] / own[1],
        "tokens_per_pass_decoder": ours[0] / ours[1],
        "ratio": own[0] / own[1] * ours[1] / ours[0],
    }
    typer.echo(json.dumps(report, indent=2))
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
