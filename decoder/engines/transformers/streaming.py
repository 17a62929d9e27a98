"""The streamer of a call, which `model.generate` does not hand to callables."""

import inspect
from typing import Any, Final

import torch
from transformers import GenerationMixin

_GENERATE: Final = inspect.unwrap(GenerationMixin.generate).__code__


def streamer_of_call() -> Any:
    """Return the streamer that the innermost `generate` around the caller was given, or `None`.

    `generate` puts the prompt into it and leaves the rest to its loop, but hands none to a
    callable (transformers 5.23, `_extract_generation_mode_kwargs`): whoever reads from a
    TextIteratorStreamer would wait forever. So it is taken from where that call keeps it.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


class Stream:
    """Tells a streamer each token by itself, as plain generation does.

    Args:
        streamer: transformers' `BaseStreamer`, or what has its methods; it has the prompt already.
            `None` to tell nobody.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer

    def put(self, tokens: list[int]) -> None:
        """Tell what has come."""
        if self._streamer is not None:
            for token in tokens:
                self._streamer.put(torch.tensor([token]))

    def end(self) -> None:
        """Tell that nothing comes any more."""
        if self._streamer is not None:
            self._streamer.end()
