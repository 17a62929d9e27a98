"""The errors of this package, in one class hierarchy."""

from typing import Final

from indexer.errors import IndexerError
from retriever.errors import RetrieverError


class DecoderError(Exception):
    """Base of every error that this package raises."""


class ModelLoadError(DecoderError):
    """A model or its tokenizer cannot be loaded; the message says from where and why."""


class DeviceError(DecoderError):
    """The requested device does not exist or cannot compute."""


class UnsupportedModelError(DecoderError):
    """The model cannot be a target or draft model here; the message gives the reason."""


class UnsupportedEngineError(DecoderError):
    """An engine differs from the version that its adapter supports; the message says how."""


class HeadFileError(DecoderError):
    """A speculator's file cannot be read or written; the message says why and what to do."""


class HeadMismatchError(DecoderError):
    """A speculator was made for another model; the message names both sides."""


class ModelChangedError(DecoderError):
    """The model changed in the middle of a generation, so the generation cannot continue."""


class WeightsNotLoadedError(UnsupportedModelError):
    """Some weights of a model are on no device; the message names one."""


class UncroppableCacheError(UnsupportedModelError):
    """The model's cache cannot drop rejected tokens, but the requested use needs that."""


class InvalidPromptError(DecoderError):
    """A prompt is empty, too long for the model, or holds tokens that the model lacks."""


class OutOfMemoryError(DecoderError):
    """The device has no memory left for a pass; the message gives the context length."""


class SharedPassError(DecoderError):
    """Processes that share a model cannot continue; the message says why and what to do."""


class DecoderBusyError(DecoderError):
    """Another sequence is being decoded: finish or close it first."""


class GenerationStartedError(DecoderError):
    """A generation was iterated twice: ask the decoder for another one."""


class PromptFileError(DecoderError):
    """Prompts cannot be read from a file or standard input; the message says where and why."""


class ContradictoryOptionsError(DecoderError):
    """Two options cannot both be followed; the message names them."""


def refuse_contradictions(*contradictions: tuple[object, str]) -> None:
    """Refuse options that contradict one another.

    Args:
        contradictions: pairs of a condition and the message for it; the first condition that holds
            counts.

    Raises:
        ContradictoryOptionsError: a condition holds.
    """
    for holds, sentence in contradictions:
        if holds:
            raise ContradictoryOptionsError(sentence)


class StopStringError(DecoderError):
    """A stop string can never occur in a text; the message says which and why."""


class TraceFileError(DecoderError):
    """A trace cannot be written or read; the message says where and why."""


class CutTraceError(TraceFileError):
    """A trace ends in the middle of a line; the passes before it can be read."""


class UnsupportedGenerationError(DecoderError):
    """`model.generate` got an option that drafts do not support; the message names it."""


class UnknownTokenError(DecoderError):
    """A requested token id lies outside the vocabulary."""


class InvalidSettingsError(DecoderError):
    """A setting is out of its range; the message gives the range."""


class DeadEndError(DecoderError):
    """No token may follow the output so far, all of which was already emitted."""


class InvalidLogitsError(DecoderError):
    """The model's logits are NaN, so no token can be chosen."""


class CostFileError(DecoderError):
    """A file holds no costs of passes; the message lists the accepted formats."""


class PlotError(DecoderError):
    """A plot cannot be drawn or written; the message says what is missing."""


class TeachingTextError(DecoderError):
    """The training data of a speculator cannot be read or is too small; the message says which."""


class TrainingError(DecoderError):
    """Training cannot continue or its result cannot be saved; the message says what to do."""


FORESEEN: Final = (DecoderError, RetrieverError, IndexerError, MemoryError)
"""Errors that commands report in one line; commands that run a model add its device's memory
errors."""
