"""The command `train`: its options, and what they say.

What it does is imported when it does it, so that its help comes at once.
"""

from decoder.commands import run
from decoder.commands.options import ModelChoice
from decoder.plugins.training.options import GainSettings, TaughtTexts, TrainingSettings
from indexer.flags import AsJson, command_line, with_flags


@with_flags
def run_train(
    *,
    chosen: ModelChoice,
    texts: TaughtTexts,
    given: TrainingSettings,
    compared: GainSettings,
    as_json: AsJson = False,
) -> None:
    """Have a model teach a speculator: a small head that drafts from the model's own states.

    The model answers the prompts itself and its states are recorded; then a
    head of EAGLE-3's layout is trained on them, and judged on prompts that it
    was not taught: what it predicts, what it adds to fused drafts, and what a
    draft costs. Draft with it by --speculator.

    It drafts for this model and its revision alone, and best for texts like
    those that it was taught. An interrupted training goes on where it was.
    """
    from decoder.plugins.training.train_command import teach  # noqa: PLC0415  (loads torch)

    teach(chosen, texts, given, compared, as_json=as_json)


app = command_line("The command `train`: its options, and what they say.", {"train": run_train})


def main() -> None:
    """Run the command line; errors are printed in one line."""
    run(app)
