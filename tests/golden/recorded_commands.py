"""Texts of errors, exit codes, and keys of JSON: what users and scripts see of the commands.

Commands run in this process, in a folder of small files, by the same entry as `foredraft` does. A
case is a name and a command line, in the tables below. Texts are kept without what a machine
decides: paths, addresses, measured figures and versions. Of JSON the keys and types are kept.
"""

import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tokenizers import processors

from foredraft.program import commands, main
from indexer.build import BuildOptions, build_from_texts, build_from_tokens, build_index
from indexer.change.changes import remove_documents
from indexer.format.records import checksum_of
from indexer.reader import Index
from indexer.tokenizer import Vocabulary, load_tokenizer
from retriever.drafter import DraftRequest, SequenceOptions
from retriever.limits import Limits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.foredraft.all_commands import ALL
from tests.golden.byte_tokenizer import STOP, byte_tokenizer
from tests.golden.record import Step, exact
from tests.golden.sections import Scope

ROOT: Final = Path(__file__).parents[2]
_CRASHED: Final = "crash"
_TEMPLATE: Final = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

Cases = Mapping[str, Mapping[str, str]]

PROGRAM: Final[Mapping[str, str]] = {
    "no command": "",
    "an unknown command": "buld",
    "a command like no other": "xyzzy",
    "an unknown option": "--verson",
    "the version": "--version",
    "the help": "--help",
}

INDEXES: Final[Cases] = {
    "build": {
        "a folder": "source -o new.index --tokenizer tokenizer --engine serial --json",
        "shown as text": "source -o text.index --tokenizer tokenizer --engine serial",
        "a dry run": "source log.jsonl --dry-run --json",
        "a dry run shown as text": "source log.jsonl --dry-run",
        "no output": "source",
        "no source": "-o no.index",
        "sources and an index": "source --from good.index -o no.index",
        "a dry run of an index": "--from good.index --dry-run",
        "resuming from an index": "--from good.index -o no.index --resume",
        "an index without texts": "--from good.index -o no.index --tokenizer tokenizer",
        "from an index that is not there": "--from absent -o no.index --tokenizer tokenizer",
        "a source that is not there": "absent -o no.index --tokenizer tokenizer",
        "an empty folder": "empty -o no.index --tokenizer tokenizer",
        "an index that exists": "source -o good.index --tokenizer tokenizer",
        "an output that is a file": "source -o source/a.txt --tokenizer tokenizer",
        "an output that is no index": "source -o no_index --tokenizer tokenizer --overwrite",
        "a tokenizer that is not there": "source -o no.index --tokenizer ./absent",
        "lines that are no JSON": "bad.jsonl --dry-run",
        "only lines that are no JSON": "bad.jsonl -o no.index --tokenizer tokenizer --strict 0",
        "another field": "log.jsonl --dry-run --field body",
        "an unknown encoding": "source --dry-run --encoding utf8mb4",
        "standard input twice": "- - --dry-run",
        "strict out of range": "source --dry-run --strict 5",
        "strict that is no number": "source --dry-run --strict half",
        "turns of another kind": "source --dry-run --turns both",
        "memory that is no size": "source -o no.index --tokenizer tokenizer --memory many",
        "an engine of another name": "source -o no.index --tokenizer tokenizer --engine threads",
        "phrases that are not there": "source --dry-run --exclude-phrases absent",
    },
    "add": {
        "a dry run": "add.index more --dry-run --json",
        "a folder": "add.index more --engine serial --json",
        "once more, as text": "add.index more --engine serial",
        "no source": "good.index",
        "an index that is not there": "absent more",
        "no index": "no_index more",
        "a damaged index": "damaged.index more",
        "an index of another version": "old.index more",
        "an index of token ids": "other.index more",
        "a source that is not there": "good.index absent",
        "an empty folder": "good.index empty",
    },
    "remove": {
        "a dry run": "remove.index --matching *c.txt --dry-run --json",
        "a document": "remove.index --matching *c.txt --engine serial --json",
        "what is not there": "remove.index --document absent",
        "nothing that matches": "remove.index --matching absent*",
        "all documents": "remove.index --matching *",
        "no document named": "remove.index",
        "an index that is not there": "absent --matching *",
        "no index": "no_index --matching *",
    },
    "compact": {
        "an index": "compact.index --engine serial --json",
        "once more, as text": "compact.index --engine serial",
        "an index that is not there": "absent",
        "no index": "no_index",
        "segments out of range": "compact.index --segment-tokens 0",
    },
    "documents": {
        "an index": "good.index --json",
        "shown as text": "good.index",
        "nothing that matches": "good.index --matching absent*",
        "an index that is not there": "absent",
        "no index": "no_index",
        "a damaged index": "damaged.index",
    },
    "inspect": {
        "an index": "good.index --json",
        "shown as text": "good.index",
        "an index of token ids": "other.index --json",
        "an index that is not there": "absent",
        "a file": "log.jsonl",
        "no index": "no_index",
        "a damaged index": "damaged.index",
        "an index of another version": "old.index",
        "a manifest that is no JSON": "unreadable.index",
    },
    "verify": {
        "an index": "good.index --json",
        "shown as text": "good.index",
        "a changed byte": "changed.index --json",
        "a changed byte shown as text": "changed.index",
        "a damaged index": "damaged.index",
        "an index that is not there": "absent",
        "no index": "no_index",
        "samples out of range": "good.index --samples -1",
    },
}

SERVICES: Final[Cases] = {
    "export": {
        "an index": "good.index --to sglang-corpus -o corpus.jsonl --tokenizer tokenizer --json",
        "a file that exists": "good.index --to sglang-corpus -o corpus.jsonl --tokenizer tokenizer",
        "shown as text": "good.index --to sglang-corpus -o corpus.jsonl --tokenizer tokenizer "
        "--overwrite --max-tokens 12",
        "no form": "good.index -o no.jsonl",
        "an unknown form": "good.index --to vllm -o no.jsonl",
        "another tokenizer": "other.index --to sglang-corpus -o no.jsonl --tokenizer tokenizer",
        "no tokenizer for exllamav3": "good.index --to exllamav3 -o no.bin",
        "an index that is not there": "absent --to sglang-corpus -o no.jsonl",
        "no index": "no_index --to sglang-corpus -o no.jsonl",
    },
    "serve": {
        "an index that is not there": "--index absent --address 127.0.0.1:0",
        "no index": "--index no_index --address 127.0.0.1:0",
        "a damaged index": "--index damaged.index --address 127.0.0.1:0",
        "indexes of two tokenizers": "--index good.index --index other.index --address 127.0.0.1:0",
        "phrases that are not there": "--phrases absent --tokenizer tokenizer "
        "--address 127.0.0.1:0",
        "an address in use": "--address TAKEN",
        "an address that is none": "--address nowhere",
        "a socket in no folder": "--address unix:absent/socket",
        "an address for everyone": "--address 0.0.0.0:0",
        "a certificate without a key": "--certificate absent --address 127.0.0.1:0",
        "an access file that is not there": "--access absent --address 127.0.0.1:0",
        "a tenant without a path": "--tenant-index one --address 127.0.0.1:0",
        "settings that are not there": "--config absent.toml",
        "an unknown setting": "--config unknown.toml",
        "a setting out of range": "--config range.toml",
        "settings that are no TOML": "--config log.jsonl",
        "an option out of range": "--max-sessions 0",
        "a path that is empty": "--state ''",
        "a state that is a file": "--state log.jsonl --tokenizer tokenizer --address 127.0.0.1:0",
        "a socket mode that is none": "--socket-mode 999 --address unix:new.socket",
    },
    "config": {
        "what holds": "--json",
        "settings of a file": "--config good.toml",
        "an unknown setting": "--config unknown.toml",
        "a setting out of range": "--config range.toml",
        "a setting of another type": "--config type.toml",
        "settings that are no TOML": "--config log.jsonl",
        "settings that are not there": "--config absent.toml",
        "a folder": "--config source",
        "an option out of range": "--trace-ratio 2",
        "a number that is none": "--max-sessions many",
    },
    "access": {
        "a certificate": "certificate acme DNS:host.example --access access.jsonl --name gate",
        "a certificate once more": "certificate acme DNS:host.example --access access.jsonl",
        "the list": "list --access access.jsonl",
        "scopes": "scopes gate --access access.jsonl --scope draft --scope delete",
        "an unknown scope": "scopes gate --access access.jsonl --scope read",
        "scopes of nobody": "scopes nobody --access access.jsonl --scope draft",
        "no identity": "certificate acme host --access access.jsonl",
        "a name that is none": "token acme --access access.jsonl --name 'a b'",
        "revoking": "revoke gate --access access.jsonl",
        "revoking nobody": "revoke nobody --access access.jsonl",
        "a token for no tenant": "token --access access.jsonl",
        "a file that is not there": "list --access absent",
        "a file that is none": "list --access private.jsonl",
        "an unknown command": "show --access access.jsonl",
        "no file": "list",
    },
    "health": {
        "a service that is away": "127.0.0.1:1 --timeout-s 1",
        "a socket that is not there": "unix:absent.socket --timeout-s 1",
        "credentials that are not there": "127.0.0.1:1 --credentials absent.toml",
        "credentials with an unknown key": "127.0.0.1:1 --credentials unknown.toml",
        "a timeout out of range": "127.0.0.1:1 --timeout-s 0",
    },
    "info": {
        "a service that is away": "127.0.0.1:1 --timeout-s 1",
        "a socket that is not there": "unix:absent.socket --timeout-s 1",
        "credentials that are not there": "127.0.0.1:1 --credentials absent.toml",
        "a timeout out of range": "127.0.0.1:1 --timeout-s 0",
    },
    "admin": {
        "no address": "sessions",
        "a service that is away": "sessions --address unix:absent.socket --timeout-s 1",
        "an unknown command": "session",
        "attaching nothing": "attach",
        "a timeout out of range": "drain --address unix:absent.socket --timeout-s 0",
        "an idle time out of range": "sessions --idle -1",
    },
    "explain": {
        "an index": "--index good.index --tokenizer tokenizer --context 'hello wor' --json",
        "shown as text": "--index good.index --tokenizer tokenizer --context 'hello wor'",
        "the whole tree": "--index good.index --tokenizer tokenizer --context 'hello wor' "
        "--budget 3 --full",
        "token ids": "--index other.index --context-ids 1,2,3 --budget 3 --json",
        "no context": "--index good.index",
        "two contexts": "--index good.index --context a --context-ids 1",
        "ids that are none": "--index other.index --context-ids 1,x",
        "an id outside the vocabulary": "--index other.index --context-ids 1,99",
        "a file that is not there": "--index good.index --context-file absent",
        "a file that is no text": "--index good.index --context-file binary",
        "another tokenizer": "--index other.index --tokenizer tokenizer --context a",
        "an index that is not there": "--index absent --context a",
        "no index": "--index no_index --context a",
        "a budget out of range": "--index good.index --context a --budget 257",
        "a service that is away": "--server unix:absent.socket --context-ids 1,2",
        "a service and an index": "--server unix:absent.socket --index good.index --context a",
    },
    "replay": {
        "a log": "log.jsonl --index good.index --tokenizer tokenizer --budget 4 --json",
        "shown as text": "log.jsonl --index good.index --tokenizer tokenizer --budget 4",
        "calibration": "log.jsonl --tokenizer tokenizer --budget 4 --calibration --json",
        "a log that is not there": "absent --tokenizer tokenizer",
        "lines that are no JSON": "bad.jsonl --tokenizer tokenizer",
        "nothing to replay": "nothing.jsonl --tokenizer tokenizer",
        "another tokenizer": "log.jsonl --index other.index --tokenizer tokenizer",
        "an index that is not there": "log.jsonl --index absent --tokenizer tokenizer",
        "an unknown drafter": "log.jsonl --drafter other --tokenizer tokenizer",
        "an unknown module": "log.jsonl --drafter absent:a --tokenizer tokenizer",
        "phrases for another drafter": "log.jsonl --drafter suffix --phrases log.jsonl",
        "a budget out of range": "log.jsonl --budget -1",
        "lanes out of range": "log.jsonl --lanes 0",
    },
}

MODEL: Final = "--model model --cost-cache costs --max-new-tokens 8"
BENCH: Final = f"{MODEL} --prompts prompts.txt"

DECODING: Final[Cases] = {
    "build": {"a tokenizer that is none": "source -o no.index --tokenizer ./source"},
    "generate": {
        "a prompt": f"{MODEL} --prompt abcabc --json",
        "shown as text": f"{MODEL} --prompt abcabc --colour never",
        "prompts of a file": f"{MODEL} --prompts prompts.txt --parallel 2 --json",
        "what drafts are worth": f"{MODEL} --prompt abcabc --compare --json",
        "a trace": f"{MODEL} --prompt abcabc --trace trace.jsonl --json",
        "a model that is not there": "--model ./absent --prompt a",
        "a model that is none": "--model ./source --prompt a",
        "an unknown device": "--model model --device gpu --prompt a",
        "an unknown type": "--model model --dtype int8 --prompt a",
        "an empty prompt": f"{MODEL} --prompt '' --no-chat-template",
        "a prompt that is too long": f"{MODEL} --prompts long.txt",
        "a prompt and prompts": "--model model --prompt a --prompts prompts.txt",
        "prompts that are not there": "--model model --prompts absent",
        "prompts that are no text": "--model model --prompts binary",
        "a limit of one prompt": "--model model --prompt a --limit 2",
        "several at once of one prompt": "--model model --prompt a --parallel 2",
        "several at once, compared": "--model model --prompts prompts.txt --parallel 2 --compare",
        "colours in JSON": "--model model --prompt a --colour always --json",
        "a system message without a template": "--model model --prompt a --system s "
        "--no-chat-template",
        "top-k at temperature 0": "--model model --prompt a --top-k 4",
        "a penalty out of range": "--model model --prompt a --presence-penalty 3",
        "a temperature out of range": "--model model --prompt a --temperature -1",
        "an index of another tokenizer": "--model model --prompt a --index other.index",
        "an index that is not there": "--model model --prompt a --index absent",
        "a state beside a service": "--model model --prompt a --state s --server unix:socket",
        "a service that is away": f"{MODEL} --prompt abc --server unix:absent.socket --json",
        "a vocabulary without a model": "--model model --prompt a --draft-vocabulary 16",
        "drawing without a model": "--model model --prompt a --draft-sampling --temperature 1",
        "learning without a speculator": "--model model --prompt a --online learned",
        "a speculator that is not there": "--model model --prompt a --speculator ./absent",
        "a stop string that is empty": "--model model --prompt a --stop ''",
        "a stop id outside the vocabulary": "--model model --prompt a --stop-id 9999",
        "an expression that is none": "--model model --prompt a --regex '('",
        "a page in no folder": "--model model --prompt a --html absent/page.html",
    },
    "trace": {
        "a trace": "trace.jsonl --json",
        "shown as text": "trace.jsonl",
        "a page": "trace.jsonl --html page.html",
        "a trace that is not there": "absent",
        "no trace": "log.jsonl",
        "lines that are no JSON": "bad.jsonl",
    },
    "chat": {
        "two messages": f"{MODEL}",
        "no template": "--model plain_model",
        "a model that is not there": "--model ./absent",
        "an option of generate": "--model model --prompt a",
    },
    "bench": {
        "the contenders": "--contenders",
        "a prompt": f"{BENCH} --limit 1 --nodes 4 --repeat 1 --json",
        "an unknown contender": f"{BENCH} --contender other",
        "a contender without a model": f"{BENCH} --contender model",
        "nodes out of range": f"{BENCH} --nodes 257",
        "no prompts": "--model model",
        "prompts that are not there": "--model model --prompts absent",
        "a seed at temperature 0": f"{BENCH} --seed 3",
        "drawing at temperature 0": f"{BENCH} --draft-model model --draft-sampling",
        "two turns at once": f"{BENCH} --parallel 2 --turns both",
        "more at once than prompts": f"{BENCH} --parallel 9",
        "learning": f"{BENCH} --speculator head --online learned",
        "a plot of another kind": f"{BENCH} --plot plot.pdf",
        "repeats out of range": f"{BENCH} --repeat 0",
    },
    "train": {
        "no texts": "--model model --output head",
        "texts that are not there": "--model model --output head --from absent",
        "lines that are no JSON": "--model model --output head --from bad.jsonl --no-gain",
        "a state that is not there": "--model model --output head --state absent",
        "minutes out of range": "--model model --output head --from log.jsonl --minutes 0",
        "an index without a comparison": "--model model --output head --from log.jsonl --no-gain "
        "--index good.index",
    },
    "estimate": {
        "a log": "log.jsonl --tokenizer tokenizer --budget 4 --json",
        "shown as text": "log.jsonl --tokenizer tokenizer --budget 4",
        "costs of a file": "log.jsonl --tokenizer tokenizer --budget 4 --costs costs.json --json",
        "a log that is not there": "absent",
        "lines that are no JSON": "bad.jsonl --tokenizer tokenizer",
        "costs from two places": "log.jsonl --costs costs.json --model model",
        "costs that are none": "log.jsonl --tokenizer tokenizer --costs bad.jsonl",
        "costs that are not there": "log.jsonl --tokenizer tokenizer --costs absent",
        "a batch of a model": "log.jsonl --model model --batch 2",
        "an unknown roofline": "log.jsonl --tokenizer tokenizer --roofline 9b-abacus",
        "a budget out of range": "log.jsonl --budget 257",
        "an unknown field": "log.jsonl --tokenizer tokenizer --by tier",
        "a plot of another kind": "log.jsonl --plot plot.pdf",
    },
}

RUNNING: Final[Cases] = {
    "health": {"a service": "SERVICE", "a service that lives": "SERVICE --live"},
    "info": {"a service": "SERVICE"},
    "explain": {"a service": "--server SERVICE --context-ids 1,2,3 --json"},
    "admin": {
        name: f"{name} --address unix:admin.socket --json"
        for name in ("sessions", "tenants", "indexes", "use", "settings", "reload", "drain")
    },
}
"""With a service that runs: `SERVICE` stands for its address."""

AS_PROCESSES: Final[Mapping[str, str]] = {
    "no command": "",
    "an unknown command": "buld",
    "an unknown option": "build --bogus",
    "a wrong value": "verify good.index --samples -1",
    "an error": "inspect absent",
    "a good call": "inspect good.index --json",
}

_STARTS_BY_ITSELF: Final = frozenset({"serve", "config", "generate", "chat", "bench"})
"""Commands that need no argument."""

_MEASURED: Final = frozenset({"replay", "generate", "chat", "bench", "estimate", "trace"})
"""Commands whose texts hold figures or answers: of each line the first word is kept."""

_BY_RUN: Final = frozenset({"widths", "drafted", "accepted", "accepted_per_position", "nodes"})
"""Keys of JSON below which there is what a run happened to need, and its types with it."""


def steps(scope: Scope) -> Iterator[Step]:
    """Yield what users see of the commands, and the texts of the libraries' errors."""
    folder = scope.scratch.resolve()
    shell = Shell(folder)
    with chdir(folder), shell.opened():
        write_files(folder)
        yield from _cases(shell, {"foredraft": PROGRAM})
        yield from _helps(shell)
        yield from _cases(shell, {**INDEXES, **SERVICES})
        yield from _usage(shell, ("indexer", "retriever"))
        yield from _errors(shell, "library", LIBRARY_ERRORS)
        if scope.small:
            return
        yield from _running(shell)
        yield from _processes(shell)
        write_models(folder)
        yield from _cases(shell, DECODING)
        yield from _usage(shell, ("decoder",))
        yield from _errors(shell, "decoder", _decoder_errors())


def _cases(shell: "Shell", cases: Cases) -> Iterator[Step]:
    for command, lines in cases.items():
        for name, line in lines.items():
            words = line if command == "foredraft" else f"{command} {line}"
            said = shell.run(words, first_words=command in _MEASURED)
            yield exact(f"commands/{command}/{name}", said)


def _usage(shell: "Shell", packages: tuple[str, ...]) -> Iterator[Step]:
    """Yield what each command says of an unknown option, and without arguments."""
    for command in commands().values():
        if command.package not in packages:
            continue
        yield exact(
            f"commands/{command.name}/an unknown option", shell.run(f"{command.name} --qqq")
        )
        if command.name not in _STARTS_BY_ITSELF:
            yield exact(f"commands/{command.name}/no argument", shell.run(command.name))


def _helps(shell: "Shell") -> Iterator[Step]:
    """Yield the options of every command, and a digest of its whole help."""
    for words in sorted(ALL):
        shown = shell.run(f"{words} --help")["output"]
        found = re.findall(r"^ *(?:-\w, )?(--[\w-]+)(?: / (--[\w-]+))?", shown, re.MULTILINE)
        options = [option for each in found for option in each if option]
        digest = sha256(shown.encode()).hexdigest()[:16]
        yield exact(f"commands/{words}/help", {"options": options, "digest": digest})


def _running(shell: "Shell") -> Iterator[Step]:
    """Yield what commands say of a service that runs."""
    words = "serve --index other.index --address 127.0.0.1:0 --admin-address unix:admin.socket"
    with shell.started(words) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving on "), line
        shell.addresses["SERVICE"] = line.removeprefix("serving on ").strip()
        yield from _cases(shell, RUNNING)
        process.wait(timeout=60)  # the last case has it drain
        yield exact("commands/serve/an end by draining", process.returncode)


def _processes(shell: "Shell") -> Iterator[Step]:
    """Yield what processes of the real entry end with."""
    for name, line in AS_PROCESSES.items():
        with shell.started(line) as process:
            out, err = process.communicate(timeout=60)
            said = {"exit": process.returncode, "error": shell.normalised(err), "starts": out[:20]}
            yield exact(f"commands/processes/{name}", said)


def _errors(
    shell: "Shell", part: str, errors: Mapping[str, Callable[[], object]]
) -> Iterator[Step]:
    """Yield what calls of the libraries raise."""
    for name, fails in errors.items():
        try:
            fails()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is recorded)
            said = f"{type(error).__name__}: {shell.normalised(str(error))}"
        else:
            said = "no error"
        yield exact(f"commands/errors/{part}/{name}", said)


_CHANGING: Final[Mapping[str, str]] = {
    r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+]00:00)": "TIME",
    r"\b\d{4}-\d\d-\d\d\b": "DAY",
    r"(?m)^.*compil(ing|ed).*\n": "",  # where kernels are not kept from an earlier run
    r"\b[\d.,]*\d( ?)(?=(m?s|us|%|[KMG]i?B|tokens/s)(\W|$))": r"#\1",
    r"on disk +[\d,]+": "on disk #",
    r"(?m)^(\d+ tokens, # tokens/s), .*": r"\1, #",
    r"(?m)^([\d.]+x plain decoding|the speedup from drafts) .*": "#x plain decoding",
    r"(?m)^\d+\.\d min: .*\n": "",
    r"(max_\w*bytes): \d+": r"\1: #",
    r"(?m)^measuring what passes cost.*\n": "",
    r"last error: .*": "last error: #",
    r"(cannot load the \w+ '[^']*': ).*": r"\1#",  # what transformers says
}
"""Parts of texts that machines and versions of libraries decide, and what stands for them."""

_FRACTION: Final = r"(?<![\d.])\d+\.\d+(?![\d.])"
"""In outputs, where they are figures."""


@dataclass(slots=True)
class Shell:
    """Runs command lines in a folder, as `foredraft` does, and reports what they say.

    Attributes:
        folder: the current one.
        addresses: what words of command lines stand for; texts are reported with the words.
    """

    folder: Path
    addresses: dict[str, str]

    def __init__(self, folder: Path) -> None:
        self.folder, self.addresses = folder, {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep an address taken, and the settings of this process as they are."""
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, self.environment(), clear=True))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            self.addresses["TAKEN"] = f"127.0.0.1:{taken.getsockname()[1]}"
            yield

    @staticmethod
    def environment() -> dict[str, str]:
        """Return this environment without settings of ours, for a terminal of 100 columns."""
        ours = ("FOREDRAFT_", "FORCE_COLOR", "TTY_")  # rich heeds the last two
        kept = {key: each for key, each in os.environ.items() if not key.startswith(ours)}
        fixed = {"COLUMNS": "100", "LINES": "40", "NO_COLOR": "1", "TERM": "dumb"}
        return {**kept, **fixed, "PYTHONPATH": str(ROOT), "FOREDRAFT_CACHE": "none"}

    def run(self, line: str, *, first_words: bool = False) -> dict[str, Any]:
        """Return the exit code, the errors and the output of a command line.

        Args:
            line: behind the program's name.
            first_words: whether only the first words of lines are kept of an output of text.
        """
        out, err = io.StringIO(), io.StringIO()
        given = io.TextIOWrapper(io.BytesIO(b"hello\n\nonce more\n"))
        argv = ["foredraft", *self._words(line)]
        with (
            _kept_process(),
            patch.object(sys, "argv", argv),
            patch.object(sys, "stdin", given),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = _exit_code_of(main)
        if isinstance(code, str):  # Python prints it at the end
            code = err.write(f"{code}\n") and 1
        shown = self._json(out.getvalue())
        if shown is None:
            shown = re.sub(_FRACTION, "#", self.normalised(out.getvalue()))
            if first_words:
                shown = list(dict.fromkeys(re.findall(r"(?m)^\W*([A-Za-z]{2,})", shown)))
        return {"exit": code, "error": self.normalised(err.getvalue()), "output": shown}

    @contextmanager
    def started(self, line: str) -> Iterator["subprocess.Popen[str]"]:
        """Start a command line in a process of its own, and end it behind the block."""
        with subprocess.Popen(
            [sys.executable, "-m", "foredraft", *self._words(line)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def normalised(self, text: str) -> str:
        """Return a text without what this machine and this run decide, and without its layout."""
        for word, address in self.addresses.items():
            text = text.replace(address, word)
            text = re.sub(rf"\b{address.rpartition(':')[2]}\b", "PORT", text)
        text = text.replace(f"{self.folder}/", "").replace(str(self.folder), "DIR")
        text = text.replace(str(ROOT), "ROOT").replace(version("foredraft"), "VERSION")
        for pattern, kept in _CHANGING.items():
            text = re.sub(pattern, kept, text)
        return "\n".join(" ".join(each.split()) for each in text.splitlines() if each.strip())

    def _words(self, line: str) -> list[str]:
        return [self.addresses.get(word, word) for word in shlex.split(line)]

    @staticmethod
    def _json(text: str) -> Any:
        """Return the shape of a text that is JSON, or lines of it; `None` for any other."""
        try:
            return shape(json.loads(text))
        except ValueError:
            pass
        try:
            rows = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return None
        return {"lines": shape(rows)} if rows else None


def shape(value: Any) -> Any:
    """Return the keys of a value of JSON with the types of what they hold; of lists the first."""
    if isinstance(value, dict):
        return {key: "#" if key in _BY_RUN else shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return type(value).__name__


def _exit_code_of(run: Callable[[], object]) -> Any:
    try:
        run()
    except SystemExit as end:
        return 0 if end.code is None else end.code
    except Exception as error:  # noqa: BLE001  (a command that crashes is recorded as such)
        return f"{_CRASHED}: {type(error).__name__}: {error}"
    return 0


@contextmanager
def _kept_process() -> Iterator[None]:
    """Put back what commands change of their process: loggers and the answer to Ctrl-C."""
    loggers = [logging.getLogger(name) for name in ("", "foredraft", *_packages())]
    before = [(each, each.level, each.propagate, each.handlers) for each in loggers]
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        for logger, level, propagate, handlers in before:
            logger.level, logger.propagate, logger.handlers = level, propagate, handlers


def _packages() -> list[str]:
    return list(dict.fromkeys(command.package for command in commands().values()))


def write_files(folder: Path) -> None:
    """Write what the cases name: sources, logs, settings, a tokenizer and indexes."""
    texts = {
        "source/a.txt": "hello world, hello words",
        "source/b/c.txt": "what was written once is written once more",
        "more/d.txt": "hello there",
        "log.jsonl": '{"prompt": "say hello", "output": "hello world, hello world, hello"}\n' * 2,
        "bad.jsonl": '{"prompt": "a", "output": \n{"text": "b"}\n',
        "nothing.jsonl": "",
        "prompts.txt": "abcabc\nonce more\n",
        "long.txt": f"short\n{'x' * 200}\n",
        "good.toml": 'index = ["good.index"]\nmax_sessions = 10\n',
        "unknown.toml": "max_session = 10\n",
        "range.toml": "max_sessions = 0\n",
        "type.toml": 'max_sessions = "many"\n',
        "costs.json": '{"widths": [1, 2, 5], "seconds": [1, 2.01, 5.04]}',
        "no_index/a.txt": "no index",
        "private.jsonl": '{"tenant": "acme"}\n',
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "source" / "none.txt").write_bytes(b"\0")
    (folder / "binary").write_bytes(b"caf\xe9")
    (folder / "private.jsonl").chmod(0o600)
    (folder / "empty").mkdir()
    write_tokenizer(folder / "tokenizer")
    _write_indexes(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each byte."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([STOP])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _write_indexes(folder: Path) -> None:
    """Write an index, copies to change, damaged ones, and one of another tokenizer."""
    files = sorted((folder / "source").rglob("[ac].txt"))
    texts = [(str(path.relative_to(folder)), path.read_text()) for path in files]
    build_from_texts(texts, folder / "good.index", str(folder / "tokenizer"))
    ids = [("one", [1, 2, 3, 4, 1, 2, 3, 5]), ("two", [7, 8, 9, 7, 8])]
    build_from_tokens(ids, folder / "other.index", Vocabulary(50, "ab" * 32))
    for name in ("add", "remove", "compact", "changed", "damaged", "old", "unreadable"):
        shutil.copytree(folder / "good.index", folder / f"{name}.index")
    tokens = folder / "changed.index" / "segments" / "00000000" / "tokens"
    tokens.write_bytes(b"\x07" + tokens.read_bytes()[1:])
    (folder / "damaged.index" / "segments" / "00000000" / "starts").unlink()
    catalog = folder / "old.index" / "catalog" / "00000000"
    body = re.sub(rb'"format": *\d+', b'"format": 2', catalog.read_bytes().partition(b"\n")[2])
    catalog.write_bytes(checksum_of(body).encode() + b"\n" + body)
    (folder / "unreadable.index" / "catalog" / "00000000").write_text("{")


def write_models(folder: Path) -> None:
    """Write a tiny model with a chat template, and one without."""
    import torch  # noqa: PLC0415  (slow)
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.set_num_threads(1)  # tiny models wait for a second one longer than they compute
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, **_NO_SPECIAL_IDS}
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_key_value_heads=2,
        initializer_range=0.4,
        max_position_embeddings=128,
        **sizes,
    )
    for name in ("model", "plain_model"):
        shutil.copytree(folder / "tokenizer", folder / name)
        with redirect_stderr(io.StringIO()):
            LlamaForCausalLM(config).save_pretrained(folder / name)
    (folder / "model" / "chat_template.jinja").write_text(_TEMPLATE)


_WORDS: Final = Vocabulary(50, "ab" * 32)
_NO_SPECIAL_IDS: Final = {"eos_token_id": 0, "bos_token_id": 0}


def _drafter(**limits: Any) -> EmbeddedDrafter:
    """Return a drafter with a session `a` of four tokens."""
    drafter = EmbeddedDrafter(vocabulary=_WORDS, limits=Limits(**limits))
    drafter.open("a", [1, 2, 3, 1])
    return drafter


def _drafted(new_tokens: Any, length: int, nodes: int = 4, name: str = "a", **limits: Any) -> None:
    _drafter(**limits).draft([DraftRequest(name, new_tokens, length, nodes)])


def _tree(tokens: Any, parents: Any, probabilities: Any, sources: Any) -> DraftTree:
    return DraftTree.checked(tokens, parents, probabilities, sources, vocabulary_size=50)


def _built(documents: list[tuple[str, Any]], output: str = "no.index") -> None:
    build_from_tokens(documents, output, _WORDS)


LIBRARY_ERRORS: Final[Mapping[str, Callable[[], object]]] = {
    "a tree of two dimensions": lambda: _tree([[1]], [-1], [1.0], [0]),
    "a tree of unequal arrays": lambda: _tree([1, 2], [-1], [1.0], [0]),
    "a tree with a negative token": lambda: _tree([-1], [-1], [1.0], [0]),
    "a tree with a token outside": lambda: _tree([50], [-1], [1.0], [0]),
    "a tree with a wide token": lambda: _tree([1 << 40], [-1], [1.0], [0]),
    "a tree with a probability above 1": lambda: _tree([1], [-1], [1.5], [0]),
    "a tree with an unknown source": lambda: _tree([1], [-1], [1.0], [250]),
    "a tree with a later parent": lambda: _tree([1, 2], [1, -1], [1.0, 0.5], [0, 0]),
    "a tree of rising probability": lambda: _tree([1, 2], [-1, -1], [0.2, 0.5], [0, 0]),
    "a tree with equal siblings": lambda: _tree([1, 1], [-1, -1], [0.5, 0.4], [0, 0]),
    "a session that is open": lambda: _drafter().open("a", [1]),
    "a session that is unknown": lambda: _drafted([1], 1, name="b"),
    "a session without a name": lambda: _drafter().open("", [1]),
    "a session with a long name": lambda: _drafter().open("a" * 300, [1]),
    "a session with half a character": lambda: _drafter().open("\ud800", [1]),
    "a session to close that is unknown": lambda: _drafter().close("b"),
    "a prompt of text": lambda: _drafter().open("b", ["a"]),
    "a prompt of fractions": lambda: _drafter().open("b", [0.5]),
    "a prompt of two rows": lambda: _drafter().open("b", [[1], [2]]),
    "a prompt with a token outside": lambda: _drafter().open("b", [50]),
    "a prompt with a negative token": lambda: _drafter().open("b", [-1]),
    "a prompt that is too long": lambda: _drafter(max_sequence_tokens=4).open("b", [1] * 5),
    "a session too many": lambda: _drafter(max_sessions=1).open("b", [1]),
    "a tenant's session too many": lambda: _drafter(max_tenant_sessions=1).open("b", [1]),
    "a tenant with a long name": lambda: _drafter().open(
        "b", [1], SequenceOptions(tenant="a" * 300)
    ),
    "a step that was lost": lambda: _drafted([5], 9),
    "a step with a token outside": lambda: _drafted([99], 5),
    "a negative budget": lambda: _drafted([5], 5, -1),
    "a budget above the limit": lambda: _drafted([5], 5, 300),
    "a step of too many nodes": lambda: _drafted([5], 5, 40, max_step_nodes=20),
    "a drafter of no index": lambda: EmbeddedDrafter.open_indexes(["absent"]),
    "a drafter of two tokenizers": lambda: EmbeddedDrafter.open_indexes(
        ["good.index", "other.index"]
    ),
    "a drafter of another tokenizer": lambda: EmbeddedDrafter.open_indexes(
        ["good.index"], vocabulary=_WORDS
    ),
    "a state that is a file": lambda: EmbeddedDrafter(vocabulary=_WORDS, state=Path("log.jsonl")),
    "an index that is not there": lambda: Index.open("absent"),
    "an index that is none": lambda: Index.open("no_index"),
    "an index that is damaged": lambda: Index.open("damaged.index"),
    "an index of another version": lambda: Index.open("old.index"),
    "an index of another tokenizer": lambda: Index.open("good.index", vocabulary=_WORDS),
    "building of nothing": lambda: _built([]),
    "building of empty documents": lambda: _built([("a", [])]),
    "building with a token outside": lambda: _built([("a", [50])]),
    "building with a negative token": lambda: _built([("a", [-1])]),
    "building over an index": lambda: _built([("a", [1])], "good.index"),
    "segments of no token": lambda: BuildOptions(segment_tokens=0),
    "sources that are none": lambda: build_index([], "no.index", "tokenizer"),
    "removing nothing": lambda: remove_documents("good.index"),
    "a vocabulary without a size": lambda: Vocabulary(0, "ab"),
    "a tokenizer that is not there": lambda: load_tokenizer("./absent"),
}


def _decoder_errors() -> Mapping[str, Callable[[], object]]:
    """Return what is imported for some seconds before it fails."""
    from decoder.budget.budget import FixedBudget  # noqa: PLC0415  (slow)
    from decoder.drafters.following import NoDrafter  # noqa: PLC0415
    from decoder.engines.transformers.custom_generate import Foredraft  # noqa: PLC0415
    from decoder.loop import Decoder  # noqa: PLC0415
    from decoder.model.pretrained import ModelOptions, load_model  # noqa: PLC0415
    from decoder.model.target import Target  # noqa: PLC0415
    from decoder.sampling.sampling_settings import SamplingSettings  # noqa: PLC0415
    from decoder.stopping import StopStrings  # noqa: PLC0415

    model = load_model(ModelOptions("model"))
    decoder = Decoder(Target(model.model), NoDrafter(), FixedBudget(4))

    def options(**given: Any) -> Callable[[], object]:
        return lambda: ModelOptions("model", **given)

    def sampling(*temperature: Any, **given: Any) -> Callable[[], object]:
        return lambda: SamplingSettings(*temperature, **given)

    def generated(prompt: Any, most: int = 16) -> Callable[[], object]:
        return lambda: list(decoder.generate(prompt, most))

    return {
        "a system message without a template": options(use_chat_template=False, system="s"),
        "a model that is not there": lambda: load_model(ModelOptions("./absent")),
        "an unknown device": lambda: load_model(ModelOptions("model", device="gpu")),
        "a negative temperature": sampling(-1),
        "a temperature of text": sampling("warm"),
        "a top-p of 0": sampling(1, top_p=0),
        "a negative top-k": sampling(1, top_k=-1),
        "a min-p above 1": sampling(1, min_p=2),
        "a repetition penalty of 0": sampling(1, repetition_penalty=0),
        "a presence penalty above 2": sampling(1, presence_penalty=3),
        "a negative seed": sampling(1, seed=-1),
        "top-k at temperature 0": sampling(0, top_k=3),
        "an empty prompt": generated([]),
        "a prompt of text": generated("abc"),
        "a prompt of fractions": generated([0.5]),
        "a prompt of two rows": generated([[1], [2]]),
        "a prompt with a token outside": generated([9999]),
        "a prompt without room": generated([1] * 128),
        "a negative length": generated([1], -1),
        "no sequence at a time": lambda: list(decoder.generate_many([], 0)),
        "an empty stop string": lambda: StopStrings(""),
        "half a character to stop at": lambda: StopStrings("\ud800"),
        "no row at a time": lambda: Foredraft(model.model, NoDrafter(), parallel=0),
        "a speculator that is not there": lambda: Foredraft(
            model.model, NoDrafter(), speculator="absent"
        ),
    }
