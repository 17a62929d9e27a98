"""User options that name the sources of drafts; `decoder.assembly` opens the sources.

This module loads no tensor library, so that commands show their options immediately.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from decoder.errors import refuse_contradictions
from decoder.sampling.sampling_settings import SamplingSettings
from indexer.flags import RARE, Metavar
from retriever.limits import DEFAULT_RECYCLED_BYTES, MAX_OUTCOMES
from retriever.operations.settings import DraftSettings

MAX_NODES: Final = 256
"""Most nodes of a fused tree, and of each tree that is merged into it."""

DEFAULT_SHARE: Final = 0.25
"""Share of one core's time for training a speculator during decoding; decoding has the higher
priority."""


UNDRAWN: Final = "--draft-sampling has no effect at temperature 0: give a --temperature"
WITHOUT_INDEX: Final = (
    "--draft-vocabulary takes the most frequent tokens of an index: give one with --index"
)


class DraftOptions(DraftSettings):
    """The sources of drafts: services or local databases, drafting models, and the target itself.

    Raises:
        InvalidRequestError: both services and databases are given.
        ContradictoryOptionsError: a vocabulary is to be trimmed without a model or an index; or
            drafts are requested in advance from services that each hold a part of a corpus.
    """

    model_config = ConfigDict(title="Drafts")

    draft_model: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(description="A smaller model with the same tokenizer, which drafts."),
    ] = None
    speculator: Annotated[
        Path | None,
        Metavar("HEAD"),
        Field(
            description="A head that drafts from the model's own states: a folder or .safetensors "
            "file with config.json next to it, of an EAGLE-3, EAGLE or MLP speculator made for "
            "this model."
        ),
    ] = None
    online: Annotated[
        Path | None,
        RARE,
        Metavar("DIR"),
        Field(
            description="With --speculator: let it continue to learn from the outputs that it "
            "drafts for, in a separate process. DIR stores the trained weights, and later starts "
            "continue from there: use one DIR per tenant."
        ),
    ] = None
    online_share: Annotated[
        float,
        RARE,
        Metavar("SHARE"),
        Field(gt=0, le=1, description="With --online: largest share of one core's time."),
    ] = DEFAULT_SHARE
    draft_vocabulary: Annotated[
        int | None,
        RARE,
        Metavar("N"),
        Field(
            ge=1,
            description="With --draft-model or --speculator: draft only the N most frequent "
            "tokens of --index. Speculators with their own vocabulary ignore this.",
        ),
    ] = None
    draft_sampling: Annotated[
        bool,
        RARE,
        Field(
            description="With sampling: sample drafts from the --draft-model's distributions, and "
            "use these to accept them. The output of a --seed then depends on the drafts."
        ),
    ] = False
    recycle: Annotated[
        bool, RARE, Field(description="Also draft from the logits of the model's earlier passes.")
    ] = True
    draft_ahead: Annotated[
        int,
        RARE,
        Metavar("N"),
        Field(
            ge=0,
            le=MAX_OUTCOMES,
            description="While a pass of the model runs, let the --server or the local databases "
            "draft for the pass's N likeliest outcomes: if one occurs, decoding does not wait "
            "for a draft. 5 to 16 for a server that is a millisecond or more away; 0: draft only "
            "after the pass.",
        ),
    ] = 0
    state: Annotated[
        Path | None,
        Metavar("DIR"),
        Field(
            description="A folder that stores outputs and the model's likely tokens, so that a "
            "later start drafts as well as before. For one process and one tokenizer at a "
            "time. Default: memory only."
        ),
    ] = None
    recycled_bytes: Annotated[
        int,
        RARE,
        Field(
            ge=0,
            description="With --state or --server: most bytes of logits of earlier passes to store "
            "there, and to load at the start; 0: none.",
        ),
    ] = DEFAULT_RECYCLED_BYTES

    def model_post_init(self, context: object, /) -> None:
        """Refuse settings that contradict one another."""
        super().model_post_init(context)
        refuse_contradictions(
            (
                self.server and self.state is not None,
                (
                    "--state and --server exclude each other: leave out --state, because a server "
                    "has its own (foredraft serve --state)"
                ),
            ),
            (
                self.draft_ahead and len(self.server) > 1,
                (
                    "--draft-ahead and more than one --server exclude each other: services that "
                    "each hold a part of a corpus cannot draft in advance; leave out "
                    "--draft-ahead"
                ),
            ),
            (
                self.draft_sampling and not self.names_readers,
                "--draft-sampling needs a model to sample from: --draft-model or --speculator",
            ),
            (
                self.online is not None and self.speculator is None,
                "--online needs a speculator that can learn: give one with --speculator",
            ),
            (
                self.draft_vocabulary is not None and not self.names_readers,
                "--draft-vocabulary needs a model to trim: --draft-model or --speculator",
            ),
            (self.draft_vocabulary is not None and not self.index, WITHOUT_INDEX),
        )

    @property
    def names_readers(self) -> bool:
        """Whether the options name a draft model or a speculator."""
        return self.draft_model is not None or self.speculator is not None

    def sampling(self, chosen: SamplingSettings) -> SamplingSettings:
        """Return the sampling settings, adapted to whether drafts are sampled.

        Raises:
            ContradictoryOptionsError: drafts are to be sampled, but the output is greedy.
        """
        if not self.draft_sampling:
            return chosen
        refuse_contradictions((chosen.is_greedy, UNDRAWN))
        return replace(chosen, coupled=False)

    def describe(self) -> str:
        """Return the sources in a few words, for reports."""
        if self.server:
            parts = [f"server {', '.join(self.server)}"]
        else:
            parts = ["context", "generations", *map(str, [*self.phrases, *self.index])]
        if self.state is not None:
            parts.append(f"stored in {self.state}")
        if self.recycle:
            parts.append("recycled logits")
        if self.draft_model is not None:
            drawn = ", sampled" if self.draft_sampling else ""
            parts.append(f"draft model {self.draft_model}{drawn}")
        if self.speculator is not None:
            parts.append(f"speculator {self.speculator}")
        if self.draft_ahead:
            parts.append(f"{self.draft_ahead} outcomes in advance")
        return ", ".join(parts)
