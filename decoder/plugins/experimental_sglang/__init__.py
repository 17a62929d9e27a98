"""Drafts in SGLang.

This adapter is experimental. It is tested on a CPU with SGLang's own classes, its C++ corpus and
its verification kernels. It was never run in a complete SGLang with a model, which needs a GPU.
"""

from typing import Final

TESTED: Final = ">=0.5.23,<0.5.24"
"""Versions of SGLang that this adapter was tested with."""
