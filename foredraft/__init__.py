"""Drafts that make large language models decode faster, with the same output.

What programs import: building and opening an index, the drafter in the process and the clients of a
service, the draft tree and the protocol, and the decoder. Errors are in `foredraft.errors`; the
adapters of engines are modules of their own: `foredraft.vllm`, `foredraft.transformers` and others.

The names stand in `__init__.pyi`. Each is loaded when it is first used, so that a program pays for
what it uses alone: `import foredraft` by itself loads nothing but the check that the packages
behind it are the ones that came with it.
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
