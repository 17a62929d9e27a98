"""A slow and obvious twin of `gather`, written from the definitions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.format.phrase_tables import COUNT_SCALE
from indexer.reader import PhraseTables
from retriever.predict.generations import Generations
from retriever.tree import Source
from tests.indexer.stages.phrase_reading import find, successors
from tests.retriever.kernels.twins.live_table_twin import counts_in, place_of
from tests.retriever.kernels.twins.row_twins import Row, bucket_of

CORPUS_STRENGTH = {1: 20.0, 2: 4.0, 3: 2.0}
MOST_SUCCESSORS = {1: 32, 2: 16, 3: 16}
LEAST_SUCCESSORS = {1: 4, 2: 2, 3: 2}
LIVE_STRENGTH = {2: 3.0, 3: 1.5}
CONTEXT_STRENGTH = {1: 4.0, 2: 1.0}
MOST_FOLLOWERS = {1: 8, 2: 4}
UNKNOWN_SHARE = 1e-5
NEVER = 2.0**20

Counts = dict[int, float]
"""How often each token followed."""


@dataclass
class Known:
    """What is known of a node.

    Attributes:
        candidates: of each candidate's token, in the order of `Evidence`: the rows' estimate,
            that of all counts, that of the corpus, that of similar rows, the distance to its
            last occurrence, its share of the corpus.
        sources: the database that each candidate is of.
        traits: in the order of `Traits`.
        dominant: the database of the longest match.
    """

    candidates: dict[int, list[float]] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    traits: list[float] = field(default_factory=list)
    dominant: int = 0


class EvidenceTwin:
    """Repeats every look-up for every node."""

    def __init__(
        self,
        phrases: PhraseTables,
        generations: Generations,
        sequence: Sequence[int],
        num_buckets: int,
        num_last: int,
    ) -> None:
        self._phrases = phrases
        self._live = counts_in(generations.live)
        self._num_sets = len(generations.live)
        self._sequence = list(sequence)
        self._num_buckets = num_buckets
        occurrences = COUNT_SCALE[phrases.counts[0]] + 1.0
        self._shares = dict(enumerate((occurrences / occurrences.sum()).tolist()))
        self._last = {token % num_last: place for place, token in enumerate(self._sequence)}
        self._num_last = num_last

    def gather(
        self, rows: Sequence[Row], path: tuple[int, ...], escape: float, probability: float
    ) -> Known:
        """What is known after the sequence and a path from there that is so probable."""
        text = [*self._sequence, *path]
        agreeing = [row for row in rows if row.continuation[: len(path)] == path]
        total = sum(row.weight for row in agreeing)
        similar = sum(row.weight * row.similarity for row in agreeing)
        nexts = [
            (row, row.continuation[len(path)])
            for row in agreeing
            if len(row.continuation) > len(path)
        ]
        corpus = {order: self._corpus_counts(text, order, probability) for order in (1, 2, 3)}
        followers = {order: self._followers(text, order) for order in (1, 2)}
        live = {order: self._live_counts(text, order) for order in (2, 3)}
        known = Known()
        known.sources = _sources(nexts, corpus, followers, live)
        for token in known.sources:
            unigram = self._shares.get(token, UNKNOWN_SHARE)
            from_corpus = unigram
            for order in (1, 2, 3):
                count, of = corpus[order][0].get(token, 0.0), corpus[order][1]
                from_corpus = _interpolated(count, of, CORPUS_STRENGTH[order], from_corpus)
            from_all = from_corpus
            for order in (2, 3):
                count, of = live[order].get(token, 0.0), sum(live[order].values())
                from_all = _interpolated(count, of, LIVE_STRENGTH[order], from_all)
            for order in (1, 2):
                count, of = followers[order].get(token, 0.0), sum(followers[order].values())
                from_all = _interpolated(count, of, CONTEXT_STRENGTH[order], from_all)
            weight = sum(row.weight for row, following in nexts if following == token)
            similar_weight = sum(
                row.weight * row.similarity for row, following in nexts if following == token
            )
            known.candidates[token] = [
                (weight + escape * from_all) / (total + escape),
                from_all,
                from_corpus,
                similar_weight / similar if similar else 0.0,
                self._distance(token, len(text)),
                unigram,
            ]
        longest = max((row.match for row in agreeing), default=0)
        known.dominant = next((row.source for row in agreeing if row.match == longest), 0)
        known.traits = [
            longest + len(path) if longest else 0,
            len(path),
            total + escape,
            *(corpus[order][1] for order in (3, 2, 1)),
            *(sum(live[order].values()) for order in (3, 2)),
            *(sum(followers[order].values()) for order in (2, 1)),
        ]
        return known

    def _corpus_counts(
        self, text: list[int], order: int, probability: float
    ) -> tuple[Counts, float]:
        """The most frequent successors of the last tokens, and how often these occur."""
        context = text[-order:]
        entry = find(self._phrases, context) if len(context) == order else None
        if entry is None:
            return {}, 0.0
        most = MOST_SUCCESSORS[order]
        while probability < 1 and most > LEAST_SUCCESSORS[order]:
            most, probability = most // 2, 2 * probability
        followers = successors(self._phrases, context)[:most]
        return dict(followers), float(COUNT_SCALE[self._phrases.counts[order - 1][entry]])

    def _followers(self, text: list[int], order: int) -> Counts:
        """What followed the last tokens in the sequence, of so many places in their bucket."""
        if len(text) < order:
            return {}
        context, sequence = text[-order:], self._sequence
        bucket = bucket_of(context, self._num_buckets)
        places = [
            end
            for end in range(len(sequence), order - 1, -1)
            if bucket_of(sequence[end - order : end], self._num_buckets) == bucket
        ][: 4 * MOST_FOLLOWERS[order]]
        after = [
            sequence[end]
            for end in places
            if end < len(sequence) and sequence[end - order : end] == context
        ]
        counts: Counts = {}
        for token in after[: MOST_FOLLOWERS[order]]:
            counts[token] = counts.get(token, 0.0) + 1
        return counts

    def _live_counts(self, text: list[int], order: int) -> Counts:
        if len(text) < order:
            return {}
        place = place_of(text[-order:], self._num_sets)
        return {token: count for (at, token), count in self._live.items() if at == place}

    def _distance(self, token: int, now: int) -> float:
        place = self._last.get(token % self._num_last)
        if place is None or self._sequence[place] != token:
            return NEVER
        return now - place


def _interpolated(count: float, total: float, strength: float, shorter: float) -> float:
    return (count + strength * shorter) / (total + strength)


def _sources(
    nexts: Sequence[tuple[Row, int]],
    corpus: dict[int, tuple[Counts, float]],
    followers: dict[int, Counts],
    live: dict[int, Counts],
) -> dict[int, int]:
    """All candidates in the order in which they are found, with their databases."""
    sources: dict[int, int] = {}
    heaviest: dict[int, float] = {}
    for row, token in nexts:
        if row.weight > heaviest.get(token, -1.0):
            heaviest[token] = row.weight
            sources[token] = row.source
    for order in (3, 2, 1):
        for token in corpus[order][0]:
            sources.setdefault(token, int(Source.PHRASES))
    for order in (2, 1):
        for token in followers[order]:
            sources.setdefault(token, int(Source.CONTEXT))
    for order in (3, 2):
        for token in live[order]:
            sources.setdefault(token, int(Source.GENERATIONS))
    return sources
