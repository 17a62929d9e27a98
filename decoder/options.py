"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from decoder.models import Attention, ModelOptions, Precision

ModelName = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="The model: a hub id, a folder or a .gguf file."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")]
Dtype = Annotated[Precision, typer.Option(help="What the model computes in.")]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="Where the model runs, such as cpu or cuda:0.")
]
AttentionKind = Annotated[
    Attention, typer.Option("--attention", help="Implementation of attention.")
]
NoChatTemplate = Annotated[
    bool, typer.Option("--no-chat-template", help="Take prompts as plain text to go on from.")
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="The system message. Default: the chat template's own."),
]
_PROMPT_FILE = typer.Option(
    metavar="FILE", help="Spec-Bench's questions (.gz too), or a prompt a line."
)
PromptFile = Annotated[Path, _PROMPT_FILE]
OptionalPromptFile = Annotated[Path | None, _PROMPT_FILE]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Most prompts, spread evenly over categories.")
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="A smaller model with the same tokenizer, to draft with.",
    ),
]
DraftVocabulary = Annotated[
    int | None,
    typer.Option(
        "--draft-vocabulary",
        min=1,
        metavar="N",
        help="With --draft-model: draft only the N most frequent tokens of --index.",
    ),
]
Recycle = Annotated[
    bool,
    typer.Option(
        "--recycle/--no-recycle",
        help="Draft from what the model itself found likely before, too.",
    ),
]
CostCache = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Where measured costs of passes are kept for the next start, none to measure always. "
        "Default: FOREDRAFT_CACHE, or the user's directory for caches.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the report as JSON, on standard output.")
]


def model_options(  # noqa: PLR0913  as many as the commands take
    name: str,
    device: str,
    precision: Precision,
    attention: Attention,
    *,
    no_chat_template: bool,
    system: str | None = None,
) -> ModelOptions:
    """Return what the options of a command say of its model.

    Raises:
        ContradictoryOptionsError: two of them exclude each other.
    """
    return ModelOptions(name, device, precision, attention, not no_chat_template, system)
