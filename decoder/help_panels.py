"""The groups that `--help` shows a command's options in."""

from typing import Any, Final

from typer.core import TyperCommand

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
