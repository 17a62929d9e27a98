"""Drafts inside SGLang.

Experimental: tested with SGLang's own classes, its C++ corpus and its verification kernels on a
CPU, never in a whole SGLang with a model, which needs a GPU.
"""

from typing import Final

TESTED: Final = ">=0.5.23,<0.5.24"
"""Versions of SGLang that this was tested with."""
