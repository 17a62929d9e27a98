"""Compiles kernels once per machine: here, or in a separate process, so that no draft waits.

`python -m retriever.sessions.cold_start WHAT...` compiles the named kernels and caches them on
disk, where other processes load them. WHAT is one of two things. The width of a token in bytes
means all kernels that drafts need. A name means `RareKernels`: built-in ones, or a module whose
function `warm` calls them.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from logging import getLogger
from threading import Thread
from typing import Final

import numpy as np

from indexer.reader import PhraseTables
from retriever.drafter import DraftRequest, Prediction, SequenceOptions
from retriever.kernels.compiling import (
    AHEAD,
    GROUPS,
    PHRASES,
    PREDICTIONS,
    RARE,
    NotKeptError,
    RareKernels,
    can_keep,
    only_kept,
)
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.predict.context import Context
from retriever.predict.databases import Databases
from retriever.predict.draft import Predictor
from retriever.predict.generations import Generations
from retriever.predict.phrases import ListedPhrases
from retriever.predict.pool import Pool
from retriever.predict.predictions import Predictions
from retriever.predict.question import Question
from retriever.predict.running import FEWEST_TOKENS, RunningOutputs
from retriever.predict.searched_corpus import Corpus, tables_of, to_kernel
from retriever.predict.stores import CONTEXT_LIMITS, ChainStore
from retriever.tree import Source

_log = getLogger(__name__)

_CONTEXT: Final = np.zeros(2 * MAX_MATCH, np.int32)
_NICENESS: Final = 5  # with 10 it would hardly finish next to a busy engine
_NOTHING: Final = "nothing"
"""Requested if nothing can be cached."""


def warm_stores() -> None:
    """Compile or load the kernels for opening a drafter, whatever it drafts from."""
    store = ChainStore(len(_CONTEXT), CONTEXT_LIMITS, Source.CONTEXT, _CONTEXT[:1])
    store.append(_CONTEXT[:1])  # as a long prompt does
    store.extend(_CONTEXT[:1])
    Generations(0).add(_CONTEXT)


def warm_drafts(widths: Iterable[int]) -> None:
    """Compile or load the kernels for a first draft: opening a session, drafting, ending it.

    Args:
        widths: bytes per token in the corpora to draft from, see `width_of`.
    """
    for width in widths:
        _warm_width(width)


def _warm_width(width: int) -> None:
    tables = PhraseTables.empty(0, np.dtype(f"u{width}"))
    corpus, predictor = Corpus([], to_kernel(tables)), Predictor(1)
    unused = Databases(Context(_CONTEXT), Pool("", Generations(0)), corpus)
    unused.pool.generations.add(_CONTEXT)
    request = DraftRequest("", _CONTEXT[:1], len(_CONTEXT) + 1, 1)
    predictor.step_all([(unused, request), (unused, request)])
    predictor.step(unused, request._replace(length=len(_CONTEXT) + 3))
    predictor.note(unused, _CONTEXT[:1])
    unused.commit(_CONTEXT[:1])


def width_of(corpus: Corpus) -> int:
    """Return the bytes per token; corpora of the same width need the same kernels."""
    return corpus.tables.tokens2.dtype.itemsize


def _warm_groups() -> None:
    pool = Pool("", Generations(0), running=RunningOutputs())
    running = Databases(Context(_CONTEXT), pool, Corpus([], tables_of([])))
    running.join(SequenceOptions(group="group"), is_shared=True)
    running.commit(np.zeros(FEWEST_TOKENS, np.int32))  # enough for the ring to grow
    running.leave()


def _warm_predictions() -> None:
    predictions, scratch = Predictions([Prediction(_CONTEXT)]), Scratch(1)
    predictions.commit(_CONTEXT[:1])
    predictions.collect(Question(_CONTEXT[:1], np.zeros(1, np.float32), 1, scratch), 0)


def _warm_phrases() -> None:
    ListedPhrases([(1, 2)]).warm()


def _warm_ahead() -> None:
    with Context(_CONTEXT).supposing(_CONTEXT[:1]):
        pass


_WARMS: Final[dict[str, Callable[[], None]]] = {
    GROUPS.name: _warm_groups,
    PREDICTIONS.name: _warm_predictions,
    PHRASES.name: _warm_phrases,
    AHEAD.name: _warm_ahead,
}


def warm_rare() -> None:
    """Compile or load all rare kernels."""
    for warm in _WARMS.values():
        warm()


def are_kept(widths: Iterable[int] = ()) -> bool:
    """Load the kernels that drafts need; return whether all of them are cached on disk.

    Args:
        widths: as for `warm_drafts`; if empty, only the kernels for opening a drafter.
    """
    with suppress(NotKeptError), only_kept():
        warm_stores()
        warm_drafts(widths)
        return True
    return False


def ensure_kept(widths: Iterable[int]) -> None:
    """Compile the kernels for drafts in a separate process, unless cached; wait for it."""
    widths = list(widths)
    if not are_kept(widths):
        begin_compiling(widths).wait()


def begin_compiling(widths: Iterable[int] = ()) -> "subprocess.Popen[bytes]":
    """Compile the kernels for drafts in a separate process of low priority.

    Returns:
        The process. If it fails or cannot cache anything, missing kernels are compiled by the
        process that needs them.
    """
    return _start(map(str, widths))


def _start(what: Iterable[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", __name__, *(what if can_keep() else [_NOTHING])]
    return subprocess.Popen(  # noqa: S603  (our own module)
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_environment()
    )


def _environment() -> dict[str, str]:
    """Return the environment of this process, with its module search path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def defer_rare() -> None:
    """Compile rare kernels in a separate process at their first use, unless they are cached."""
    for kernels in RARE.values():
        defer(kernels)


def defer(kernels: RareKernels) -> None:
    """Compile kernels in a separate process at their first use, unless they are cached."""
    try:
        with only_kept():
            _warm_of(kernels)()
    except NotKeptError:
        kernels.defer(_compile_rare)


def _warm_of(kernels: RareKernels) -> Callable[[], None]:
    return _WARMS[kernels.name] if kernels.name in RARE else import_module(kernels.name).warm


def _compile_rare(kernels: RareKernels) -> None:
    _log.warning(
        "compiling the kernels of %s in a separate process: drafts do without them until it ends",
        kernels.name.rpartition(".")[2],
    )
    Thread(target=_make_ready, args=(kernels,), name="foredraft-compile", daemon=True).start()


def _make_ready(kernels: RareKernels) -> None:
    _start([kernels.name]).wait()
    _warm_of(kernels)()
    kernels.is_ready = True


def _compile(what: list[str]) -> None:
    if what == [_NOTHING]:
        return
    with suppress(OSError):
        os.nice(_NICENESS)
    warm_stores()
    for each in what:
        if each.isdigit():
            _warm_width(int(each))
        else:
            _warm_of(RARE.get(each) or RareKernels(each))()


if __name__ == "__main__":
    _compile(sys.argv[1:])
