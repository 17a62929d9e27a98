"""Drafts of what a grammar forces: a database of one sequence that is nearly certain.

Nodes that the grammar forbids leave a retrieved tree, and what it forces is drafted in their place,
at the root and behind the likeliest leaves. Under flexible whitespace a grammar forces little by
itself: so where one byte alone may come but for whitespace, the whitespace that this output, or the
last one, had in such a place is taken, and the byte. Strings are cut as the model's own tokenizer
cuts them; only the last token of one may be cut otherwise, as what follows is not known.

No tree changes an output: the target chooses among the tokens that the grammar allows, whatever is
drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree, Source

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_BYTES: Final = 96
"""Of a forced string: more than a pass verifies."""

_RECENT: Final = 6
"""Tokens before a forced string that tell how its beginning is cut."""

_MOST_LEAVES: Final = 2
"""Leaves of a tree behind which forced strings are looked for."""

_MOST_WAYS: Final = 4
"""Of a choice that is drafted: enumerations, booleans, and keys that may be left out."""

_CHOICE_BYTES: Final = 24
"""Before a choice, by which it is known again: some of a key, and marks."""

_MOST_CUTS: Final = 1024
"""Strings whose tokens are kept for a tenant: less than half a megabyte."""

_OPENING: Final = b"{[,"
"""Behind which an element begins."""

_WHITESPACE: Final = b" \t\n\r"
_END: Final = 256
"""The end of the output, in a vocabulary of bytes."""


class _Bytes:
    """A vocabulary of single bytes, as llguidance takes one."""

    eos_token_id = _END
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids: Sequence[int] = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(1)
def byte_tokenizer() -> "LLTokenizer":
    """Return the tokenizer of single bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415  (an optional extra)

    return LLTokenizer(TokenizerWrapper(_Bytes()))


class _Kind(NamedTuple):
    """Where a forced token stands: how likely it is depends on that."""

    is_guessed: bool
    is_last: bool


@dataclass(slots=True)
class Spacing:
    """Where an output has whitespace between the marks of JSON and its like, and what.

    Attributes:
        known: whitespace by the byte before, the byte after, and the depth of brackets; and by the
            bytes alone, at the depth -1.
        choices: which of a few ways were gone, by the bytes before.
        indent: of a level, where elements stand in lines of their own; else empty.
        cuts: tokens of forced strings, by the tokens before and the string, as cutting takes time.
        trust: how often forced tokens of a kind came, and how often they did not.
    """

    known: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    choices: dict[bytes, dict[bytes, float]] = field(default_factory=dict)
    indent: bytes = b""
    cuts: dict[tuple[int | bytes, ...], list[int]] = field(default_factory=dict)
    trust: dict[_Kind, list[float]] = field(default_factory=dict)

    def between(self, before: int, after: int, depth: int) -> bytes:
        """Return the whitespace that is to be expected between two bytes."""
        kind = _class_of(after)
        found = self.known.get((before, kind, depth))
        if found is None and self.indent and (before in _OPENING or after in b"}]"):
            return b"\n" + self.indent * (depth - (after in b"}]"))
        if found is None:
            found = self.known.get((before, kind, -1))
        return (b" " if before in b",:" else b"") if found is None else found

    def learn(self, before: int, after: int, depth: int, whitespace: bytes) -> None:
        """Note whitespace that came."""
        for each in (depth, -1):
            self.known[before, _class_of(after), each] = whitespace
        if before in _OPENING and after not in b"}]":
            inner = whitespace.removeprefix(b"\n")
            self.indent = inner[: len(inner) // max(depth, 1)] if inner != whitespace else b""

    def shares(self, before: bytes, ways: Sequence[bytes]) -> list[float]:
        """Return how likely each of a few ways is, by how often they were gone before."""
        known = self.choices.get(before, {})
        counts = [known.get(way.strip(), 0.0) + 1 / len(ways) for way in ways]
        return [count / sum(counts) for count in counts]

    def choose(self, before: bytes, way: bytes, *, came: bool) -> None:
        """Note which of a few ways was gone."""
        if len(self.choices) >= _MOST_CUTS:
            self.choices.clear()
        known = self.choices.setdefault(before, {})
        known[way.strip()] = known.get(way.strip(), 0.0) * 0.9 + came

    def probability(self, kind: _Kind) -> float:
        """Return how likely a forced token of a kind is, given those before it."""
        came, missed = self.trust.get(kind) or _FIRST_TRUST[kind]
        return came / (came + missed)

    def count(self, kind: _Kind, *, came: bool) -> None:
        """Learn whether a token came; old counts fade, as one output is spaced unlike another."""
        counts = self.trust.setdefault(kind, list(_FIRST_TRUST[kind]))
        counts[:] = [each * 0.95 for each in counts]
        counts[not came] += 1.0


_FIRST_TRUST: Final = {
    _Kind(is_guessed=False, is_last=False): (9.7, 0.3),
    _Kind(is_guessed=True, is_last=False): (8.0, 2.0),
    _Kind(is_guessed=False, is_last=True): (6.0, 4.0),
    _Kind(is_guessed=True, is_last=True): (5.0, 5.0),
}
"""Before anything is known: as counts, of tokens that came and that did not."""


def _class_of(byte: int) -> int:
    """Return a byte that stands for others that are spaced alike: digits and letters."""
    return ord("0") if 48 <= byte <= 57 or byte == 45 else ord("a") if byte >= 97 else byte  # noqa: PLR2004


@dataclass(slots=True)
class _Place:
    """Where in JSON, or what looks like it, an output has come to."""

    in_string: bool = False
    is_escaped: bool = False
    depth: int = 0
    last: int = 0
    whitespace: bytes = b""

    def copy(self) -> "_Place":
        return _Place(self.in_string, self.is_escaped, self.depth, self.last, self.whitespace)

    def read(self, text: bytes, spacing: Spacing | None = None) -> None:
        """Go on over bytes, and learn their spacing if told where."""
        for byte in text:
            if self.in_string:
                self.in_string = self.is_escaped or byte != ord('"')
                self.is_escaped = byte == ord("\\") and not self.is_escaped
                self.last = byte
            elif byte in _WHITESPACE:
                self.whitespace += bytes([byte])
            else:
                if spacing is not None and self.last:
                    spacing.learn(self.last, byte, self.depth, self.whitespace)
                self.depth += (byte in b"{[") - (byte in b"}]")
                self.in_string, self.last, self.whitespace = byte == ord('"'), byte, b""


class _Chain(NamedTuple):
    """A forced string behind a node: its tokens, and the kind of each."""

    path: tuple[int, ...]
    tokens: list[int]
    kinds: list[_Kind]
    choice: "_Choice | None"
    chosen_at: int | None


class _Forced(NamedTuple):
    """A forced string: its bytes, how many of them stand before a guess, and whether it ends it."""

    text: bytes
    guessed_from: int
    ends: bool


class _Choice(NamedTuple):
    """One of a few ways: what stands before the choice, the way, where in a string, its share."""

    before: bytes
    way: bytes
    begin: int
    share: float


class ForcedDrafts:
    """What a grammar forces in one sequence.

    Args:
        tokens: the grammar's state before the output, over the model's tokens; it is not changed.
        letters: the same over single bytes.
        tokenizer: of the model.
        stop_ids: tokens that end the output.
        spacing: shared by the outputs of a grammar.
    """

    def __init__(
        self,
        tokens: "LLMatcher",
        letters: "LLMatcher",
        tokenizer: "LLTokenizer",
        stop_ids: Sequence[int],
        spacing: Spacing,
    ) -> None:
        self._begin = tokens, letters
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._end = stop_ids[0] if stop_ids else None
        self._spacing = spacing
        self._chains: list[_Chain] = []
        self._restart()

    def improved(self, tree: DraftTree, generated: TokenIds, max_nodes: int) -> DraftTree:
        """Return a tree without what the grammar forbids, and with what it forces.

        Args:
            tree: that was drafted, which may hold more than `max_nodes`.
            generated: int32[n], the output so far.
            max_nodes: most nodes of the result.
        """
        self._go_on(generated)
        self._chains = []
        if self._tokens.is_error() or self._letters.is_error():
            return tree.prefix(max_nodes)  # a limit of the library: nothing is known
        if self._tokens.is_stopped():
            return DraftTree.empty()
        nodes = _Nodes(tree)
        self._walk(nodes)
        return nodes.tree(max_nodes)

    def learn(self, came: Sequence[int]) -> None:
        """Learn from what came behind the last draft.

        Args:
            came: the tokens that were committed since.
        """
        for path, tokens, kinds, choice, chosen_at in self._chains:
            behind = came[len(path) :]
            if tuple(came[: len(path)]) != path:
                continue
            for place, (token, kind, actual) in enumerate(zip(tokens, kinds, behind, strict=False)):
                if choice is not None and place == chosen_at:
                    self._spacing.choose(choice.before, choice.way, came=token == actual)
                elif choice is None or place > (chosen_at or 0):
                    self._spacing.count(kind, came=token == actual)
                if token != actual:
                    break
        self._chains = []

    def _restart(self) -> None:
        self._tokens, self._letters = (each.deep_copy() for each in self._begin)
        self._known: list[int] = []
        self._place = _Place()

    def _go_on(self, generated: TokenIds) -> None:
        """Bring the states to the end of the output."""
        output = generated.tolist()
        known = len(self._known)
        if output[:known] != self._known:
            self._restart()
            known = 0
        for token in output[known:]:
            self._tokens.consume_token(token)
            if token not in self._stop_ids:
                text = self._tokenizer.decode_bytes([token])
                self._letters.consume_tokens(list(text))
                self._place.read(text, self._spacing)
        self._known = output

    def _walk(self, nodes: "_Nodes") -> None:
        """Keep the nodes that are allowed, path by path, and add what is forced behind some."""
        leaves = nodes.leaves(_MOST_LEAVES)
        self._force(nodes, ROOT, ())
        forced = {ROOT}
        at: list[int] = []  # the nodes whose tokens the grammar has taken in
        for leaf, is_likely in leaves:
            path = nodes.path_to(leaf)
            same = next((n for n, (a, b) in enumerate(zip(at, path, strict=False)) if a != b), None)
            same = min(len(at), len(path)) if same is None else same
            self._back(self._tokens, len(at) - same)
            tokens = [nodes.tokens[node] for node in path]
            end = next((n for n, token in enumerate(tokens) if token in self._stop_ids), None)
            num_allowed = same + int(self._tokens.try_consume_tokens(tokens[same:end]))
            at = path[:num_allowed]
            may_end = num_allowed == end and self._tokens.is_accepting()
            for node in path[same : num_allowed + may_end]:
                nodes.kept[node] = True
            is_cut = num_allowed < len(path) and not may_end
            last = at[-1] if at else ROOT
            if (is_likely or is_cut) and last not in forced and len(forced) <= 2 * _MOST_LEAVES:
                forced.add(last)
                text = list(self._tokenizer.decode_bytes(tokens[:num_allowed]))
                self._letters.consume_tokens(text)
                self._force(nodes, last, tuple(tokens[:num_allowed]))
                self._back(self._letters, len(text))
        self._back(self._tokens, len(at))

    @staticmethod
    def _back(state: "LLMatcher", number: int) -> None:
        if number:
            state.rollback(number)

    def _force(self, nodes: "_Nodes", node: int, path: tuple[int, ...]) -> None:
        """Add the forced string behind a node, and where it ends in a choice, each of its ways."""
        place = self._place
        if path:
            place = place.copy()
            place.read(self._tokenizer.decode_bytes(list(path)))
        string = self._forced_bytes(place)
        if string.text or string.ends:
            self._add(nodes, node, path, string)
        if node != ROOT or string.ends or len(string.text) >= _MOST_BYTES:
            return
        self._letters.consume_tokens(list(string.text))
        place = place.copy()
        place.read(string.text)
        ways = self._ways(place)
        before = self._tokenizer.decode_bytes([*self._known[-_RECENT:], *path]) + string.text
        shares = self._spacing.shares(before[-_CHOICE_BYTES:], ways) if ways else []
        for way, share in zip(ways, shares, strict=True):
            num_taken = self._letters.try_consume_tokens(list(way))
            if num_taken == len(way):
                behind = place.copy()
                behind.read(way)
                further = self._forced_bytes(behind)
                choice = _Choice(before[-_CHOICE_BYTES:], way, len(string.text), share)
                whole = string.text + way + further.text
                guessed = min(string.guessed_from, len(string.text + way) + further.guessed_from)
                self._add(nodes, node, path, _Forced(whole, guessed, further.ends), choice)
            self._back(self._letters, num_taken)
        self._back(self._letters, len(string.text))

    def _add(
        self,
        nodes: "_Nodes",
        node: int,
        path: tuple[int, ...],
        string: "_Forced",
        choice: "_Choice | None" = None,
    ) -> None:
        """Add a string behind a node, as the tokenizer cuts it."""
        recent = [*self._known[-_RECENT:], *path][-_RECENT:]
        tokens = self._cut(recent, string.text) if string.text else []
        kinds, shares, num_bytes, chosen_at = list[_Kind](), list[float](), 0, None
        for number, token in enumerate(tokens, 1):
            num_bytes += len(self._tokenizer.decode_bytes([token]))
            is_last = number == len(tokens) and not string.ends
            kinds.append(_Kind(num_bytes > string.guessed_from, is_last))
            shares.append(self._spacing.probability(kinds[-1]))
            if choice is not None and chosen_at is None and num_bytes > choice.begin:
                chosen_at = number - 1
                shares[-1] *= choice.share
        if string.ends and self._end is not None:
            tokens = [*tokens, self._end]
            kinds.append(_Kind(is_guessed=False, is_last=False))
            shares.append(self._spacing.probability(kinds[-1]))
        self._chains.append(_Chain(path, tokens, kinds, choice, chosen_at))
        nodes.add(node, tokens, shares, chosen_at)

    def _ways(self, place: _Place) -> list[bytes]:
        """Return the ways that an output may go on, if they are but a few, spaced as expected."""
        found, may_end, may_space = self._coming()
        is_free = place.in_string and may_space
        if may_end or is_free or not 1 < len(found) <= _MOST_WAYS:
            return []
        return [self._space(place, byte, may_space=may_space) + bytes([byte]) for byte in found]

    def _coming(self) -> tuple[bytes, bool, bool]:
        """Return the bytes that may come but for whitespace, and whether an end and that may."""
        allowed = np.flatnonzero(np.frombuffer(self._letters.compute_logit_bias(), np.uint8))
        found = allowed.tolist()
        may_end = found[-1:] == [_END]
        others = bytes(byte for byte in found if byte != _END and byte not in _WHITESPACE)
        return others, may_end, len(found) - may_end > len(others)

    def _space(self, place: _Place, byte: int, *, may_space: bool) -> bytes:
        """Return the whitespace that is to be expected before a byte."""
        if not may_space or place.in_string:
            return b""
        expected = self._spacing.between(place.last, byte, place.depth)
        come = place.whitespace  # of which a part stands there already
        return expected[len(come) :] if expected.startswith(come) else b""

    def _forced_bytes(self, place: _Place) -> "_Forced":
        """Return the bytes that come."""
        place = place.copy()
        text, guessed_from, ends = bytearray(), _MOST_BYTES * 2, False
        while len(text) < _MOST_BYTES:
            if self._letters.is_stopped():
                ends = True
                break
            forced = self._letters.compute_ff_bytes()
            if not forced:
                forced, is_guess, ends = self._next(place)
                if ends or not forced:
                    break
                if is_guess:
                    guessed_from = min(guessed_from, len(text))
            num_taken = self._letters.try_consume_tokens(list(forced))
            if num_taken < len(forced):  # whitespace that may not come
                self._back(self._letters, num_taken)
                break
            place.read(forced)
            text += forced
        if text:
            self._letters.rollback(len(text))
        return _Forced(bytes(text), guessed_from, ends)

    def _next(self, place: _Place) -> tuple[bytes, bool, bool]:
        """Return the byte that comes, if it is but one, with whitespace before it.

        Returns:
            The bytes, whether the whitespace is a guess, and whether only the end may come.
        """
        found, may_end, may_space = self._coming()
        if len(found) != 1 or may_end:
            return b"", False, may_end and not found
        space = self._space(place, found[0], may_space=may_space)
        return space + found, may_space and not place.in_string, False

    def _cut(self, recent: Sequence[int], text: bytes) -> list[int]:
        """Return the tokens of a string behind others; by itself where it would cut them anew."""
        key: tuple[int | bytes, ...] = (*recent, text)
        if key not in self._spacing.cuts:
            if len(self._spacing.cuts) >= _MOST_CUTS:
                self._spacing.cuts.clear()
            self._spacing.cuts[key] = self._cut_anew(recent, text)
        return self._spacing.cuts[key]

    def _cut_anew(self, recent: Sequence[int], text: bytes) -> list[int]:
        before = list(recent)
        if before and not any(self._tokenizer.is_special_token(each) for each in before):
            tokens = self._tokenizer.tokenize_bytes(self._tokenizer.decode_bytes(before) + text)
            if tokens[: len(before)] == before:
                return list(tokens[len(before) :])
        return list(self._tokenizer.tokenize_bytes(text))


class _Nodes:
    """Nodes of a tree that is made: those of another, of which some are kept, and new ones."""

    def __init__(self, tree: DraftTree) -> None:
        self.tokens: list[int] = tree.token_ids.tolist()
        self.parents: list[int] = tree.parents.tolist()
        self.probabilities: list[float] = tree.probabilities.tolist()
        self.sources: list[int] = tree.sources.tolist()
        self.kept = [False] * len(self.tokens)
        self._drafted = len(self.tokens)
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            self._children.setdefault(parent, []).append(node)

    def leaves(self, num_likely: int) -> list[tuple[int, bool]]:
        """Return the leaves of the tree that was drafted, and which are the likeliest.

        Those that share the beginning of their paths follow one another.
        """
        drafted = range(self._drafted)
        leaves = [node for node in drafted if node not in self._children]
        likely = set(leaves[:num_likely])
        order: list[tuple[int, bool]] = []
        waiting = [node for node in reversed(self._children.get(ROOT, ())) if node in drafted]
        while waiting:
            node = waiting.pop()
            behind = self._children.get(node)
            if behind is None:
                order.append((node, node in likely))
            else:
                waiting += reversed(behind)
        return order

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to a node."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def add(
        self,
        node: int,
        tokens: Sequence[int],
        probabilities: Sequence[float],
        chosen_at: int | None = None,
    ) -> None:
        """Add a chain behind a node; what stands there already gets its probability, if higher.

        Beside what is nearly certain others are nearly impossible. Not so beside a choice: there
        its ways share what retrieved nodes leave.
        """
        probability = 1.0 if node == ROOT else self.probabilities[node]
        for place, (token, share) in enumerate(zip(tokens, probabilities, strict=True)):
            children = self._children.setdefault(node, [])
            probability *= share * (1 - self._mass(node) if place == chosen_at else 1)
            known = next((each for each in children if self.tokens[each] == token), None)
            if known is None:
                known = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.probabilities.append(probability)
                self.sources.append(int(Source.GRAMMAR))
                self.kept.append(True)
                children.append(known)
            elif probability > self.probabilities[known]:
                self._raise(known, probability)
            for other in children if place != chosen_at else ():
                if other != known:
                    self._raise(other, self.probabilities[other] * (1 - share))
            node = known
            probability = self.probabilities[node]

    def _mass(self, node: int) -> float:
        """Return how likely one of the retrieved nodes behind a node is, given that one."""
        own = 1.0 if node == ROOT else self.probabilities[node]
        retrieved = [each for each in self._children.get(node, ()) if each < self._drafted]
        return min(sum(self.probabilities[each] for each in retrieved) / max(own, 1e-9), 1.0)

    def _raise(self, node: int, probability: float) -> None:
        """Give a node another probability, and those behind it their shares of that."""
        waiting, scale = [node], probability / max(self.probabilities[node], 1e-9)
        while waiting:
            each = waiting.pop()
            self.probabilities[each] = min(self.probabilities[each] * scale, probability)
            waiting += self._children.get(each, ())

    def tree(self, max_nodes: int) -> DraftTree:
        """Return the likeliest nodes that are kept, parents before children."""
        kept = [node for node, is_kept in enumerate(self.kept) if is_kept]
        # What is added comes after its parent, and so of equal ones, too.
        kept.sort(key=lambda node: -self.probabilities[node])
        places = {node: place for place, node in enumerate(kept[:max_nodes])}
        chosen = list(places)
        return DraftTree(
            np.array([self.tokens[node] for node in chosen], np.int32),
            np.array([places.get(self.parents[node], ROOT) for node in chosen], np.int32),
            np.array([self.probabilities[node] for node in chosen], np.float32),
            np.array([self.sources[node] for node in chosen], np.uint8),
        )
