"""What can go wrong around the target model, as one tree of errors."""


class DecoderError(Exception):
    """Base of every error that this package raises."""


class ModelLoadError(DecoderError):
    """A model or its tokenizer cannot be loaded; the message says from where and why."""


class UnsupportedModelError(DecoderError):
    """The model has no way to verify a draft tree; the message says what stands in the way."""


class UncroppableCacheError(UnsupportedModelError):
    """The model's cache cannot give up rejected tokens, so drafts would corrupt its state."""


class InvalidPromptError(DecoderError):
    """A prompt is empty, too long for the model, or holds tokens that the model lacks."""


class DecoderBusyError(DecoderError):
    """A sequence is being decoded already: finish or close it first."""


class PromptFileError(DecoderError):
    """A file of prompts cannot be read; the message names the line."""


class ContradictoryOptionsError(DecoderError):
    """Two options cannot both be followed; the message names them."""
