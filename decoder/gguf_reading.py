"""Reading a GGUF file once, where transformers reads it for every part of a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Final

import gguf

# What transformers calls anew, with equal arguments, for the tokenizer, the configuration, the
# weights and each of their layers. What they return is only read.
_COSTLY: Final = ("GGUFReader", "get_tensor_name_map")


class SharedReading:
    """Keeps what was read of GGUF files, from block to block, for as long as it lives."""

    def __init__(self) -> None:
        self._shared = {name: cache(getattr(gguf, name)) for name in _COSTLY}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have all loaders share what is read during the block."""
        own = {name: getattr(gguf, name) for name in _COSTLY}
        _replace(self._shared)
        try:
            yield
        finally:
            _replace(own)


def _replace(functions: Mapping[str, object]) -> None:
    for name, function in functions.items():
        setattr(gguf, name, function)
