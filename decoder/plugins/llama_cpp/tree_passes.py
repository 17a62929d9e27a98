"""Draft trees in one pass of llama.cpp, below the engine's own loop.

The engine's `generate` is unchanged. As without drafts, it decodes one token in each turn: it calls
the draft model, which returns no tokens, then `eval` with the token that it chose, and `sample`.
`TreePasses` replaces `eval` and `sample`. A pass reads the chosen token and a draft tree after it.
As long as the engine's choices are in the tree, later turns are answered from that pass, and the
model reads nothing. So the engine's own code handles prompts, samplers, grammars, processors and
stopping criteria, and it sees only chosen tokens, never drafted ones. A loop of our own would have
to copy that code, and would differ from the engine's next version.

Each path of a tree is a sequence of llama.cpp. Sequence 0 has the chosen tokens and then the first
path. The other sequences share its cells (`kv_unified`). They lose the cells of a pass before the
next pass.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from ctypes import c_float
from dataclasses import dataclass
from itertools import islice
from logging import getLogger
from time import perf_counter
from types import FrameType
from typing import Any, Final

import llama_cpp
import numpy as np
from llama_cpp import Llama, llama_get_logits_ith
from numpy.typing import NDArray

from decoder.engines.contract import differences
from decoder.errors import UnsupportedModelError
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree

_END: Final = -1
"""End position that means "up to the last position" in llama.cpp's memory functions."""

_LIKE: Final = 0.25
"""Largest allowed difference between a tree's logits and the logits of its paths. It is a share of
the difference when each node also sees its siblings. In float32, the share is 1e-6. Rounding in a
model is small compared with the effect of one more token in a context of five."""

_log = getLogger(__name__)


@dataclass(slots=True, eq=False)
class _TreePass:
    """The last pass, over a token and a tree after it.

    Attributes:
        tree: tree of N nodes.
        logits: float32[1 + N, vocabulary], the logits after the token and each node. This is the
            engine's own memory, which its next pass overwrites.
        start: position of the token.
        sequences: for each node, the first sequence that contains it.
        num_sequences: number of sequences with cells of this pass.
        node: the last node that the engine chose.
        end: position after that node.
        is_open: whether the nodes after it are still in the model's memory.
    """

    tree: DraftTree
    logits: NDArray[np.float32]
    start: int
    sequences: list[int]
    num_sequences: int
    node: int
    end: int
    is_open: bool = True

    def child(self, token: int) -> int | None:
        """Return the child of the last chosen node with this token; `None` if there is none."""
        if not self.is_open:
            return None
        nodes = (self.tree.parents == self.node) & (self.tree.token_ids == token)
        found = np.flatnonzero(nodes)
        return int(found[0]) if len(found) else None


class TreePasses:
    """`Llama.eval`, `sample` and `save_state` of a model with drafts.

    `eval` verifies the planned tree. It answers from the last pass for tokens that this pass has
    verified. Everything else is read as in the engine, except for a prompt's logits. With
    `logits_all`, the engine computes the logits of every prompt token, which takes a fifth of the
    prompt's time with a large vocabulary. Only completions that show the prompt with its
    log-probabilities (`echo` and `logprobs`) need them. A user's own calls of `eval` are unchanged.

    Args:
        llm: the model whose methods are replaced.

    Attributes:
        max_sequences: most paths of a tree; 1 if only chains are verified.
        seconds: seconds of the last pass over a tree.
        refusal: the engine's error in the last pass over a tree; `None` if it succeeded.
        num_drawn: number of tokens that were sampled from the logits of such passes.
    """

    def __init__(self, llm: Llama) -> None:
        self.max_sequences = 1
        self.seconds = 0.0
        self.refusal: Exception | None = None
        self.num_drawn = 0
        self._llm = llm
        self._pass: _TreePass | None = None
        self._planned: DraftTree | int | None = None
        self._planned_at = -1
        self._shared = [0]
        self._lacks_some = False
        self._is_drafted = False

    @property
    def max_nodes(self) -> int:
        """Most nodes of a draft: the engine aborts if it samples after more than one batch."""
        return int(self._llm.n_batch) - 1

    def announce(self) -> None:
        """Mark the next `eval` as a pass for which drafts were requested, whatever it reads."""
        self._is_drafted = True

    def goes_on_within(self, tokens: TokenIds) -> bool:
        """Return whether the last pass has already read the last token after the other tokens.

        If so, the next `eval` is answered from that pass.
        """
        last = self._current()
        if last is None or len(tokens) != last.end + 1:
            return False
        node = last.child(int(tokens[-1]))
        if node is None:
            return False
        self._planned, self._planned_at = node, last.end
        return True

    def plan(self, tree: DraftTree, num_tokens: int) -> None:
        """Let the next `eval` verify a tree after the last of `num_tokens` tokens."""
        self._planned, self._planned_at = tree, num_tokens - 1

    def logits_of(self, tree: DraftTree) -> NDArray[np.float32] | None:
        """Return the logits of the last pass, float32[1 + N, V]; `None` if it had another tree.

        They are in the engine's own memory, which its next pass overwrites.
        """
        last = self._current()
        return last.logits if last is not None and last.tree is tree else None

    def __call__(self, tokens: Sequence[int]) -> None:
        """Read tokens; see `Llama.eval`."""
        planned, self._planned = self._planned, None
        is_drafted, self._is_drafted = self._is_drafted, False
        fits = len(tokens) == 1 and self._planned_at == self._llm.n_tokens
        last = self._current()
        if isinstance(planned, int) and fits and last is not None:
            self._go_to(planned, last)
        elif isinstance(planned, DraftTree) and fits:
            self._verify_or_read(int(tokens[0]), planned)
        elif len(tokens) or last is None:  # else the engine samples where it stopped
            self._read(tokens, is_drafted=is_drafted, caller=sys._getframe(1))  # noqa: SLF001

    def sample(self, *settings: Any, **named: Any) -> int:
        """Sample a token, from the chosen node's logits if there is one; see `Llama.sample`."""
        last, llm = self._current(), self._llm
        if last is not None and named.get("idx") in {None, llm.n_tokens - 1}:
            from_end = 1 + last.node - len(last.logits)  # as the engine counts rows of a pass
            named["idx"] = llm.n_tokens + from_end
            self.num_drawn += 1
        token: int = Llama.sample(llm, *settings, **named)
        return token

    def save_state(self) -> Any:
        """Return the model's state as without drafts; see `Llama.save_state`."""
        last = self._current()
        self.forget()
        self._remove(0, self._llm.n_tokens)
        if last is not None:  # the engine still samples from its logits
            last.is_open, last.num_sequences, self._pass = False, 1, last
        return Llama.save_state(self._llm)

    def forget(self) -> None:
        """Drop all sequences except the first."""
        self._pass = None
        for sequence in range(1, self.max_sequences):
            self._remove(sequence, 0)
        self._shared = [0] * self.max_sequences

    def _current(self) -> _TreePass | None:
        """Return the last pass, if the engine's last token is one of its tokens."""
        last, llm = self._pass, self._llm
        if last is None or last.end != llm.n_tokens or llm._requires_eval:  # noqa: SLF001
            return None
        return last

    def _go_to(self, node: int, last: _TreePass) -> None:
        """Move to a node of the last pass that the engine chose."""
        at, sequence = last.end, last.sequences[node]
        if sequence:
            self._remove(0, at)
            self._share(sequence, 0, at, at + 1)
        self._note(at, int(last.tree.token_ids[node]), last.logits[1 + node])
        last.node, last.end = node, at + 1

    def _note(self, at: int, token: int, logits: NDArray[np.float32]) -> None:
        """Write a token and its logits to the engine's own memory, as its `eval` does."""
        llm = self._llm
        llm.input_ids[at] = token
        llm.scores[at] = logits
        llm.n_tokens = at + 1

    def _verify_or_read(self, token: int, tree: DraftTree) -> None:
        """Read a token with a tree after it; without the tree if the engine fails on it."""
        began_s = perf_counter()
        if self._llm._requires_eval:  # noqa: SLF001  the memory may be one that was loaded
            self.forget()
        self._settle()
        self.refusal = None
        if len(tree):
            try:
                self.verify(token, tree, sequences_of(tree))
            except RuntimeError as error:
                self.refusal = error
                self.forget()
        if self._pass is None:
            Llama.eval(self._llm, [token])
        self.seconds = perf_counter() - began_s

    def _settle(self) -> None:
        """Drop the nodes of the last pass that were not chosen."""
        last, self._pass = self._pass, None
        if last is None:
            return
        for sequence in range(1, last.num_sequences):
            self._remove(sequence, last.start + 1)
            self._shared[sequence] = last.start + 1

    def verify(self, token: int, tree: DraftTree, paths: Sequence[range]) -> None:
        """Read a token and a tree after it, each node in the sequences of its paths.

        Raises:
            RuntimeError: the engine fails, for example because it lacks memory.
        """
        llm, at = self._llm, int(self._llm.n_tokens)
        num_sequences = max(path.stop for path in paths)
        if max(self._shared) > at:
            self.forget()
        self._remove(0, at)
        for sequence in range(1, num_sequences):
            self._share(0, sequence, self._shared[sequence], at)
            self._shared[sequence] = at
        rows = zip(tree.token_ids.tolist(), tree.depths().tolist(), paths, strict=True)
        self._fill([(token, 0, range(num_sequences)), *rows], at)
        llm._ctx.decode(llm._batch)  # noqa: SLF001  no public name
        flat: Any = llm._ctx.get_logits()  # noqa: SLF001  as above
        logits = np.ctypeslib.as_array(flat, shape=(1 + len(tree), llm.n_vocab()))
        self._note(at, token, logits[0])
        llm._requires_eval = False  # noqa: SLF001  as above
        first = [path.start for path in paths]
        self._pass = _TreePass(tree, logits, at, first, num_sequences, ROOT, at + 1)

    def _fill(self, rows: list[tuple[int, int, range]], start: int) -> None:
        """Write tokens, positions and sequences to the engine's batch."""
        batch = self._llm._batch.batch  # noqa: SLF001  no public name
        batch.n_tokens = len(rows)
        for row, (token, depth, sequences) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = start + depth
            batch.n_seq_id[row] = len(sequences)
            for number, sequence in enumerate(sequences):
                batch.seq_id[row][number] = sequence
            batch.logits[row] = True

    def _remove(self, sequence: int, start: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._llm._ctx.memory, sequence, start, _END)  # noqa: SLF001

    def _share(self, source: int, target: int, start: int, end: int) -> None:
        if start < end:
            memory = self._llm._ctx.memory  # noqa: SLF001  no public name
            llama_cpp.llama_memory_seq_cp(memory, source, target, start, end)

    def _read(self, tokens: Sequence[int], *, is_drafted: bool, caller: FrameType) -> None:
        """Read tokens without a tree, as the engine does."""
        if self._pass is not None or not is_drafted:
            self.forget()  # before a prompt: the memory may come from a saved state
        is_ours = getattr(self._llm.draft_model, "passes", None) is self
        if is_drafted or not is_ours or not _is_for_generate(caller):
            Llama.eval(self._llm, tokens)
        elif _shows_logits(caller):
            self._read_with_logits(tokens)
        elif len(tokens):
            self._read_prompt(tokens)
        else:
            Llama.eval(self._llm, tokens)

    def _read_with_logits(self, tokens: Sequence[int]) -> None:
        """Read a prompt with all its logits; tokens read without logits are read again."""
        llm = self._llm
        if self._lacks_some:
            tokens, llm.n_tokens = [*llm.input_ids[: llm.n_tokens].tolist(), *tokens], 0
        Llama.eval(llm, tokens)
        self._lacks_some = False

    def _read_prompt(self, tokens: Sequence[int]) -> None:
        """Read a prompt with only the logits of its last token."""
        llm, self._lacks_some = self._llm, True
        llm._logits_all = False  # noqa: SLF001  no public name
        try:
            Llama.eval(llm, tokens)
        finally:
            llm._logits_all = True  # noqa: SLF001  as above
        last = np.ctypeslib.as_array(llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),))
        llm.scores[llm.n_tokens - 1] = last


def _is_for_generate(caller: FrameType) -> bool:
    """Return whether the caller is the engine's own loop, not a user who may want the logits."""
    return caller.f_code is Llama.generate.__code__


def _shows_logits(caller: FrameType | None) -> bool:
    """Return whether the prompt is read for a completion that shows the prompt's logits."""
    while caller is not None and caller.f_code is not Llama._create_completion.__code__:  # noqa: SLF001
        caller = caller.f_back
    stated = {} if caller is None else caller.f_locals
    return bool(stated.get("echo")) and stated.get("logprobs") is not None


def sequences_of(tree: DraftTree) -> list[range]:
    """Return, for each node, the sequences of the paths that it is on.

    Paths are numbered from 0. The paths of a node have consecutive numbers. The first path follows
    the first child at each node, which is the most probable.
    """
    parents = tree.parents.tolist()
    num_paths = [0] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        num_paths[node] = max(num_paths[node], 1)
        if parents[node] != ROOT:
            num_paths[parents[node]] += num_paths[node]
    free = [0] * (len(parents) + 1)  # the last entry is the root's, at index -1
    paths = []
    for node, parent in enumerate(parents):
        start = free[node] = free[parent]
        free[parent] += num_paths[node]
        paths.append(range(start, free[parent]))
    return paths


def within_paths(tree: DraftTree, max_paths: int) -> DraftTree:
    """Return the longest prefix of a tree that has at most `max_paths` paths."""
    num_paths, inner = 0, set[int]()
    for node, parent in enumerate(tree.parents.tolist()):
        num_paths += parent == ROOT or parent in inner  # else it continues its parent's path
        inner.add(parent)
        if num_paths > max_paths:
            return tree.prefix(node)
    return tree


def share_memory(llm: Llama, max_sequences: int) -> bool:
    """Give a model a context in which sequences share cells; return whether that succeeded.

    The engine's own context holds one sequence. So a new context replaces it, and the tokens that
    the model has read are lost.

    Args:
        llm: the model.
        max_sequences: number of sequences in the new context; see `most_sequences`.
    """
    parameters = llm.context_params
    if parameters.n_seq_max >= max_sequences and parameters.kv_unified:
        return True
    before = parameters.n_seq_max, parameters.kv_unified
    parameters.n_seq_max, parameters.kv_unified = max_sequences, True
    llm._ctx.close()  # noqa: SLF001  no public name
    try:
        _make_context(llm)
    except ValueError as error:
        _log.warning("llama.cpp cannot create a context for draft trees: %s", error)
        parameters.n_seq_max, parameters.kv_unified = before
        _make_context(llm)
        return False
    return True


def _make_context(llm: Llama) -> None:
    made = type(llm._ctx)(model=llm._model, params=llm.context_params, verbose=llm.verbose)  # noqa: SLF001
    llm._ctx = llm._stack.enter_context(closing(made))  # noqa: SLF001  freed before its model
    llm.reset()
    adapter = llm._lora_adapter  # noqa: SLF001
    if adapter is not None:
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
        scales = (c_float * 1)(llm.lora_scale)
        if llama_cpp.llama_set_adapters_lora(made.ctx, adapters, 1, scales):
            raise UnsupportedModelError(f"llama.cpp cannot apply {llm.lora_path} a second time")


def most_sequences(llm: Llama, wanted: int) -> int:
    """Return the most sequences that a pass can have, at most `wanted`."""
    can = int(llama_cpp.llama_max_parallel_sequences()), int(llm._batch.n_seq_max)  # noqa: SLF001
    return min(wanted, *can, int(llm.context_params.n_ubatch))  # llama.cpp aborts beyond that


def tree_differences(llm: Llama) -> list[str]:
    """Return what an engine lacks for draft trees, one sentence for each part."""
    context, batch = getattr(llm, "_ctx", None), getattr(llm, "_batch", None)
    wanted: list[tuple[Any, tuple[str, ...], str]] = [
        (llm, _OWN, "Llama"),
        (context, ("close", "decode", "get_logits", "memory"), "LlamaContext"),
        (batch, ("batch", "n_seq_max"), "LlamaBatch"),
        (llm.context_params, ("kv_unified", "n_seq_max", "n_ubatch"), "llama_context_params"),
        (llama_cpp, _FUNCTIONS, "llama_cpp"),
    ]
    found = [
        sentence
        for thing, attributes, called in wanted
        for sentence in differences(thing, attributes=attributes, called=called)
    ]
    if not found:
        named = ("model", "params", "verbose")
        found = differences(type(context), named=named, called="LlamaContext")
    sample, save_state = getattr(Llama, "sample", None), getattr(Llama, "save_state", None)
    found += differences(sample, parameters=["idx"], called="Llama.sample")
    found += differences(Llama.generate, passed=1, named=["temp"], called="Llama.generate")
    found += differences(save_state, passed=0, called="Llama.save_state")
    return found


_OWN: Final = (
    "_lora_adapter",
    "_model",
    "_requires_eval",
    "_stack",
    "lora_path",
    "lora_scale",
    "verbose",
)
_FUNCTIONS: Final = (
    "llama_adapter_lora_p_ctypes",
    "llama_max_parallel_sequences",
    "llama_memory_seq_cp",
    "llama_memory_seq_rm",
    "llama_set_adapters_lora",
)


_PROBED: Final = 4 + 6
"""Tokens of the check with a small tree: four of context, and six in and around the tree."""


def verifies_trees(passes: TreePasses, llm: Llama) -> bool:
    """Return whether a model's logits after the nodes of a tree equal the logits after their paths.

    The check reads a tree of two paths, and a token after the second path. It compares the logits
    with those of the same tokens without a tree, and with those of a tree whose nodes see one
    another. It clears the model's cache.
    """
    context, (root, first, second, third, fourth, last) = _probe(llm)
    tree = DraftTree.checked(
        [first, second, third, fourth], [ROOT, ROOT, 0, 1], [1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0]
    )
    if passes.max_nodes < len(tree) or len(llm.input_ids) < _PROBED:
        return False
    try:
        seeing_all = _read_tree(passes, llm, [*context, root], tree, [range(2)] * len(tree))
        found = _read_tree(passes, llm, [*context, root], tree, sequences_of(tree))
        behind = _behind(passes, llm, [second, fourth, last])
    except RuntimeError:
        return False
    right = _plain(llm, [*context, root, second, fourth, last])[-3:]
    llm.reset()
    allowed = _LIKE * np.abs(seeing_all[[2, 4]] - right[:2]).max()
    return bool(np.abs(np.stack([*found[[2, 4]], behind]) - right).max() <= allowed)


def are_driven(passes: TreePasses, llm: Llama) -> bool:
    """Return whether the engine's loop calls `eval` and `sample` of the passes in its model.

    The check decodes three tokens. A tree of the four most probable tokens contains the second. The
    check clears the model's cache.
    """
    context, _ = _probe(llm)
    kept, llm.draft_model = llm.draft_model, None
    try:
        _decode(llm, context, 2)
        likely = np.argsort(-llm.scores[llm.n_tokens - 1])[:4]
        tree = DraftTree.checked(likely, [ROOT] * 4, [1.0] * 4, [0] * 4)
        llm.draft_model = _Planned(passes, within_paths(tree, passes.max_sequences))
        before = passes.num_drawn
        _decode(llm, context, 3)
    finally:
        llm.draft_model = kept
        llm.reset()
    return passes.num_drawn == before + 2


def _decode(llm: Llama, prompt: list[int], num_tokens: int) -> None:
    llm.reset()
    for _ in islice(llm.generate(prompt, temp=0.0), num_tokens):
        pass


@dataclass(slots=True)
class _Planned:
    """A draft model that drafts one tree, and then nothing."""

    passes: TreePasses
    tree: DraftTree

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        if not self.passes.goes_on_within(input_ids):
            self.passes.plan(self.tree, len(input_ids))
            self.tree = DraftTree.empty()
        return np.empty(0, np.intc)


def _read_tree(
    passes: TreePasses, llm: Llama, tokens: list[int], tree: DraftTree, paths: list[range]
) -> NDArray[np.float32]:
    """Return float32[1 + N, V], a copy of the logits of a pass over a tree after tokens."""
    llm.reset()
    passes(tokens[:-1])
    passes.verify(tokens[-1], tree, paths)
    logits = passes.logits_of(tree)
    return np.empty((0, 0), np.float32) if logits is None else logits.copy()


def _probe(llm: Llama) -> tuple[list[int], list[int]]:
    """Return four tokens of context and six others, all different, from the whole vocabulary."""
    tokens = np.linspace(0, llm.n_vocab() - 1, _PROBED + 2).astype(int).tolist()
    return tokens[1:5], tokens[5:-1]


def _behind(passes: TreePasses, llm: Llama, tokens: list[int]) -> NDArray[np.float32]:
    """Choose tokens one by one, as the engine's loop does; return the logits after the last."""
    for token in tokens:
        so_far = np.array([*llm.input_ids[: llm.n_tokens], token], np.int32)
        if not passes.goes_on_within(so_far):
            passes.plan(DraftTree.empty(), len(so_far))
        passes([token])
    row: NDArray[np.float32] = llm.scores[llm.n_tokens - 1].copy()
    return row


def _plain(llm: Llama, tokens: list[int]) -> NDArray[np.float32]:
    """Return float32[n, V], a copy of the logits after tokens that are read in one call."""
    llm.reset()
    llm.eval(tokens)
    rows: NDArray[np.float32] = llm.scores[: len(tokens)].copy()
    return rows
