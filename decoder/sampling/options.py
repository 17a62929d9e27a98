"""Sampling settings as options of a command."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from decoder.errors import ContradictoryOptionsError, InvalidSettingsError


def _mass(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"{value} is not above 0 and at most 1.")
    return value


def _factor(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value} is not above 0.")
    return value


Temperature = Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Draw from the so many most probable tokens; 0: from all.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        callback=_mass,
        help="Draw from the most probable tokens with this mass, above 0 and at most 1.",
    ),
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
        callback=_factor,
        help="Above 0; makes tokens of prompt and output less probable; 1: none. Default, as for "
        "the three options before: what the model's generation_config states, if anything.",
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


@contextmanager
def named_as_options() -> Iterator[None]:
    """Have errors that begin with a setting's name, in the block, begin with its option's."""
    try:
        yield
    except (InvalidSettingsError, ContradictoryOptionsError) as error:
        name, _, rest = str(error).partition(" ")
        raise type(error)(f"--{name.replace('_', '-')} {rest}") from error
