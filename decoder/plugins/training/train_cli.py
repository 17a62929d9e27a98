"""The command `train`: its options and their help.

The work itself is imported only when the command runs, so `--help` answers at once.
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
    """Train a speculator: a small head that drafts from the model's own states.

    The model answers the prompts itself, and its states are recorded. Then a
    head in the layout of EAGLE-3 is trained on these states. It is evaluated
    on held-out prompts: how often it predicts a token, how much it adds to
    fused drafts, and how long a draft takes. Use the head with --speculator.

    The head drafts only for this revision of this model, and best for texts
    like its training texts. Run the same command to resume an interrupted
    training.
    """
    from decoder.plugins.training.train_command import teach  # noqa: PLC0415  (loads torch)

    teach(chosen, texts, given, compared, as_json=as_json)


app = command_line("The command `train`: its options and their help.", {"train": run_train})


def main() -> None:
    """Run the command line and print errors in one line."""
    run(app)
