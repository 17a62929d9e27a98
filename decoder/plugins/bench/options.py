"""What `bench` can be asked for: prompts, contenders and settings."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from decoder.commands.options import PROMPT_FILE, OutputSettings, PromptSettings
from decoder.drafters.options import MAX_NODES
from indexer.flags import Metavar
from retriever.predict.grammar.options import ConstraintSettings


class MeasuredPrompts(PromptSettings):
    """What `bench` answers."""

    prompts: Annotated[Path, Metavar("FILE"), Field(description=PROMPT_FILE)]
    per_category: Annotated[
        int | None, Field(ge=1, description="Most prompts of each category.")
    ] = None
    warm: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Prompts to answer beforehand, so that there are answers to draft from. "
            "Those that are measured are left out."
        ),
    ] = None
    warm_limit: Annotated[
        int | None, Field(ge=1, description="With --warm: most prompts of it.")
    ] = None


class MeasuredOutput(OutputSettings, ConstraintSettings):
    """How often answers are made."""

    repeat: Annotated[
        int, Field(ge=1, description="Runs of each prompt, the fastest of which counts.")
    ] = 1


class AskedTurns(StrEnum):
    """Which turns of a question are asked."""

    FIRST = "first"
    BOTH = "both"


class ContestOptions(BaseModel):
    """Who is measured, and under what settings."""

    model_config = ConfigDict(title="Contenders", extra="forbid", frozen=True, defer_build=True)

    contender: Annotated[
        list[str],
        Metavar("NAME"),
        Field(
            description="Who is measured: one that --contenders lists, or MODULE:NAME of what a "
            "mapping DRAFTERS of a module holds. The report is then laid out as papers' tables. "
            "Repeatable. Default: plain, transformers-lookup, undrafted, foredraft."
        ),
    ] = []
    nodes: Annotated[
        list[int],
        Metavar("N"),
        Field(
            description="Fix the nodes of every draft, at most "
            f"{MAX_NODES}; 0 for as many as pay. Repeatable. Default: as many as pay."
        ),
    ] = []
    temperature: Annotated[
        list[float],
        Metavar("T"),
        Field(description="Of sampling; 0 decodes greedily. Repeatable. Default: 0."),
    ] = []
    seed: Annotated[
        list[int],
        Metavar("SEED"),
        Field(description="Of sampling; several are counted together. Repeatable. Default: 0."),
    ] = []
    turns: Annotated[
        AskedTurns,
        Field(
            description="Of questions with several turns: the first, or each behind the plain "
            "answer to the one before."
        ),
    ] = AskedTurns.FIRST
    over: Annotated[
        str | None,
        Metavar("NAME"),
        Field(description="Also say how many times this contender's speed and tokens others have."),
    ] = None
    plot: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Draw the figures of all contenders, as .png or .svg; with --parallel, "
            "tokens per second by width and where a pass spends its time."
        ),
    ] = None
    parallel: Annotated[
        list[int],
        Metavar("N"),
        Field(
            description="Decode N prompts at a time: our loop in shared passes, transformers in "
            "padded batches. Repeatable. The contenders are then plain, undrafted and foredraft, "
            "and foredraft-tables with --draft-model or --speculator. Default: one by one."
        ),
    ] = []
