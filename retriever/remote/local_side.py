"""A local drafter beside servers: asked where they have no draft, and told what they are told."""

import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from retriever.drafter import Drafter
from retriever.errors import RetrieverError
from retriever.tracking import TrackedSequence, TrackedStep
from retriever.tree import DraftTree

_NO_TOKENS = np.empty(0, np.int32)


class LocalSide:
    """Drafts locally for sequences that have been tracked; nothing that goes wrong is an error.

    A session is opened there when it is first needed, and catches up with all it has missed.

    Args:
        drafter: what drafts; None for nothing.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._known: dict[str, int] = {}

    def draft(self, steps: Sequence[TrackedStep], until_s: float) -> dict[str, DraftTree]:
        """Return trees by session, for those that there are any for.

        The first is drafted for whenever it is, others until then, by `time.monotonic`.
        """
        if self._drafter is None:
            return {}
        trees: dict[str, DraftTree] = {}
        for step in steps:  # one by one: what is wrong with one is wrong with it alone
            if trees and time.monotonic() > until_s:
                break
            name = step.request.session
            with suppress(RetrieverError):
                (trees[name],) = self._ask(name, step)
        return trees

    def close(self, session: str, sequence: TrackedSequence) -> None:
        """End a session; what it generated joins the recent outputs."""
        if self._drafter is None:
            return
        known = self._known.pop(session, None)
        with suppress(RetrieverError):
            if known is not None:
                self._drafter.close(session, sequence.output(known, len(sequence)))
            elif sequence.remember:
                self._drafter.open(session, _NO_TOKENS)
                output = sequence.output(len(sequence.prompt), len(sequence))
                self._drafter.close(session, output)

    def _ask(self, name: str, step: TrackedStep) -> list[DraftTree]:
        if self._drafter is None:
            return []
        if name not in self._known:
            sequence = step.sequence
            self._drafter.open(name, sequence.prompt, remember=sequence.remember)
            self._known[name] = len(sequence.prompt)
        trees = self._drafter.draft([step.since(self._known[name])])
        self._known[name] = step.request.length
        return trees
