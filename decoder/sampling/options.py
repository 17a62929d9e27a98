"""Sampling settings as options of a command."""

from typing import Annotated

import typer

Temperature = Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Draw from the so many most probable tokens; 0: from all.")
]
TopP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Draw from the most probable tokens with this mass."),
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Draw from tokens with this share of the greatest probability."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Makes tokens of prompt and output less probable; 1: none. Default, as for the three "
        "options before: what the model's generation_config states, if anything.",
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(min=-2.0, max=2.0, help="Taken off the logits of tokens of the output."),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(min=-2.0, max=2.0, help="The same, for each time that a token is there."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, max=2**64 - 1, help="Makes sampling repeatable; no effect at temperature 0."
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="The whole answer matches this regular expression."),
]
