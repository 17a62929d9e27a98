"""Settings that commands take, each set in one schema.

Loads no library that computes: those are imported once a command does something, so that its help
comes at once.
"""

import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TextIO

from pydantic import BaseModel, ConfigDict, Field

from decoder.errors import DeviceError
from decoder.model.pretrained import Attention, ModelOptions, Precision
from decoder.stopping import DEFAULT_MAX_NEW_TOKENS
from indexer.errors import TokenizerError
from indexer.flags import RARE, Metavar
from indexer.launch import FIELD_HELP
from indexer.tokenizer import DEFAULT_MODEL, locate_model, not_here
from retriever.predict.grammar.options import ConstraintSettings

_MODEL: Final = ModelOptions(DEFAULT_MODEL)


PROMPT_FILE: Final = (
    "A prompt a line, Spec-Bench's questions, or conversations in .jsonl (.gz too), .json, .csv or "
    ".parquet, of which each answer is asked for again, after all that was said before it."
)


class PromptSettings(BaseModel):
    """What of a file of prompts is answered, and how it is read."""

    model_config = ConfigDict(title="Prompt", extra="forbid", frozen=True, defer_build=True)

    limit: Annotated[
        int | None, RARE, Field(ge=1, description="Most prompts, spread evenly over categories.")
    ] = None
    field: Annotated[str, RARE, Metavar("KEY"), Field(description=FIELD_HELP)] = ""
    no_chat_template: Annotated[
        bool, RARE, Field(description="Take prompts as plain text to go on from.")
    ] = not _MODEL.use_chat_template


class AnsweredPrompts(PromptSettings):
    """What `generate` answers."""

    prompt: Annotated[
        str | None,
        Metavar("TEXT"),
        Field(description="The prompt. Default: standard input, to its end."),
    ] = None
    prompts: Annotated[Path | None, Metavar("FILE"), Field(description=PROMPT_FILE)] = None
    system: Annotated[
        str | None,
        RARE,
        Metavar("TEXT"),
        Field(description="The system message. Default: the chat template's own."),
    ] = _MODEL.system
    prediction: Annotated[
        tuple[Path, ...],
        Metavar("FILE"),
        Field(
            description="A text that answers are expected to contain, as a whole or in parts, such "
            "as the file that is edited: drafts come from it, too. Repeatable."
        ),
    ] = ()
    group: Annotated[
        str,
        RARE,
        Metavar("NAME"),
        Field(
            description="Answers of one group that are written at once draft from one another: "
            "those of --parallel, and of other commands that share a service. They are about the "
            "same: samples of one prompt, agents at one task."
        ),
    ] = ""
    parallel: Annotated[
        int,
        Field(
            ge=1,
            description="With --prompts: prompts to answer at a time, in the same passes of the "
            "model. Each has the answer that it has alone, up to rounding.",
        ),
    ] = 1
    prepare: Annotated[
        int | None,
        RARE,
        Metavar("TOKENS"),
        Field(
            ge=1,
            description="Before the first prompt, make memory and, on CUDA, captured passes for "
            "texts of so many tokens, prompt and answer together. Default: as they are needed.",
        ),
    ] = None
    forget: Annotated[
        bool,
        RARE,
        Field(
            description="Keep answers out of later drafts: of the service with --server, of later "
            "prompts with --prompts. Without either, nothing is kept anyway."
        ),
    ] = False


class Colouring(StrEnum):
    """When text is coloured."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"

    def applies_to(self, stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether text on a stream is coloured.

        By itself on terminals alone, and not where `NO_COLOR` (https://no-color.org) is set.
        """
        if self is not Colouring.AUTO:
            return self is Colouring.ALWAYS
        is_wanted = not environment.get("NO_COLOR") and not is_dumb(environment)
        return is_wanted and stream.isatty()


def is_dumb(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the terminal knows no escape sequences, by its own word."""
    return environment.get("TERM") == "dumb"


class ModelChoice(BaseModel):
    """Which model computes, and where; see `ModelOptions`."""

    model_config = ConfigDict(title="Model", extra="forbid", frozen=True, defer_build=True)

    model: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="The model: a hub id, a folder or a .gguf file. Default: the one whose "
            f"tokenizer --index was built with, where it says so, else {_MODEL.name}."
        ),
    ] = None
    dtype: Annotated[Precision, Field(description="What the model computes in.")] = _MODEL.precision
    device: Annotated[
        str,
        Metavar("DEVICE"),
        Field(description="Where the model runs, such as cpu or cuda:0."),
    ] = _MODEL.device
    attention: Annotated[Attention, RARE, Field(description="Implementation of attention.")] = (
        Attention(_MODEL.attention)
    )

    def check_device(self) -> None:
        """Refuse a CUDA device where there is none, before anything is read.

        Raises:
            DeviceError: the message says why there is none.
        """
        import torch  # noqa: PLC0415  (takes seconds to import)

        if not self.device.startswith("cuda") or torch.cuda.is_available():
            return
        why = (
            "no driver or device was found"
            if torch.version.cuda
            else f"torch {torch.__version__} was built without it"
        )
        raise DeviceError(
            f"--device {self.device}: there is no CUDA here, {why}: leave it out for the CPU"
        )

    def options(self, prompting: PromptSettings, indexes: Sequence[Path] = ()) -> ModelOptions:
        """Return how the model is loaded for prompts.

        Args:
            prompting: how they are read.
            indexes: what is drafted from; their tokenizer names the model where nothing else does.

        Raises:
            ContradictoryOptionsError: two settings exclude each other.
            IndexerError: an index cannot be opened.
            TokenizerError: the model that an index names is not here, or is a tokenizer alone.
        """
        system = prompting.system if isinstance(prompting, AnsweredPrompts) else _MODEL.system
        return ModelOptions(
            self.model or _model_of(indexes),
            self.device,
            self.dtype,
            self.attention,
            not prompting.no_chat_template,
            system,
        )


class ModelSettings(ModelChoice):
    """Which model decodes, and where what its passes cost is kept."""

    cost_cache: Annotated[
        str | None,
        RARE,
        Metavar("DIR"),
        Field(
            description="Where measured costs of passes are kept for the next start, none to "
            "measure always. Default: FOREDRAFT_CACHE, or the user's directory for caches."
        ),
    ] = None


def _model_of(indexes: Sequence[Path]) -> str:
    """Return the model that indexes were built for, else the default one."""
    from retriever.sessions.options import indexed_tokenizer  # noqa: PLC0415  (loads numba)

    name = indexed_tokenizer(indexes)
    if name is None:
        return _MODEL.name
    try:
        files = locate_model(name)
    except TokenizerError as error:
        raise TokenizerError(not_here(name, error)) from error
    if not files.has_model:
        raise TokenizerError(
            f"the index names {name!r}, which is a tokenizer without a model: name the model "
            "that has it by --model"
        )
    return name


class OutputSettings(BaseModel):
    """How long answers get."""

    model_config = ConfigDict(title="Output", extra="forbid", frozen=True, defer_build=True)

    max_new_tokens: Annotated[
        int, Field(ge=1, description="Most tokens to generate for a prompt.")
    ] = DEFAULT_MAX_NEW_TOKENS


class AnswerSettings(OutputSettings):
    """Where answers end, and the trace that is written."""

    stop: Annotated[
        tuple[str, ...],
        Metavar("TEXT"),
        Field(description="End an answer before this text. Repeatable."),
    ] = ()
    include_stop: Annotated[
        bool, RARE, Field(description="End an answer behind the --stop text instead.")
    ] = False
    stop_id: Annotated[
        tuple[int, ...],
        RARE,
        Metavar("ID"),
        Field(description="A token that ends an answer, besides the model's own."),
    ] = ()
    trace: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Write a line of JSON for every pass (.gz compresses); `trace` reads it."
        ),
    ] = None


Colour = Annotated[
    Colouring,
    RARE,
    Field(
        description="Show each token in the colour of the source that drafted it: auto on "
        "terminals, unless NO_COLOR is set."
    ),
]


class ShownSettings(AnswerSettings, ConstraintSettings):
    """How answers are shown, and what is said of them."""

    colour: Colour = Colouring.AUTO
    compare: Annotated[
        bool,
        Field(
            description="Decode without drafts, too, and say what drafts are worth by the clock "
            "and whether the output is identical."
        ),
    ] = False
    html: Annotated[
        Path | None,
        Metavar("PAGE"),
        Field(
            description="Write a page for a browser: the text by source, and the tree of each pass."
        ),
    ] = None


class ChatSettings(OutputSettings):
    """How a conversation is held and shown."""

    model_config = ConfigDict(title="Output", extra="forbid", frozen=True, defer_build=True)

    system: Annotated[
        str | None,
        RARE,
        Metavar("TEXT"),
        Field(description="The system message. Default: the chat template's own."),
    ] = None
    colour: Colour = Colouring.AUTO
