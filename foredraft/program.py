"""The command `foredraft`: which package has which command, and how it is started.

Only the package of the command that was named is imported, and what the command does only when it
does it: help comes at once.
"""

import sys
from difflib import get_close_matches
from typing import Final, NamedTuple

from foredraft.installation import EXTRAS
from indexer.launch import launch, version_line, whole_output

_WRONG_USAGE: Final = 2


class Command(NamedTuple):
    """A command of one of the packages.

    Attributes:
        name: the word after `foredraft`.
        group: under which the help shows it.
        package: whose module `commands` has it under the same name.
        help: what it does, in a line.
    """

    name: str
    group: str
    package: str
    help: str


COMMANDS: Final = (
    Command("build", "index", "indexer", "Turn folders, repositories and files into an index."),
    Command("add", "index", "indexer", "Add documents to an index."),
    Command("remove", "index", "indexer", "Remove documents from an index."),
    Command("compact", "index", "indexer", "Merge the small segments of an index."),
    Command("export", "index", "retriever", "Write an index for an engine's own drafting."),
    Command("serve", "serve", "retriever", "Serve drafts over gRPC."),
    Command("config", "serve", "retriever", "Show the settings with which `serve` would start."),
    Command("access", "serve", "retriever", "Make, list and revoke the credentials of callers."),
    Command("admin", "serve", "retriever", "Look into a running service, and change it."),
    Command("health", "serve", "retriever", "Say whether a service takes calls."),
    Command("info", "serve", "retriever", "Show a service's version, phase, models and limits."),
    Command("generate", "decode", "decoder", "Answer prompts with a model and drafts."),
    Command("chat", "decode", "decoder", "Talk with a model, and see what each token came from."),
    Command("bench", "decode", "decoder", "Measure against decoding without drafts."),
    Command("train", "decode", "decoder", "Have a model teach a speculator that drafts for it."),
    Command("documents", "look", "indexer", "List the documents of an index."),
    Command("inspect", "look", "indexer", "Say what an index holds, and for which tokenizer."),
    Command("verify", "look", "indexer", "Check that an index is whole."),
    Command("explain", "look", "retriever", "Show where the tokens of a draft come from."),
    Command("replay", "look", "retriever", "Try drafts on recorded outputs, without a model."),
    Command("estimate", "look", "decoder", "Say from recorded outputs whether drafts would help."),
    Command("trace", "look", "decoder", "Read what `generate --trace` wrote of every pass."),
)


def main() -> None:
    """Run the command that `sys.argv` names.

    Ends with 2 where there is no such command.
    """
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    package = next((command.package for command in COMMANDS if command.name == word), None)
    if package is not None:
        launch(package, EXTRAS[package])
    elif word in ("--help", "-h", "help"):
        with whole_output():
            print(help_text())  # noqa: T201  (for the user of a command)
    elif word == "--version":
        print(version_line())  # noqa: T201  (for the user of a command)
    else:
        print(unknown(word) if word else help_text(), file=sys.stderr)  # noqa: T201  (for the user of a command)
        sys.exit(_WRONG_USAGE)


def help_text() -> str:
    """Return the help: all commands by group."""
    lines = [
        "Usage: foredraft COMMAND [OPTIONS]",
        "",
        "Makes language models decode faster, with the same output, by drafting from what was",
        "written before.",
    ]
    width = max(len(command.name) for command in COMMANDS)
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines += ["", group]
        lines += [f"  {c.name:{width}}  {c.help}" for c in COMMANDS if c.group == group]
    lines += [
        "",
        "`foredraft COMMAND --help` shows its options, `foredraft --version` the version.",
    ]
    return "\n".join(lines)


def unknown(word: str) -> str:
    """Return what to say of a word that is no command: the nearest one, if any is near."""
    kind = "option" if word.startswith("-") else "command"
    names = [command.name for command in COMMANDS] if kind == "command" else ["--help", "--version"]
    near = get_close_matches(word, names, n=1)
    meant = f"did you mean `foredraft {near[0]}`? " if near else ""
    return f"error: there is no {kind} `{word}`: {meant}`foredraft --help` lists all commands"
