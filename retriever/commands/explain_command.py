"""The command that explains a draft, as a tree for people."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from indexer.errors import reason_of
from indexer.flags import AsJson, with_flags
from indexer.reader import Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.commands.options import clear_errors, progress
from retriever.errors import InvalidRequestError
from retriever.limits import DEFAULT_DOCUMENTS, MAX_DOCUMENTS
from retriever.operations.settings import DraftSettings, TokenizerSettings
from retriever.replay.traces import ChatEncoder
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.options import DEFAULT_LIMITS, check_files, load_phrases
from retriever.tree import ROOT, Explanation, NodeProvenance, Source

_SHOWN_POSITIONS: Final = 3


def rendered(explanation: Explanation, text_of: Callable[[int], str] | None) -> Tree:
    """Return a tree with a line for each node, and one below it for each document.

    Args:
        explanation: what to show.
        text_of: gives the text of a token; without it ids alone are shown.
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
            licence = f", {document.licence}" if document.licence else ""
            where = f"{document.index}: {document.name}{licence}, token {document.position}"
            branch.add(f"[dim]{escape(where)}[/dim]")
    return root


def _evidence(provenance: NodeProvenance) -> str:
    """Say after how long a match a token was found, how often, and where in the context."""
    if provenance.count == 0:
        return ""
    text = f", {provenance.count} x after a match of {provenance.match_length}"
    places = provenance.context_positions[-_SHOWN_POSITIONS:]
    if places:
        text += f", at {', '.join(map(str, places))}"
    return text


_PATIENCE_S: Final = 10.0


@clear_errors()
@with_flags
def explain(
    *,
    source: DraftSettings,
    texts: TokenizerSettings,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="What comes before the draft, as text.", rich_help_panel="Context"
        ),
    ] = None,
    context_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The same, in a file of UTF-8.", rich_help_panel="Context"
        ),
    ] = None,
    context_ids: Annotated[
        str | None,
        typer.Option(
            metavar="IDS", help="The same, as token ids: 12,7,401.", rich_help_panel="Context"
        ),
    ] = None,
    budget: Annotated[
        int,
        typer.Option(
            min=0,
            max=DEFAULT_LIMITS.max_budget_nodes,
            help="Nodes in the tree.",
            rich_help_panel="Context",
        ),
    ] = 32,
    documents: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_DOCUMENTS,
            help="Most documents to name for a node.",
            rich_help_panel="Output",
        ),
    ] = DEFAULT_DOCUMENTS,
    as_json: AsJson = False,
) -> None:
    """Show the draft for a context, and for each token where it comes from.

    Named are its database, after how many equal tokens and how often it was found, and documents
    that it stands in, with their licences.
    """
    check_files(source.index, source.phrases)
    encoder = ChatEncoder(texts.tokenizer)
    tokens = _tokens(encoder, context, context_file, context_ids)
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
        explanation = drafter.explain(tokens, budget, max_documents=documents)
    known = encoder.vocabulary is not None
    text_of = (lambda token: str(encoder.tokenizer.decode([token]))) if known else None
    if as_json:
        typer.echo(json.dumps(explanation.as_json(text_of)))
    else:
        Console().print(rendered(explanation, text_of))


def _remote(source: DraftSettings, vocabulary: Vocabulary | None) -> RemoteDrafter:
    if len(source.server) > 1:
        raise InvalidRequestError("one service explains at a time: give one --server")
    return RemoteDrafter(
        source.server[0],
        timeout_s=_PATIENCE_S,
        vocabulary_fingerprint="" if vocabulary is None else vocabulary.fingerprint,
        credentials=source.shown_credentials(),
    )


def _tokens(
    encoder: ChatEncoder, text: str | None, file: Path | None, ids: str | None
) -> list[int]:
    """Return the context, which is given in one of three ways."""
    if sum(given is not None for given in (text, file, ids)) != 1:
        raise InvalidRequestError("give one of --context, --context-file and --context-ids")
    if ids is not None:
        return _parsed(ids)
    if file is not None:
        text = _read(file)
    return encoder.encode_output(_encodable(text or ""))


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
        raise InvalidRequestError("the context is no text: it is not UTF-8") from error
    return text
