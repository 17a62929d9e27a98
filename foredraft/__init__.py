"""Drafts that make large language models decode faster, with the same output.

This module exports the functions that build and open an index, the in-process drafter, the clients
of a service, the draft tree, the protocol and the decoder. Errors are in `foredraft.errors`. Each
engine adapter is a separate module: `foredraft.vllm`, `foredraft.transformers` and others.

The names are listed in `__init__.pyi`. Each name is loaded at first use, so a program loads only
what it uses. `import foredraft` itself only checks that the packages behind it are the ones that
came with it.
"""

import sys

from foredraft.installation import ForeignPackageError, check_packages, starts_the_command

try:
    check_packages()
except ForeignPackageError as _error:
    if starts_the_command():
        sys.exit(f"error: {_error}")
    raise

from foredraft.face import face_of

__all__, __getattr__, __dir__ = face_of(__name__, "__init__.pyi")
