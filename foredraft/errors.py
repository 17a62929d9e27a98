"""All errors that foredraft raises, in one class hierarchy for each of its three packages.

`IndexerError` is the base class of index errors, `RetrieverError` of drafting errors, and
`DecoderError` of target model errors. `ForeignPackageError` is an `ImportError`. It means that
another package has the name of one of foredraft's packages.
"""

from decoder.errors import *  # noqa: F403  (all of them, which stand there once)
from foredraft.installation import ForeignPackageError as ForeignPackageError  # noqa: PLC0414
from indexer.errors import *  # noqa: F403
from retriever.errors import *  # noqa: F403

__all__ = [
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, Exception)
]
