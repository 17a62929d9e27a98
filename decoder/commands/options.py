"""Options that several commands take."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from decoder.errors import ContradictoryOptionsError, InvalidSettingsError
from decoder.model.pretrained import Attention, ModelOptions, Precision

_PANELS: Final = {
    "Prompt": ("prompt prompts limit per_category warm warm_limit system no_chat_template forget"),
    "Drafts": "index server credentials phrases draft_model draft_vocabulary recycle cost_cache",
    "Sampling": (
        "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
        "seed regex"
    ),
    "Model": "model dtype device attention",
    "Output": "max_new_tokens stop include_stop stop_id repeat trace as_json",
}
_PANEL_OF: Final = {name: panel for panel, names in _PANELS.items() for name in names.split()}


class GroupedCommand(TyperCommand):
    """A command whose options are shown in groups, by their names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            panel = _PANEL_OF.get(parameter.name or "")
            if panel is not None:
                parameter.rich_help_panel = panel  # type: ignore[attr-defined]  # typer's own


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


def model_options(
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
