"""Reading and writing heads: folders with `config.json` and safetensors files.

Pickled weights are refused, because loading them can run any code in them.
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
"""Most tensors that a message names: enough to recognise a layout."""

_REDUNDANT: Final = {"d2t", "t2d", "lm_head.weight"}
"""Tensors that some files hold needlessly: maps of a whole vocabulary, and the target's head."""

_DIGESTED_ROWS: Final = 16
"""Number of embeddings in the digest. Fine-tuning changes the norms and the embeddings of used
tokens."""


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """A model that a head's file is checked against.

    Attributes:
        name: name of the model in messages.
        architecture: class of the model, as its configuration names it.
        hidden_size: size of the model's states.
        num_layers: number of layers.
        vocab_size: number of rows of the embedding.
        weights: digest of some weights in bfloat16, which makes it the same for weights loaded in
            any precision. Another revision of the model has another digest.
        revision: revision on the hub; `None` if the model was not loaded from there.
        vocabulary: vocabulary of the tokenizer, if known.
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
        """Return the description of a model.

        Raises:
            UnsupportedModelError: the model's layers cannot be found.
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
        """Return the origin of a head that was made for this model."""
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
    """A head that was read from a file.

    Attributes:
        name: name of the file, for messages.
        head: the head with its weights, in the file's precision, on the CPU.
        origin: target and training texts of the head.
    """

    name: str
    head: Head
    origin: HeadOrigin


def is_head(folder: Path) -> bool:
    """Return whether a folder contains a head."""
    return (folder / _CONFIG).is_file()


def check_head(path: Path) -> None:
    """Open and close the files of a head, so that errors show before a model is loaded.

    Raises:
        HeadFileError: a file cannot be read.
    """
    files = _weight_files(path)
    _read_json(_folder(path) / _CONFIG)
    with _opened(files):
        pass


def load_head(path: Path, target: HeadTarget) -> LoadedHead:
    """Read a head, and check that it fits the target before its weights are read.

    Args:
        path: a folder, or a `.safetensors` file with a `config.json` in the same folder.
        target: the model to draft for.

    Raises:
        HeadFileError: the head cannot be read, or has an unknown layout.
        HeadMismatchError: the head was made for another model.
        VocabularyMismatchError: the head was made for another tokenizer.
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
    """Write a head in a published layout.

    EAGLE-3 is written in the layout of `speculators`, which vLLM and SGLang read. EAGLE-1 is
    written in its authors' layout. A new folder appears only when it is complete. In an existing
    folder, each of the two files is replaced atomically.

    Args:
        folder: folder to write to.
        head: the head; its weights are written in their own precision.
        origin: target and training texts of the head.
        num_drafted: default number of tokens in the chains that engines draft with the head.

    Raises:
        HeadFileError: the folder or this kind of head cannot be written.
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
    """Move a folder or its files into place, and let all users read them."""
    hidden.chmod(0o755)
    for name in (_WEIGHTS, _CONFIG):
        (hidden / name).chmod(0o644)  # libraries let only their own user read weights
    if not folder.exists():
        hidden.replace(folder)
        return
    for name in (_WEIGHTS, _CONFIG):
        (hidden / name).replace(folder / name)


class _Tensors:
    """The tensors of open safetensors files.

    Attributes:
        shapes: shape of each tensor, by name.
    """

    def __init__(self, files: list[Any]) -> None:
        self._owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118  it is no mapping
        self.shapes: Shapes = {
            name: tuple(file.get_slice(name).get_shape()) for name, file in self._owner.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with a name."""
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
            f"{path} is not a complete safetensors file ({reason_of(error)}): fetch or train the "
            "head again"
        ) from error


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a head.

    Raises:
        HeadFileError: there is no such file.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise HeadFileError(_pickled(path))
        return [path]
    if not path.is_dir():
        raise HeadFileError(
            f"no such speculator: {path} (it must be a folder with {_CONFIG} and {_WEIGHTS}; "
            "download it from a hub with `hf download NAME --local-dir FOLDER`)"
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
        f"{path} is refused: pickled weights can run code, so only safetensors are read. If you "
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
        raise HeadFileError(f"{path} is missing: it describes the head; fetch it again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise HeadFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise HeadFileError(f"{path} is not a JSON object: fetch it again")
    return content


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefix errors from the block with the path of the head."""
    try:
        yield
    except HeadFileError as error:
        raise HeadFileError(f"{path}: {error}") from error


def _check_target(path: Path, shape: HeadConfig, origin: HeadOrigin, target: HeadTarget) -> None:
    """Refuse a head that was made for another model.

    Raises:
        HeadMismatchError: sizes, architecture, weights or revision differ.
        VocabularyMismatchError: the tokenizer's fingerprint differs.
    """
    made_for = origin.model or "another model"
    vocabulary = target.vocabulary
    if vocabulary and origin.fingerprint and origin.fingerprint != vocabulary.fingerprint:
        raise VocabularyMismatchError(
            f"{path} was trained for the tokenizer of {made_for} (fingerprint "
            f"{origin.fingerprint[:12]}…), but the model's is {vocabulary.describe()}: "
            "train a head for this model"
        )
    own_vocabulary = shape.vocab_size if isinstance(shape, MlpConfig) else shape.layer.vocab_size
    reason = _mismatch(
        ("states of size", shape.target_size, target.hidden_size),
        ("a vocabulary of", own_vocabulary, target.vocab_size),
    )
    highest = max(shape.states)
    if reason is None and (highest > target.num_layers or min(shape.states) < -1):
        reason = f"reads state {highest}, but the model has {target.num_layers} layers"
    if reason is None and origin.architectures and target.architecture not in origin.architectures:
        reason = f"drafts for {', '.join(origin.architectures)}, not for {target.architecture}"
    if reason is None and origin.weights not in {None, target.weights}:
        reason = "was trained with other weights: for another revision, or before fine-tuning"
    if reason is None and origin.revision and target.revision not in {None, origin.revision}:
        reason = f"was trained for revision {origin.revision}, but the model's is {target.revision}"
    if reason is not None:
        raise HeadMismatchError(
            f"{path}, made for {made_for}, does not fit {target.name}: it {reason}. "
            "Name the head that was made for this model"
        )


def _mismatch(*compared: tuple[str, int, int]) -> str | None:
    for what, own, targets in compared:
        if own != targets:
            return f"reads {what} {own}, but the model's is {targets}"
    return None


def _empty(shape: HeadConfig) -> Head:
    """Return a head whose weights take no memory; only its constants are computed."""
    with torch.device("meta"):
        head = MlpHead(shape) if isinstance(shape, MlpConfig) else eagle_head(shape)
    if isinstance(head, EagleHead):
        head.make_rotation()
    return head


def _sources(head: Head, shapes: Shapes) -> dict[str, str]:
    """Return, for each tensor of a head, its name in a file; the file may lack the tensor.

    Weights that depths share may be stored only once. t2d is left out if the file lacks it, because
    it follows from d2t.
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
    """Refuse tensors that are missing, have a wrong shape, or are unknown.

    Raises:
        HeadFileError: there are such tensors; the message names them.
    """
    missing = [name for name, source in sources.items() if source not in shapes]
    if missing:
        raise HeadFileError(
            f"{path} lacks tensors that its configuration requires: {_named(missing)}"
        )
    values = head.state_dict()
    for name, source in sources.items():
        expected, found = tuple(values[name].shape), shapes[source]
        if found != expected:
            raise HeadFileError(
                f"{path}: {name} is {list(found)}, but config.json requires {list(expected)}: "
                "the two files belong to different heads"
            )
    unknown = sorted(set(shapes) - set(sources.values()) - _REDUNDANT)
    if unknown:
        raise HeadFileError(
            f"{path} holds tensors that no known head has ({_named(unknown)}): "
            "its layout cannot be read"
        )


def _named(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _check_values(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not finite.

    Raises:
        HeadFileError: a tensor has such weights; the message names the first one.
    """
    for name, value in weights.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise HeadFileError(
                f"{path}: {name} holds values that are not finite: fetch or train the head again"
            )


def _with_rising_columns(
    path: Path, weights: dict[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """Return weights whose output columns are in the order of their tokens.

    Raises:
        HeadFileError: a column stands for no token, two columns stand for the same token, or d2t
            and t2d disagree.
    """
    if "d2t" not in weights:
        return weights
    columns = torch.arange(len(weights["d2t"]))
    tokens, order = torch.sort(columns + weights["d2t"].long())
    if bool((tokens < 0).any() | (tokens >= vocab_size).any()):
        raise HeadFileError(
            f"{path}: d2t points outside the vocabulary of {vocab_size} tokens: "
            "the file is damaged or belongs to another tokenizer"
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
