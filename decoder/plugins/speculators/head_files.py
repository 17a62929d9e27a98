"""Reading and writing heads: a folder with `config.json` and safetensors.

Weights that are pickled are refused: loading them runs whatever code they hold.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from decoder.errors import HeadFileError, HeadMismatchError
from decoder.model.states import num_states
from decoder.plugins.speculators.eagle import Eagle3Head, EagleHead, eagle_head
from decoder.plugins.speculators.layouts import (
    HeadConfig,
    HeadOrigin,
    Shapes,
    config_of,
    origin_of,
    published_config,
    standard_names,
)
from decoder.plugins.speculators.mlp import MlpConfig, MlpHead
from indexer.errors import reason_of
from indexer.tokenizer import Vocabulary
from retriever.errors import VocabularyMismatchError

Head = EagleHead | MlpHead

_CONFIG: Final = "config.json"
_WEIGHTS: Final = "model.safetensors"
_SHARDS: Final = "model.safetensors.index.json"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_NAMED: Final = 4
"""Tensors that a message names: enough to know a layout by."""

_REDUNDANT: Final = {"d2t", "t2d", "lm_head.weight"}
"""Tensors that files hold besides: maps of a whole vocabulary, and the target's own head."""

_DIGESTED_ROWS: Final = 16
"""Embeddings of the digest: training a model on moves those that its texts use, and its norms."""


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """What a head's file is compared with.

    Attributes:
        name: of the model, for messages.
        architecture: the class of the model, as its configuration names it.
        hidden_size: of its states.
        num_layers: of its layers.
        vocab_size: of its embedding.
        weights: digest of some of its weights, in bfloat16, so that it is the same in any precision
            that they are loaded in; another revision of the model has another one.
        revision: as its hub names it; `None` where it was not loaded from there.
        vocabulary: of its tokenizer, where that is known.
    """

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    weights: str
    revision: str | None = None
    vocabulary: Vocabulary | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, name: str | None = None, vocabulary: Vocabulary | None = None
    ) -> "HeadTarget":
        """Return what there is to know of a model.

        Raises:
            UnsupportedModelError: its layers cannot be found.
        """
        embedding = model.get_input_embeddings().get_parameter("weight")
        stated = getattr(model.config, "architectures", None) or [type(model).__name__]
        return cls(
            name=name or str(model.config.name_or_path or type(model).__name__),
            architecture=stated[0],
            hidden_size=int(model.config.get_text_config(decoder=True).hidden_size),
            num_layers=num_states(model),
            vocab_size=int(embedding.shape[0]),
            weights=_digest(model, embedding),
            revision=getattr(model.config, "_commit_hash", None),
            vocabulary=vocabulary,
        )

    def origin(self, trained_on: tuple[str, ...] = ()) -> HeadOrigin:
        """Return what a file says of a head that was made for this model."""
        return HeadOrigin(
            model=self.name,
            revision=self.revision,
            architectures=(self.architecture,),
            fingerprint=None if self.vocabulary is None else self.vocabulary.fingerprint,
            weights=self.weights,
            trained_on=trained_on,
        )


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head as its file has it.

    Attributes:
        name: of the file, for messages.
        head: with its weights, in the file's precision, on the CPU.
        origin: what the file says of its making.
    """

    name: str
    head: Head
    origin: HeadOrigin


def is_head(folder: Path) -> bool:
    """Return whether a head was written to a folder."""
    return (folder / _CONFIG).is_file()


def check_head(path: Path) -> None:
    """Open a head's files and close them, so that errors in them show before a model loads.

    Raises:
        HeadFileError: one of them cannot be read.
    """
    files = _weight_files(path)
    _read_json(_folder(path) / _CONFIG)
    with _opened(files):
        pass


def load_head(path: Path, target: HeadTarget) -> LoadedHead:
    """Read a head for a model; whether it is one for it is checked before weights are read.

    Args:
        path: a folder, or a `.safetensors` file with `config.json` beside it.
        target: the model to draft for.

    Raises:
        HeadFileError: it cannot be read, or is of no layout known here.
        HeadMismatchError: it was made for another model.
        VocabularyMismatchError: it was made for another tokenizer.
    """
    files = _weight_files(path)
    config = _read_json(_folder(path) / _CONFIG)
    origin = origin_of(config)
    with _opened(files) as tensors:
        names = standard_names(tensors.shapes)
        shapes = {standard: tensors.shapes[name] for standard, name in names.items()}
        with _naming(path):
            shape = config_of(config, shapes, target.num_layers)
        _check_target(path, shape, origin, target)
        head = _empty(shape)
        sources = _sources(head, shapes)
        _check_layout(path, head, sources, shapes)
        weights = {name: tensors.read(names[source]) for name, source in sources.items()}
    _check_values(path, weights)
    if isinstance(head, Eagle3Head):
        shape = head.config
        weights = _with_rising_columns(path, weights, shape.layer.vocab_size)
    head.load_state_dict(weights, strict=True, assign=True)
    return LoadedHead(path.name, head, origin)


def save_head(folder: Path, head: EagleHead, origin: HeadOrigin, *, num_drafted: int = 5) -> None:
    """Write a head as others publish theirs; a folder that was not there appears whole.

    EAGLE-3 is written in the layout of `speculators`, which vLLM and SGLang read, EAGLE-1 in its
    authors'. In a folder that is there, each of the two files is replaced in one step.

    Args:
        folder: to be made.
        head: whose weights are written in their precision.
        origin: what it was made for.
        num_drafted: tokens that engines shall draft, unless they are told.

    Raises:
        HeadFileError: it cannot be written, or heads of this kind are not.
    """
    config = published_config(head.config, origin, num_drafted=num_drafted)
    weights = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    hidden: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        save_file(weights, hidden / _WEIGHTS, metadata={"format": "pt"})
        (hidden / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        _take_place(hidden, folder)
    except (OSError, SafetensorError) as error:
        raise HeadFileError(f"the head cannot be written to {folder}: {error}") from error
    finally:
        if hidden is not None:
            shutil.rmtree(hidden, ignore_errors=True)


def _take_place(hidden: Path, folder: Path) -> None:
    """Put a folder into the place of another, if there is one; all may read it."""
    hidden.chmod(0o755)
    for name in (_WEIGHTS, _CONFIG):
        (hidden / name).chmod(0o644)  # libraries write weights for their user alone
    if not folder.exists():
        hidden.replace(folder)
        return
    for name in (_WEIGHTS, _CONFIG):
        (hidden / name).replace(folder / name)


class _Tensors:
    """The tensors of open safetensors files.

    Attributes:
        shapes: of each, by its name.
    """

    def __init__(self, files: list[Any]) -> None:
        self._owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118  it is no mapping
        self.shapes: Shapes = {
            name: tuple(file.get_slice(name).get_shape()) for name, file in self._owner.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        tensor: torch.Tensor = self._owner[name].get_tensor(name)
        return tensor


@contextmanager
def _opened(paths: list[Path]) -> Iterator[_Tensors]:
    """Open safetensors files during the block."""
    path = paths[0]
    try:
        with ExitStack() as stack:
            opened = []
            for path in paths:
                opened.append(stack.enter_context(safe_open(path, framework="pt")))
            yield _Tensors(opened)
    except (SafetensorError, OSError) as error:
        raise HeadFileError(
            f"{path} is no whole safetensors file ({reason_of(error)}): fetch or train it again"
        ) from error


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a head.

    Raises:
        HeadFileError: there are none.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise HeadFileError(_pickled(path))
        return [path]
    if not path.is_dir():
        raise HeadFileError(
            f"no such speculator: {path} (a folder with {_CONFIG} and {_WEIGHTS}; one on a hub is "
            "fetched with `hf download NAME --local-dir FOLDER` first)"
        )
    if (path / _SHARDS).is_file():
        return _shards(path)
    found = sorted(path.glob("*.safetensors"))
    if found:
        return found
    pickled = [each for pattern in _PICKLED for each in sorted(path.glob(pattern))]
    if pickled:
        raise HeadFileError(_pickled(pickled[0]))
    raise HeadFileError(f"{path} holds no {_WEIGHTS}: name the folder of a speculator")


def _pickled(path: Path) -> str:
    return (
        f"{path} is not read, as pickled weights can run code: only safetensors are. Where you "
        'trust it, convert it once: `python -c "import torch; from safetensors.torch import '
        f"save_file; save_file(torch.load('{path.name}', weights_only=True), '{_WEIGHTS}')\"`"
    )


def _shards(folder: Path) -> list[Path]:
    index = _read_json(folder / _SHARDS).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise HeadFileError(f"{folder / _SHARDS} lists no tensors: fetch it again")
    names = sorted({Path(str(name)).name for name in index.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise HeadFileError(f"{folder} lacks {', '.join(missing)}: fetch it again")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadFileError(f"{path} is missing: it says what kind of head it is") from error
    except (OSError, ValueError, RecursionError) as error:
        raise HeadFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise HeadFileError(f"{path} holds no settings: fetch it again")
    return content


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the name of the file before messages from the block."""
    try:
        yield
    except HeadFileError as error:
        raise HeadFileError(f"{path}: {error}") from error


def _check_target(path: Path, shape: HeadConfig, origin: HeadOrigin, target: HeadTarget) -> None:
    """Refuse a head that was made for another model.

    Raises:
        HeadMismatchError: sizes, architecture or weights say so.
        VocabularyMismatchError: the tokenizer's fingerprint does.
    """
    made_for = origin.model or "another model"
    vocabulary = target.vocabulary
    if vocabulary and origin.fingerprint and origin.fingerprint != vocabulary.fingerprint:
        raise VocabularyMismatchError(
            f"{path} was trained for the tokenizer of {made_for} (fingerprint "
            f"{origin.fingerprint[:12]}…), and the model's is {vocabulary.describe()}: "
            "train one for this model"
        )
    own_vocabulary = shape.vocab_size if isinstance(shape, MlpConfig) else shape.layer.vocab_size
    reason = _mismatch(
        ("states of size", shape.target_size, target.hidden_size),
        ("a vocabulary of", own_vocabulary, target.vocab_size),
    )
    highest = max(shape.states)
    if reason is None and (highest > target.num_layers or min(shape.states) < -1):
        reason = f"takes state {highest}, and the model has {target.num_layers} layers"
    if reason is None and origin.architectures and target.architecture not in origin.architectures:
        reason = f"drafts for {', '.join(origin.architectures)}, and it is {target.architecture}"
    if reason is None and origin.weights not in {None, target.weights}:
        reason = "was trained with other weights than the model's: another revision, or tuned on"
    if reason is None and origin.revision and target.revision not in {None, origin.revision}:
        reason = f"was trained for revision {origin.revision}, and the model's is {target.revision}"
    if reason is not None:
        raise HeadMismatchError(
            f"{path}, made for {made_for}, does not fit {target.name}: it {reason}. "
            "Name the head that was made for this model"
        )


def _mismatch(*compared: tuple[str, int, int]) -> str | None:
    for what, own, targets in compared:
        if own != targets:
            return f"reads {what} {own}, and the model's is {targets}"
    return None


def _empty(shape: HeadConfig) -> Head:
    """Return a head whose weights take no memory, but whose constants are there."""
    with torch.device("meta"):
        head = MlpHead(shape) if isinstance(shape, MlpConfig) else eagle_head(shape)
    if isinstance(head, EagleHead):
        head.make_rotation()
    return head


def _sources(head: Head, shapes: Shapes) -> dict[str, str]:
    """Return the tensor of a file for each of a head's, whether it is there or not.

    Weights that depths share may be stored once; t2d follows from d2t.
    """
    sources = {name: name for name in head.state_dict()}
    if "t2d" not in shapes:
        sources.pop("t2d", None)
    if isinstance(head, MlpHead) and head.config.tie_weights:
        for name in sources.keys() - shapes.keys():
            family, _, rest = name.split(".", 2)
            sources[name] = f"{family}.{1 if family == 'proj' else 0}.{rest}"
    return sources


def _check_layout(path: Path, head: Head, sources: Mapping[str, str], shapes: Shapes) -> None:
    """Refuse tensors that are missing, of another shape, or not known.

    Raises:
        HeadFileError: they are named.
    """
    missing = [name for name, source in sources.items() if source not in shapes]
    if missing:
        raise HeadFileError(
            f"{path} lacks tensors that its configuration asks for: {_named(missing)}"
        )
    values = head.state_dict()
    for name, source in sources.items():
        expected, found = tuple(values[name].shape), shapes[source]
        if found != expected:
            raise HeadFileError(
                f"{path}: {name} is {list(found)}, and by config.json it is {list(expected)}: "
                "the two belong to different heads"
            )
    unknown = sorted(set(shapes) - set(sources.values()) - _REDUNDANT)
    if unknown:
        raise HeadFileError(
            f"{path} holds tensors that no head known here has ({_named(unknown)}): "
            "it is of another layout"
        )


def _named(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _check_values(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are no numbers.

    Raises:
        HeadFileError: the first such tensor is named.
    """
    for name, value in weights.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise HeadFileError(
                f"{path}: {name} holds values that are no finite numbers: fetch or train it again"
            )


def _with_rising_columns(
    path: Path, weights: dict[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """Return weights whose output columns are in order of their tokens.

    Raises:
        HeadFileError: a column stands for no token, or two stand for one.
    """
    if "d2t" not in weights:
        return weights
    columns = torch.arange(len(weights["d2t"]))
    tokens, order = torch.sort(columns + weights["d2t"].long())
    if bool((tokens < 0).any() | (tokens >= vocab_size).any()):
        raise HeadFileError(
            f"{path}: d2t leads out of the vocabulary of {vocab_size} tokens: "
            "the file is damaged or another tokenizer's"
        )
    if bool((tokens[1:] == tokens[:-1]).any()):
        raise HeadFileError(f"{path}: d2t has two columns for one token: the file is damaged")
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[tokens] = True
    if "t2d" in weights and not torch.equal(weights["t2d"].bool(), kept):
        raise HeadFileError(f"{path}: d2t and t2d name different tokens: the file is damaged")
    return weights | {
        "d2t": tokens - columns,
        "t2d": kept,
        "lm_head.weight": weights["lm_head.weight"][order],
    }


def _digest(model: PreTrainedModel, embedding: torch.Tensor) -> str:
    """Return the SHA-256 of the model's norms and of some of its embeddings, in bfloat16."""
    digest = sha256()
    norms = [value for value in model.base_model.parameters() if value.dim() == 1]
    for tensor in (*norms, embedding[:_DIGESTED_ROWS]):
        digest.update(tensor.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
