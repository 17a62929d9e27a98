"""The options of `bench`: prompts, contenders and settings."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from decoder.commands.options import PROMPT_FILE, OutputSettings, PromptSettings
from decoder.drafters.options import MAX_NODES
from indexer.flags import Metavar
from retriever.predict.grammar.options import ConstraintSettings


class MeasuredPrompts(PromptSettings):
    """The prompts that `bench` answers."""

    prompts: Annotated[Path, Metavar("FILE"), Field(description=PROMPT_FILE)]
    per_category: Annotated[
        int | None, Field(ge=1, description="At most this many prompts of each category.")
    ] = None
    warm: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Prompts to answer first, which gives drafters answers to draft from. "
            "Prompts that are also measured are left out."
        ),
    ] = None
    warm_limit: Annotated[
        int | None, Field(ge=1, description="With --warm: use at most this many of its prompts.")
    ] = None


class MeasuredOutput(OutputSettings, ConstraintSettings):
    """The output of each prompt, and the number of runs."""

    repeat: Annotated[int, Field(ge=1, description="Runs of each prompt; the fastest counts.")] = 1


class AskedTurns(StrEnum):
    """Which turns of a question are answered."""

    FIRST = "first"
    BOTH = "both"


class ContestOptions(BaseModel):
    """Which contenders are measured, and under which settings."""

    model_config = ConfigDict(title="Contenders", extra="forbid", frozen=True, defer_build=True)

    contender: Annotated[
        list[str],
        Metavar("NAME"),
        Field(
            description="A contender to measure: a name that --contenders lists, or MODULE:NAME "
            "for an entry in a module's mapping DRAFTERS. The report then has the layout of tables "
            "in papers. Repeatable. Default: plain, transformers-lookup, undrafted, foredraft."
        ),
    ] = []
    nodes: Annotated[
        list[int],
        Metavar("N"),
        Field(
            description="Fix the number of nodes in every draft, at most "
            f"{MAX_NODES}; 0: as many as pay off. Repeatable. Default: 0."
        ),
    ] = []
    temperature: Annotated[
        list[float],
        Metavar("T"),
        Field(description="Sampling temperature; 0 is greedy decoding. Repeatable. Default: 0."),
    ] = []
    seed: Annotated[
        list[int],
        Metavar("SEED"),
        Field(description="Sampling seed; several are pooled. Repeatable. Default: 0."),
    ] = []
    turns: Annotated[
        AskedTurns,
        Field(
            description="For questions with several turns: answer only the first turn, or each "
            "turn after the plain answer to the turn before."
        ),
    ] = AskedTurns.FIRST
    over: Annotated[
        str | None,
        Metavar("NAME"),
        Field(description="Also show the others' speed and tokens relative to this contender."),
    ] = None
    plot: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Draw the figures of all contenders, as .png or .svg. With --parallel, "
            "draw tokens per second by width, and the parts of a pass's time."
        ),
    ] = None
    parallel: Annotated[
        list[int],
        Metavar("N"),
        Field(
            description="Decode N prompts at a time: our loop in shared passes, transformers in "
            "padded batches. Repeatable. The contenders are then plain, undrafted and foredraft; "
            "with --draft-model or --speculator also foredraft-tables. Default: one by one."
        ),
    ] = []
