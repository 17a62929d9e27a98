"""The command that explains a draft, as a readable tree."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from indexer.errors import reason_of
from indexer.reader import Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.commands.options import progress
from retriever.drafter import Prediction
from retriever.errors import InvalidRequestError
from retriever.operations.settings import DraftSettings, TokenizerSettings
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from retriever.sessions.options import check_files, indexed_tokenizer, load_phrases
from retriever.traces.traces import ChatEncoder
from retriever.tree import ROOT, DocumentOccurrence, DraftTree, Explanation, NodeProvenance, Source

_SHOWN_POSITIONS: Final = 3
_SHOWN_PATHS: Final = 5
"""Number of paths that fit a screen with their sources; `--full` shows the others."""


@dataclass(frozen=True, slots=True)
class DraftPath:
    """A path of a draft from the context to a leaf.

    Attributes:
        nodes: nodes of the tree, from the root down.
        probability: probability that the whole path is accepted.
        expected: expected number of accepted tokens.
    """

    nodes: list[int]
    probability: float
    expected: float


def paths_of(tree: DraftTree) -> list[DraftPath]:
    """Return a path for each leaf of a tree, those with the most expected tokens first."""
    parents = tree.parents.tolist()
    probabilities = tree.probabilities.tolist()
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        nodes, node = list[int](), leaf
        while node != ROOT:
            nodes.append(node)
            node = parents[node]
        expected = sum(probabilities[node] for node in nodes)
        paths.append(DraftPath(nodes[::-1], probabilities[leaf], expected))
    return sorted(paths, key=lambda path: -path.expected)


def shown_paths(explanation: Explanation, text_of: Callable[[list[int]], str] | None) -> list[str]:
    """Return lines with the best paths as text and their sources, each source listed once.

    Args:
        explanation: explanation to show.
        text_of: returns the text of tokens; without it, ids are shown.
    """
    tree = explanation.tree
    if not len(tree):
        return ["no draft: nothing known continues this context"]
    paths = paths_of(tree)
    rest = f" ({_SHOWN_PATHS} of them shown)" if len(paths) > _SHOWN_PATHS else ""
    lines = [
        f"nodes: {len(tree)}, paths: {len(paths)}{rest}, most expected tokens first",
        "first the probability that a path is accepted; below, its tokens by database",
    ]
    numbers: dict[str, int] = {}
    for path in paths[:_SHOWN_PATHS]:
        tokens = tree.token_ids[path.nodes].tolist()
        text = f"tokens {', '.join(map(str, tokens))}" if text_of is None else repr(text_of(tokens))
        sources = Counter(Source(int(tree.sources[node])).label for node in path.nodes)
        named = ", ".join(f"{label} {count}" for label, count in sources.most_common())
        names: dict[int, None] = {
            numbers.setdefault(_named(document), len(numbers) + 1): None
            for node in path.nodes
            for document in explanation.nodes[node].documents
        }
        names |= dict.fromkeys(
            numbers.setdefault(f"prediction: {place.label}", len(numbers) + 1)
            for node in path.nodes
            for place in explanation.nodes[node].predictions
        )
        references = "".join(f" [{number}]" for number in names)
        lines += [f"{path.probability:6.3f}  {text}", f"        {named}{references}"]
    lines += [f"[{number}] {name}" for name, number in numbers.items()]
    return [*lines, "--full shows every node, with matches, places and documents"]


def _named(document: DocumentOccurrence) -> str:
    """Return a document's name and its licence."""
    return f"{document.index}: {document.name}" + (document.licence and f", {document.licence}")


def rendered(explanation: Explanation, text_of: Callable[[int], str] | None) -> Tree:
    """Return a tree with a line for each node, and below it a line for each document.

    Args:
        explanation: explanation to show.
        text_of: returns the text of a token; without it, only ids are shown.
    """
    tree = explanation.tree
    root = Tree(f"{len(tree)} nodes")
    branches = {ROOT: root}
    for node, provenance in enumerate(explanation.nodes):
        token = int(tree.token_ids[node])
        shown = escape(repr(text_of(token))) if text_of is not None else f"token {token}"
        probability = float(tree.probabilities[node])
        source = Source(int(tree.sources[node])).label
        branch = branches[int(tree.parents[node])].add(
            f"[bold]{shown}[/bold] {probability:.3f} {source}{_evidence(provenance)}"
        )
        branches[node] = branch
        for document in provenance.documents:
            where = f"{_named(document)}, token {document.position}"
            branch.add(f"[dim]{escape(where)}[/dim]")
        for place in provenance.predictions[:_SHOWN_POSITIONS]:
            where = f"prediction: {place.label}, token {place.position}"
            branch.add(f"[dim]{escape(where)}[/dim]")
    return root


def _evidence(provenance: NodeProvenance) -> str:
    """Describe the match before a token: its length, how often, and where in the context."""
    if provenance.count == 0:
        return ""
    text = f", {provenance.count} x after a match of {provenance.match_length}"
    places = provenance.context_positions[-_SHOWN_POSITIONS:]
    if places:
        text += f", at {', '.join(map(str, places))}"
    return text


_PATIENCE_S: Final = 10.0


def explain_draft(
    source: DraftSettings,
    texts: TokenizerSettings,
    context: str | None,
    context_file: Path | None,
    context_ids: str | None,
    prediction: Sequence[Path],
    budget: int,
    documents: int,
    *,
    full: bool,
    as_json: bool,
) -> None:
    """Show the draft for a context; see `foredraft explain --help`."""
    check_files(source.index, source.phrases)
    encoder = ChatEncoder(texts.tokenizer, indexed_tokenizer(source.index))
    tokens = _tokens(encoder, context, context_file, context_ids)
    expected = [_prediction(encoder, path) for path in prediction]
    with ExitStack() as stack:
        drafter: EmbeddedDrafter | RemoteDrafter
        if source.server:
            drafter = _remote(source, encoder.vocabulary)
        else:
            phrases = load_phrases(
                source.phrases,
                encoder.encode_output,
                encoder.vocabulary,
                indexes=source.index,
                track=progress,
            )
            drafter = EmbeddedDrafter.open_indexes(
                source.index, vocabulary=encoder.vocabulary, phrases=phrases
            )
        stack.callback(drafter.shut_down)
        explaining = (
            drafter.explain if isinstance(drafter, RemoteDrafter) else partial(explain, drafter)
        )
        explanation = explaining(tokens, budget, max_documents=documents, predictions=expected)
    known = encoder.vocabulary is not None
    text_of = (lambda ids: str(encoder.tokenizer.decode(ids))) if known else None
    text_of_one = None if text_of is None else (lambda token: text_of([token]))
    if as_json:
        typer.echo(json.dumps(explanation.as_json(text_of_one)))
    elif full:
        Console().print(rendered(explanation, text_of_one))
    else:
        typer.echo("\n".join(shown_paths(explanation, text_of)))


def _remote(source: DraftSettings, vocabulary: Vocabulary | None) -> RemoteDrafter:
    if len(source.server) > 1:
        raise InvalidRequestError("explain asks one service: give one --server")
    return RemoteDrafter(
        source.server[0],
        timeout_s=_PATIENCE_S,
        vocabulary_fingerprint="" if vocabulary is None else vocabulary.fingerprint,
        credentials=source.shown_credentials(),
    )


def _tokens(
    encoder: ChatEncoder, text: str | None, file: Path | None, ids: str | None
) -> list[int]:
    """Return the context, given in one of three ways."""
    if sum(given is not None for given in (text, file, ids)) != 1:
        raise InvalidRequestError("give one of --context, --context-file and --context-ids")
    if ids is not None:
        return _parsed(ids)
    if file is not None:
        text = _read(file)
    return encoder.encode_output(_encodable(text or ""))


def _prediction(encoder: ChatEncoder, file: Path) -> Prediction:
    """Return the text of a file as a prediction labelled with its name."""
    return Prediction(np.array(encoder.encode_output(_read(file)), np.int32), file.name)


def _parsed(ids: str) -> list[int]:
    try:
        return [int(token) for token in ids.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidRequestError(
            f"--context-ids takes numbers with commas between them: {error}"
        ) from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{file} cannot be read: {reason_of(error)}") from error


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the context is not text: it is not UTF-8") from error
    return text
