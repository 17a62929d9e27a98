"""How long a speculator is taught, and what; `decoder.plugins.training.course` teaches it."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from decoder.errors import refuse_contradictions
from indexer.flags import Metavar
from indexer.launch import FIELD_HELP


class CourseOptions(BaseModel):
    """How much is taught, and for how long.

    Attributes:
        max_new_tokens: of an answer that the model writes.
        held_out_share: of the prompts that judge and are not taught.
    """

    model_config = ConfigDict(title="Training", extra="forbid", frozen=True, defer_build=True)

    minutes: Annotated[
        float,
        Field(
            gt=0,
            description="Most time for recording, training and judging together. Loading the model "
            "and the comparison at the end come on top.",
        ),
    ] = 50.0
    tokens: Annotated[
        int, Field(ge=1, description="Tokens to record, if half of the time suffices.")
    ] = 1_000_000
    own_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of them that the model writes itself; the others are read.",
        ),
    ] = 0.7
    draft_vocabulary: Annotated[
        int, Field(ge=8, description="Tokens that the head drafts, the most frequent ones.")
    ] = 8192
    seed: Annotated[int, Field(ge=0, description="Of all that is random.")] = 0
    max_new_tokens: int = 224
    held_out_share: float = 0.05


class TaughtTexts(BaseModel):
    """What is taught."""

    model_config = ConfigDict(title="Texts", extra="forbid", frozen=True, defer_build=True)

    from_: Annotated[
        list[Path],
        Metavar("FILE"),
        Field(
            description="Conversations, prompts or documents: the model answers them itself, and "
            "recorded answers are read, too. As `generate --prompts` takes them, and records "
            "with a `text`. Repeatable.",
        ),
    ] = []
    field: Annotated[str, Metavar("KEY"), Field(description=FIELD_HELP)] = ""
    state: Annotated[
        Path | None,
        Metavar("DIR"),
        Field(
            description="The state directory of a service that is shut down, or a copy of it: the "
            "model's outputs that it kept."
        ),
    ] = None
    tenant: Annotated[
        str, Field(description="With --state: whose outputs. A head never mixes tenants.")
    ] = ""
    limit: Annotated[int | None, Field(ge=1, description="Take only the first so many texts.")] = (
        None
    )

    def check(self) -> None:
        """Refuse texts that are missing or contradict one another.

        Raises:
            ContradictoryOptionsError: there are none, or a tenant without a state directory.
        """
        is_kept = self.state is not None
        refuse_contradictions(
            (not self.from_ and not is_kept, "there is nothing to teach: give --from or --state"),
            (self.tenant and not is_kept, "--tenant is for --state: it names whose outputs"),
        )

    def names(self) -> list[str]:
        """Return what the texts are called in the head's file."""
        kept = [] if self.state is None else ["outputs of a service"]
        return [*(path.name for path in self.from_), *kept]


class TrainingSettings(CourseOptions):
    """How long is taught and what, and where the head goes."""

    output: Annotated[
        Path,
        Metavar("HEAD"),
        Field(
            description="Folder for the head, for --speculator. What was recorded stays in "
            "HEAD.training, so that the same command goes on after an interruption."
        ),
    ]


class GainSettings(BaseModel):
    """Whether drafts with the head are compared with drafts without it, and on what index."""

    model_config = ConfigDict(title="Comparison", extra="forbid", frozen=True, defer_build=True)

    gain: Annotated[
        bool,
        Field(
            description="At the end decode a few held-out prompts with the head and without, at 5 "
            "to 64 nodes. Takes up to two minutes."
        ),
    ] = True
    index: Annotated[
        list[Path],
        Metavar("DIR"),
        Field(description="An index to draft from in that, with and without. Repeatable."),
    ] = []
