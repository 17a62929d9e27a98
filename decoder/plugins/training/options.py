"""Options for training a speculator; `decoder.plugins.training.course` trains it."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from decoder.errors import refuse_contradictions
from indexer.flags import Metavar
from indexer.launch import FIELD_HELP


class CourseOptions(BaseModel):
    """How much to train on, and for how long.

    Attributes:
        max_new_tokens: most tokens of an answer that the model writes.
        held_out_share: share of the prompts that are held out for evaluation.
    """

    model_config = ConfigDict(title="Training", extra="forbid", frozen=True, defer_build=True)

    minutes: Annotated[
        float,
        Field(
            gt=0,
            description="Longest time for recording, training and evaluation together. Loading the "
            "model and the comparison at the end are not included.",
        ),
    ] = 50.0
    tokens: Annotated[
        int, Field(ge=1, description="Tokens to record, if half of the time is enough.")
    ] = 1_000_000
    own_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of these tokens that the model writes itself; it reads the others.",
        ),
    ] = 0.7
    draft_vocabulary: Annotated[
        int, Field(ge=8, description="Tokens that the head can draft: the most frequent ones.")
    ] = 8192
    seed: Annotated[int, Field(ge=0, description="Seed of random numbers.")] = 0
    max_new_tokens: int = 224
    held_out_share: float = 0.05


class TaughtTexts(BaseModel):
    """The training texts."""

    model_config = ConfigDict(title="Texts", extra="forbid", frozen=True, defer_build=True)

    from_: Annotated[
        list[Path],
        Metavar("FILE"),
        Field(
            description="Conversations, prompts or documents. The model answers them itself, and "
            "also reads recorded answers. Formats as in `generate --prompts`, and records "
            "with a `text`. Repeatable.",
        ),
    ] = []
    field: Annotated[str, Metavar("KEY"), Field(description=FIELD_HELP)] = ""
    state: Annotated[
        Path | None,
        Metavar("DIR"),
        Field(
            description="The state directory of a stopped service, or a copy of it, with the "
            "model's stored outputs."
        ),
    ] = None
    tenant: Annotated[
        str, Field(description="With --state: the tenant. A head never mixes tenants.")
    ] = ""
    limit: Annotated[int | None, Field(ge=1, description="Take at most this many texts.")] = None

    def check(self) -> None:
        """Refuse missing texts and contradictory options.

        Raises:
            ContradictoryOptionsError: there are no texts, or a tenant without a state directory.
        """
        is_kept = self.state is not None
        refuse_contradictions(
            (not self.from_ and not is_kept, "there are no texts: give --from or --state"),
            (self.tenant and not is_kept, "--tenant needs --state: give the state directory"),
        )

    def names(self) -> list[str]:
        """Return the names of the texts for the head's file."""
        kept = [] if self.state is None else ["outputs of a service"]
        return [*(path.name for path in self.from_), *kept]


class TrainingSettings(CourseOptions):
    """How much to train on, for how long, and where to write the head."""

    output: Annotated[
        Path,
        Metavar("HEAD"),
        Field(
            description="Folder for the head, as used in --speculator. Recordings stay in "
            "HEAD.training, so the same command can resume an interrupted training."
        ),
    ]


class GainSettings(BaseModel):
    """Whether to compare drafts with the head to drafts without it, and with which indexes."""

    model_config = ConfigDict(title="Comparison", extra="forbid", frozen=True, defer_build=True)

    gain: Annotated[
        bool,
        Field(
            description="At the end, decode a few held-out prompts with the head and without it, "
            "at 5 to 64 nodes. This takes up to two minutes."
        ),
    ] = True
    index: Annotated[
        list[Path],
        Metavar("DIR"),
        Field(description="An index to draft from in this comparison. Repeatable."),
    ] = []
