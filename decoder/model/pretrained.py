"""Loads target models and their tokenizers.

Only the loading functions import torch and transformers, so that commands can show their options
without these.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from logging import ERROR, getLogger
from typing import TYPE_CHECKING, Any, Final

from decoder.errors import ContradictoryOptionsError, DeviceError, ModelLoadError
from indexer.errors import TokenizerError, reason_of
from indexer.tokenizer import (
    Vocabulary,
    encode_chat,
    encode_prompt,
    load_tokenizer,
    locate_model,
    vocabulary_of,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Functions that transformers calls repeatedly with equal arguments: for the tokenizer, the
# configuration, the weights and each layer. Their results are only read.
_COSTLY: Final = ("GGUFReader", "get_tensor_name_map")


class SharedReading:
    """Caches what loaders read from GGUF files, as long as this object exists."""

    def __init__(self) -> None:
        import gguf  # noqa: PLC0415  (as transformers, below)

        self._shared = {name: cache(getattr(gguf, name)) for name in _COSTLY}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let loaders use the cache during the block."""
        import gguf  # noqa: PLC0415  (as above)

        own = {name: getattr(gguf, name) for name in _COSTLY}
        _replace(self._shared)
        try:
            yield
        finally:
            _replace(own)


def _replace(functions: Mapping[str, object]) -> None:
    import gguf  # noqa: PLC0415  (as above)

    for name, function in functions.items():
        setattr(gguf, name, function)


_log = getLogger(__name__)


class Precision(StrEnum):
    """Floating-point types in which a model can compute."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"

    @property
    def dtype(self) -> "torch.dtype":
        """The corresponding torch dtype."""
        import torch  # noqa: PLC0415  (takes seconds to import)

        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


class Attention(StrEnum):
    """Implementations of attention that can verify a tree."""

    SDPA = "sdpa"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model with its tokenizer.

    Attributes:
        name: the name under which the model was loaded.
        model: the model, on its device and in evaluation mode.
        tokenizer: the model's tokenizer.
        vocabulary: vocabulary of the tokenizer.
        stop_ids: ids of the tokens that end a sequence.
        use_chat_template: whether prompts are user messages of a chat, if the tokenizer has a chat
            template.
        system: the system message, if not the template's own.
    """

    name: str
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    vocabulary: Vocabulary
    stop_ids: tuple[int, ...]
    use_chat_template: bool = True
    system: str | None = None

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's token ids; an empty list for an empty prompt.

        Raises:
            TokenizerError: the chat template does not accept the prompt.
        """
        return _encode(self.tokenizer, prompt, self.use_chat_template, self.system)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation; see `indexer.tokenizer.encode_chat`.

        Raises:
            TokenizerError: the chat template does not accept the conversation.
        """
        return encode_chat(self.tokenizer, messages)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model decodes, and how to load it.

    Attributes:
        name: a hub id, a directory, a `.gguf` file, or the name of the default model; see
            `indexer.tokenizer.locate_model`.
        device: torch device, such as "cpu" or "cuda:0".
        precision: dtype of computations; GGUF weights are dequantised to it.
        attention: attention implementation, as named in transformers; see `Attention`.
        use_chat_template: whether prompts are user messages of a chat.
        system: the system message, if not the template's own.

    Raises:
        ContradictoryOptionsError: there is a system message, but no chat template is used.
    """

    name: str
    device: str = "cpu"
    precision: Precision = Precision.FLOAT32
    attention: str = Attention.SDPA
    use_chat_template: bool = True
    system: str | None = None

    def __post_init__(self) -> None:
        if self.system is not None and not self.use_chat_template:
            raise ContradictoryOptionsError(
                "--system and --no-chat-template exclude each other: a system message is put "
                "into the chat template"
            )


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model with configuration and tokenizer, but without weights, which take longest to load.

    Attributes:
        options: options that name the model.
        config: the model's configuration.
        tokenizer: the model's tokenizer.
        vocabulary: vocabulary of the tokenizer.
    """

    options: ModelOptions
    config: "PreTrainedConfig"
    tokenizer: "PreTrainedTokenizerBase"
    vocabulary: Vocabulary
    _location: str = field(repr=False)
    _arguments: dict[str, Any] = field(repr=False)
    _reading: SharedReading = field(repr=False)

    def check_prompt(self, prompt: str) -> None:
        """Refuse a prompt that does not fit into the model.

        Raises:
            InvalidPromptError: the prompt is empty or too long.
            TokenizerError: the chat template does not accept the prompt.
            UnsupportedModelError: the model's length limit is unknown.
        """
        from decoder.model.compatibility import position_limit  # noqa: PLC0415  (loads torch)
        from decoder.model.target import check_prompt_length  # noqa: PLC0415  (the same)

        options = self.options
        tokens = _encode(self.tokenizer, prompt, options.use_chat_template, options.system)
        check_prompt_length(len(tokens), position_limit(self.config))

    def load(self) -> LanguageModel:
        """Load the weights.

        Raises:
            ModelLoadError: the weights cannot be found or read.
        """
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  (takes seconds to import)

        name = self.options.name
        with _loading(name), self._reading.used():
            model = AutoModelForCausalLM.from_pretrained(
                self._location,
                config=self.config,
                dtype=self.options.precision.dtype,
                attn_implementation=self.options.attention,
                **self._arguments,
            )
            model = model.to(self.options.device).eval()  # type: ignore[arg-type]  # wrapped without its types
        return LanguageModel(
            name,
            model,
            self.tokenizer,
            self.vocabulary,
            _stop_ids(model, self.tokenizer),
            self.options.use_chat_template,
            self.options.system,
        )


def prepare_model(options: ModelOptions) -> PreparedModel:
    """Load a model's configuration and tokenizer, and log that the model is being loaded.

    Raises:
        DeviceError: the device does not exist.
        ModelLoadError: the files cannot be found or read.
        TokenizerError: the tokenizer cannot be loaded.
    """
    files = locate_model(options.name)
    _log.info("loading %s", options.name)
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    check_device(options.device)
    reading = SharedReading()
    with _loading(options.name), reading.used():
        tokenizer = load_tokenizer(options.name)
        vocabulary = vocabulary_of(tokenizer)
        arguments = files.options()
        config = AutoConfig.from_pretrained(files.location, **arguments)
    return PreparedModel(options, config, tokenizer, vocabulary, files.location, arguments, reading)


def load_model(options: ModelOptions) -> LanguageModel:
    """Load a model and its tokenizer.

    Raises:
        DeviceError: the device does not exist.
        ModelLoadError: the files cannot be found or read.
        TokenizerError: the tokenizer cannot be loaded.
    """
    return prepare_model(options).load()


def check_device(name: str) -> None:
    """Refuse a device that cannot compute.

    Raises:
        DeviceError: torch does not know the device, or the machine has no such device.
    """
    import torch  # noqa: PLC0415  (takes seconds to import)

    try:
        torch.zeros(1, device=name).item()
    # torch raises a different error for each kind of device, including failed assertions.
    except Exception as error:
        raise DeviceError(f"cannot compute on the device {name!r}: {reason_of(error)}") from error


def _encode(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    is_chat: bool,  # noqa: FBT001  both callers name it
    system: str | None,
) -> list[int]:
    if not prompt.strip():
        return []
    return encode_prompt(tokenizer, prompt, is_chat=is_chat, system=system)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Silence loaders during the block, and translate their errors."""
    try:
        with _quiet():
            yield
    except TokenizerError:
        raise
    # The loader of each format raises its own errors.
    except Exception as error:
        raise ModelLoadError(f"cannot load the model {name!r}: {reason_of(error)}") from error


def _stop_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    stated = getattr(model.generation_config, "eos_token_id", None)
    if stated is None:
        stated = tokenizer.eos_token_id
    if stated is None:
        return ()
    return tuple(stated) if isinstance(stated, list) else (stated,)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress loaders' progress bars and advice; errors are still raised."""
    from transformers.utils import logging  # noqa: PLC0415  (takes seconds to import)

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the library gives no types
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
