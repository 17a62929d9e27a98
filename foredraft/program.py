"""The command `foredraft`: maps each command to its module, and starts it.

Only the module of the requested command is imported. That module imports other code when it runs,
so help appears immediately. Plugins register their commands in the entry-point group
`foredraft.commands`.
"""

import sys
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from foredraft.installation import EXTRAS
from indexer.launch import Command, is_installed, launch, version_line, whole_output

ENTRY_POINTS: Final = "foredraft.commands"
"""The entry-point group; each entry point names a `Command`."""

_WRONG_USAGE: Final = 2


def _own(name: str, group: str, package: str, help_: str) -> Command:
    """Return a command that belongs to the core of a package."""
    return Command(name, group, f"{package}.commands", EXTRAS[package], help_)


_CORE: Final = (
    _own("build", "index", "indexer", "Turn folders, repositories and files into an index."),
    _own("add", "index", "indexer", "Add documents to an index."),
    _own("remove", "index", "indexer", "Remove documents from an index."),
    _own("compact", "index", "indexer", "Merge the small segments of an index."),
    _own("serve", "serve", "retriever", "Serve drafts over gRPC."),
    _own("config", "serve", "retriever", "Show the settings with which `serve` would start."),
    _own("access", "serve", "retriever", "Make, list and revoke the credentials of callers."),
    _own("health", "serve", "retriever", "Check whether a service is ready for calls."),
    _own("info", "serve", "retriever", "Show a service's version, phase, models and limits."),
    _own("proto", "serve", "retriever", "Write the gRPC contract, for clients in any language."),
    _own("generate", "decode", "decoder", "Answer prompts with a model and drafts."),
    _own("chat", "decode", "decoder", "Chat with a model, and see each token's source."),
    _own("documents", "look", "indexer", "List the documents of an index."),
    _own("inspect", "look", "indexer", "Show what an index contains, and its tokenizer."),
    _own("verify", "look", "indexer", "Check that an index is intact."),
    _own("explain", "look", "retriever", "Show where the tokens of a draft come from."),
)


@cache
def commands() -> dict[str, Command]:
    """Return all installed commands by name, in the order of the help."""
    found = [point.load() for point in _plugged().values() if is_installed(point.module)]
    installed = [*_CORE, *(command for command in found if command.absent() is None)]
    groups = list(dict.fromkeys(command.group for command in installed))
    ranked = sorted(installed, key=lambda command: groups.index(command.group))
    return {command.name: command for command in ranked}


@cache
def _plugged() -> dict[str, EntryPoint]:
    """Return the entry points of plugin commands by name. The plugins themselves may be missing."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def main() -> None:
    """Run the command that `sys.argv` names.

    Exits with status 2 if there is no such command, and with status 1 if its plugin is missing.
    """
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    core = {command.name: command for command in _CORE}
    command = core.get(word) or (commands().get(word) if word in _plugged() else None)
    if command is not None:
        launch(command.module, command.extra)
    elif word in _plugged():
        sys.exit(_not_installed(_plugged()[word]))
    elif word in ("--help", "-h", "help"):
        with whole_output():
            print(help_text())  # noqa: T201  (for the user of a command)
    elif word == "--version":
        print(version_line())  # noqa: T201  (for the user of a command)
    else:
        print(unknown(word) if word else help_text(), file=sys.stderr)  # noqa: T201  (for the user of a command)
        sys.exit(_WRONG_USAGE)


def _not_installed(point: EntryPoint) -> str:
    """Return the message for a command that needs a plugin which is not installed."""
    absent = point.load().absent() if is_installed(point.module) else point.module
    return f"error: `foredraft {point.name}` is not part of this installation: {absent} is absent"


def help_text() -> str:
    """Return the help: all commands by group."""
    lines = [
        "Usage: foredraft COMMAND [OPTIONS]",
        "",
        "Makes language models decode faster, with the same output, by drafting from what was",
        "written before.",
    ]
    known = commands().values()
    width = max(len(command.name) for command in known)
    for group in dict.fromkeys(command.group for command in known):
        lines += ["", group]
        lines += [f"  {c.name:{width}}  {c.help}" for c in known if c.group == group]
    lines += [
        "",
        "`foredraft COMMAND --help` shows its options, `foredraft --version` the version.",
    ]
    return "\n".join(lines)


def unknown(word: str) -> str:
    """Return the message for an unknown command. It suggests a similar command if there is one."""
    kind = "option" if word.startswith("-") else "command"
    names = list(commands()) if kind == "command" else ["--help", "--version"]
    near = get_close_matches(word, names, n=1)
    meant = f"did you mean `foredraft {near[0]}`? " if near else ""
    return f"error: there is no {kind} `{word}`: {meant}`foredraft --help` lists all commands"
