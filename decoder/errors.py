"""The errors of this package, as one tree."""

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
    """An engine is not as its adapter was written for; the message says what changed."""


class HeadFileError(DecoderError):
    """A speculator's file cannot be read or written; the message says why and what to do."""


class HeadMismatchError(DecoderError):
    """A speculator was made for another model; the message names both sides."""


class ModelChangedError(DecoderError):
    """The model changed in the middle of a generation, which cannot go on with it."""


class WeightsNotLoadedError(UnsupportedModelError):
    """Weights of a model are on no device; the message names one."""


class UncroppableCacheError(UnsupportedModelError):
    """The model's cache cannot drop rejected tokens, which the requested use needs."""


class InvalidPromptError(DecoderError):
    """A prompt is empty, too long for the model, or holds tokens that the model lacks."""


class OutOfMemoryError(DecoderError):
    """The device has no memory left for a pass; the message says at which length of context."""


class SharedPassError(DecoderError):
    """Processes that share a model cannot go on together; the message says why and what to do."""


class DecoderBusyError(DecoderError):
    """A sequence is being decoded already: finish or close it first."""


class GenerationStartedError(DecoderError):
    """A generation was iterated twice: ask the decoder for another one."""


class PromptFileError(DecoderError):
    """Prompts cannot be read from a file or standard input; the message says where and why."""


class ContradictoryOptionsError(DecoderError):
    """Two options cannot both be followed; the message names them."""


def refuse_contradictions(*contradictions: tuple[object, str]) -> None:
    """Refuse options that contradict one another.

    Args:
        contradictions: conditions, each with what is said where it holds; the first one counts.

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
    """A token id that was asked for lies outside the vocabulary."""


class InvalidSettingsError(DecoderError):
    """A setting is out of its range; the message gives the range."""


class DeadEndError(DecoderError):
    """No token may follow the output so far; all of that output was given out before."""


class InvalidLogitsError(DecoderError):
    """The model's logits are not numbers, so that no token can be chosen."""


class CostFileError(DecoderError):
    """A file holds no costs of passes; the message says which forms are taken."""


class PlotError(DecoderError):
    """A plot cannot be drawn or written; the message says what is missing."""


class TeachingTextError(DecoderError):
    """What a speculator is taught from cannot be read or is too little; the message says which."""


class TrainingError(DecoderError):
    """Training cannot go on or its result cannot be kept; the message says what to do."""


FORESEEN: Final = (DecoderError, RetrieverError, IndexerError, MemoryError)
"""What commands end with in a line; those that compute with a model add memory of its device."""
