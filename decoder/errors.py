"""The errors of this package, in one class hierarchy."""

from typing import Final

from indexer.errors import IndexerError
from retriever.errors import RetrieverError


class DecoderError(Exception):
    """Base of every error that this package raises."""


class ModelLoadError(DecoderError):
    """A model or its tokenizer cannot be loaded; the message gives the name and the reason."""


class DeviceError(DecoderError):
    """The requested device does not exist or cannot compute."""


class UnsupportedModelError(DecoderError):
    """The model cannot be used as a target or draft model; the message gives the reason."""


class UnsupportedEngineError(DecoderError):
    """An engine differs from what its adapter needs; the message names the differences."""


class HeadFileError(DecoderError):
    """A speculator's file cannot be read or written; the message says why and what to do."""


class HeadMismatchError(DecoderError):
    """A speculator was made for another model; the message names both models."""


class ModelChangedError(DecoderError):
    """The model changed in the middle of a generation, so the generation cannot continue."""


class WeightsNotLoadedError(UnsupportedModelError):
    """Some weights of a model are on no device; the message names one of them."""


class UncroppableCacheError(UnsupportedModelError):
    """The model's cache cannot drop rejected tokens, as the requested use requires."""


class InvalidPromptError(DecoderError):
    """A prompt is empty, too long for the model, or holds tokens that the model lacks."""


class OutOfMemoryError(DecoderError):
    """The device has too little memory for a pass; the message gives the context length."""


class SharedPassError(DecoderError):
    """Processes that share a model cannot continue; the message says why and what to do."""


class DecoderBusyError(DecoderError):
    """The decoder is already decoding another sequence: finish or close that one first."""


class GenerationStartedError(DecoderError):
    """A generation was iterated twice: call the decoder again for a new one."""


class PromptFileError(DecoderError):
    """Prompts cannot be read from a file or standard input; the message names it and the reason."""


class ContradictoryOptionsError(DecoderError):
    """Two options contradict each other; the message names them."""


def refuse_contradictions(*contradictions: tuple[object, str]) -> None:
    """Refuse options that contradict one another.

    Args:
        contradictions: pairs of a condition and its error message; the first condition that holds
            raises the error.

    Raises:
        ContradictoryOptionsError: one of the conditions holds.
    """
    for holds, sentence in contradictions:
        if holds:
            raise ContradictoryOptionsError(sentence)


class StopStringError(DecoderError):
    """A stop string can never occur in a text; the message names the string and the reason."""


class TraceFileError(DecoderError):
    """A trace cannot be written or read; the message names the file and the reason."""


class CutTraceError(TraceFileError):
    """A trace ends in the middle of a line; the passes before that line can be read."""


class UnsupportedGenerationError(DecoderError):
    """`model.generate` got an option that drafts do not support; the message names the option."""


class UnknownTokenError(DecoderError):
    """A requested token id lies outside the vocabulary."""


class InvalidSettingsError(DecoderError):
    """A setting is out of its range; the message gives the range."""


class DeadEndError(DecoderError):
    """No token may follow the output so far; all of that output was already emitted."""


class InvalidLogitsError(DecoderError):
    """The model's logits are NaN, so no token can be chosen."""


class CostFileError(DecoderError):
    """A file holds no pass costs; the message lists the accepted formats."""


class PlotError(DecoderError):
    """A plot cannot be drawn or saved; the message says what is missing."""


class TeachingTextError(DecoderError):
    """The training data of a speculator cannot be read or is too small; the message says which."""


class TrainingError(DecoderError):
    """Training cannot continue, or its result cannot be saved; the message says what to do."""


FORESEEN: Final = (DecoderError, RetrieverError, IndexerError, MemoryError)
"""Errors that commands report in one line; commands that run a model add its device's out-of-memory
errors."""
