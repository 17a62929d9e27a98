"""Settings of the commands; each group of settings is one schema.

This module loads no computing library, so that help appears immediately; a command imports such
libraries when it runs.
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
    "One prompt per line, Spec-Bench's questions, or conversations in .jsonl (.gz too), .json, "
    ".csv or .parquet, where each answer is generated again after the turns before it."
)


class PromptSettings(BaseModel):
    """Which prompts of a file to answer, and how to read the file."""

    model_config = ConfigDict(title="Prompt", extra="forbid", frozen=True, defer_build=True)

    limit: Annotated[
        int | None, RARE, Field(ge=1, description="Most prompts, spread evenly over categories.")
    ] = None
    field: Annotated[str, RARE, Metavar("KEY"), Field(description=FIELD_HELP)] = ""
    no_chat_template: Annotated[
        bool, RARE, Field(description="Treat prompts as plain text to continue.")
    ] = not _MODEL.use_chat_template


class AnsweredPrompts(PromptSettings):
    """The prompts that `generate` answers."""

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
            "as the file that is edited: it is one more source of drafts. Repeatable."
        ),
    ] = ()
    group: Annotated[
        str,
        RARE,
        Metavar("NAME"),
        Field(
            description="Answers of one group that are generated at the same time draft from one "
            "another: those of --parallel, and of other commands that share a service. Use it for "
            "similar answers, such as samples of one prompt or agents on one task."
        ),
    ] = ""
    parallel: Annotated[
        int,
        Field(
            ge=1,
            description="With --prompts: prompts to answer at a time, in the same passes of the "
            "model. Each gets the same answer as alone, up to rounding.",
        ),
    ] = 1
    prepare: Annotated[
        int | None,
        RARE,
        Metavar("TOKENS"),
        Field(
            ge=1,
            description="Before the first prompt, allocate memory and, on CUDA, capture passes for "
            "texts of this many tokens, prompt and answer together. Default: on demand.",
        ),
    ] = None
    forget: Annotated[
        bool,
        RARE,
        Field(
            description="Keep answers out of later drafts: those of the service with --server, "
            "those of later prompts with --prompts. Without either, nothing is stored anyway."
        ),
    ] = False


class Colouring(StrEnum):
    """When to colour text."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"

    def applies_to(self, stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether to colour text on a stream.

        `AUTO` colours text only on terminals, and not if `NO_COLOR` (https://no-color.org) is set.
        """
        if self is not Colouring.AUTO:
            return self is Colouring.ALWAYS
        is_wanted = not environment.get("NO_COLOR") and not is_dumb(environment)
        return is_wanted and stream.isatty()


def is_dumb(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the terminal is declared to support no escape sequences."""
    return environment.get("TERM") == "dumb"


class ModelChoice(BaseModel):
    """Which model to run, and where; see `ModelOptions`."""

    model_config = ConfigDict(title="Model", extra="forbid", frozen=True, defer_build=True)

    model: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="The model: a hub id, a folder or a .gguf file. Default: the one whose "
            f"tokenizer --index was built with, if the index names it, else {_MODEL.name}."
        ),
    ] = None
    dtype: Annotated[Precision, Field(description="Data type of the model.")] = _MODEL.precision
    device: Annotated[
        str,
        Metavar("DEVICE"),
        Field(description="Where the model runs, such as cpu or cuda:0."),
    ] = _MODEL.device
    attention: Annotated[Attention, RARE, Field(description="Implementation of attention.")] = (
        Attention(_MODEL.attention)
    )

    def check_device(self) -> None:
        """Refuse a CUDA device if this machine has none, before anything is read.

        Raises:
            DeviceError: the message says why there is no CUDA device.
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
        """Return the options to load the model with.

        Args:
            prompting: settings of how prompts are read.
            indexes: indexes to draft from; their tokenizer determines the model if no option names
                a model.

        Raises:
            ContradictoryOptionsError: two settings exclude each other.
            IndexerError: an index cannot be opened.
            TokenizerError: the model that an index names is not on this machine, or is only a
                tokenizer.
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
    """Which model decodes, and where to store the costs of its passes."""

    cost_cache: Annotated[
        str | None,
        RARE,
        Metavar("DIR"),
        Field(
            description="Where measured costs of passes are stored for the next start; none to "
            "always measure. Default: FOREDRAFT_CACHE, or the user's cache directory."
        ),
    ] = None


def _model_of(indexes: Sequence[Path]) -> str:
    """Return the model for which the indexes were built, or the default model."""
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
    """How long answers may get."""

    model_config = ConfigDict(title="Output", extra="forbid", frozen=True, defer_build=True)

    max_new_tokens: Annotated[
        int, Field(ge=1, description="Most tokens to generate for a prompt.")
    ] = DEFAULT_MAX_NEW_TOKENS


class AnswerSettings(OutputSettings):
    """Where answers end, and which trace to write."""

    stop: Annotated[
        tuple[str, ...],
        Metavar("TEXT"),
        Field(description="End an answer before this text. Repeatable."),
    ] = ()
    include_stop: Annotated[
        bool, RARE, Field(description="Include the --stop text in the answer.")
    ] = False
    stop_id: Annotated[
        tuple[int, ...],
        RARE,
        Metavar("ID"),
        Field(description="A token that ends an answer, in addition to the model's own."),
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
    """How to show and report answers."""

    colour: Colour = Colouring.AUTO
    compare: Annotated[
        bool,
        Field(
            description="Also decode without drafts, and report the measured speedup and whether "
            "the output is identical."
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
    """How to hold and show a conversation."""

    model_config = ConfigDict(title="Output", extra="forbid", frozen=True, defer_build=True)

    system: Annotated[
        str | None,
        RARE,
        Metavar("TEXT"),
        Field(description="The system message. Default: the chat template's own."),
    ] = None
    colour: Colour = Colouring.AUTO
