"""Loading target models and their tokenizers."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from enum import StrEnum
from logging import ERROR

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from decoder.errors import ModelLoadError
from indexer.errors import TokenizerError
from indexer.tokenizer import encode_prompt, load_tokenizer, locate_model


class Precision(StrEnum):
    """Floating-point types that a model can compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"

    @property
    def dtype(self) -> torch.dtype:
        """The type as torch names it."""
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
        name: what it was loaded as.
        model: on its device, in evaluation mode.
        tokenizer: its tokenizer.
        stop_ids: tokens that end a sequence.
        use_chat_template: whether prompts are users' messages, where the tokenizer knows how
            to put them.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    use_chat_template: bool = True

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's tokens; none for an empty prompt."""
        if not prompt.strip():
            return []
        return encode_prompt(self.tokenizer, prompt, is_chat=self.use_chat_template)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model decodes, and how.

    Attributes:
        name: a hub id, a directory, a `.gguf` file, or the default's name; see
            `indexer.tokenizer.locate_model`.
        device: where torch shall put it, such as "cpu" or "cuda:0".
        precision: what to compute in; GGUF weights are dequantised to it.
        attention: implementation, as transformers names it; see `Attention`.
        use_chat_template: whether prompts are users' messages.
    """

    name: str
    device: str = "cpu"
    precision: Precision = Precision.FLOAT32
    attention: str = Attention.SDPA
    use_chat_template: bool = True


def load_model(options: ModelOptions) -> LanguageModel:
    """Load a model and its tokenizer.

    Raises:
        ModelLoadError: the files cannot be found or read, or the device is not there.
        TokenizerError: the tokenizer cannot be loaded.
    """
    files = locate_model(options.name)
    gguf = {"gguf_file": files.gguf_file} if files.gguf_file else {}
    try:
        with _quiet():
            tokenizer = load_tokenizer(options.name)
            model = AutoModelForCausalLM.from_pretrained(
                files.location,
                dtype=options.precision.dtype,
                attn_implementation=options.attention,
                **gguf,
            )
            model = model.to(options.device).eval()  # type: ignore[arg-type]  # wrapped without its types
    except TokenizerError:
        raise
    # Loaders fail in as many ways as there are formats.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"cannot load the model {options.name!r}: {reason}") from error
    stop_ids = _stop_ids(model, tokenizer)
    return LanguageModel(options.name, model, tokenizer, stop_ids, options.use_chat_template)


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    stated = getattr(model.generation_config, "eos_token_id", None)
    if stated is None:
        stated = tokenizer.eos_token_id
    if stated is None:
        return ()
    return tuple(stated) if isinstance(stated, list) else (stated,)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep loaders' progress bars and advice off the terminal; errors still raise."""
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
