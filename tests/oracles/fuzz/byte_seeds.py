"""What fuzzing begins with: inputs as well-meaning callers, servers and drafters send them."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from retriever.log import log_store as log_records
from retriever.plugins.replication.replicated_records import Record, encode
from retriever.plugins.replication.replication_state import Position
from retriever.predict.generations import Output, Scope, session_origin
from retriever.predict.weights import prior_weights, to_bytes
from retriever.security.access import TokenHash, new_token
from retriever.v1 import retriever_pb2 as pb
from tests.oracles.fuzz.byte_calls import PROMPT, TENANTS, Call
from tests.oracles.fuzz.fuzzing import SESSION, VICTIM

_TOKENS: Final = np.arange(40, dtype=np.int32)
_STREAM: Final = b"foredraft:{ab}:outputs"


def seeds() -> Mapping[str, list[bytes]]:
    """Return inputs by the name of what reads them."""
    return {
        "calls": _calls(),
        "headers": [b"\0Bearer " + new_token().encode(), b"\1bearer x", b"\2Basic eDp5"],
        "replies": [message.SerializeToString() for message in _replies()],
        "explanations": [_explanation().SerializeToString()],
        "credentials": _credentials(),
        "records": _records(),
        "log": _log(),
    }


def _calls() -> list[bytes]:
    a, b = TENANTS
    opening = pb.OpenSessionRequest(session_id=SESSION, prompt=PROMPT)
    step = pb.SessionStep(
        session_id=SESSION, new_token_ids=[3, 4], length=len(PROMPT) + 2, budget_nodes=8
    )
    closing = pb.CloseSessionRequest(session_id=SESSION, new_token_ids=[5])
    first = pb.DraftStreamRequest(sequence_number=1, openings=[opening], steps=[step])
    second = pb.DraftStreamRequest(sequence_number=2, closings=[closing], timeout_us=1000)
    texts = [pb.Prediction(token_ids=PROMPT, label="plan"), pb.Prediction(token_ids=[7, 8])]
    predicting = pb.OpenSessionRequest(
        session_id=SESSION,
        prompt=PROMPT,
        predictions=texts,
        group="group",
        policy_version=3,
        oldest_version=2,
    )
    adding = pb.AddPredictionsRequest(session_id=SESSION, predictions=texts[1:])
    rows: list[list[Any]] = [
        [pb.DraftRequest(context=PROMPT, budget_nodes=8, min_probability=0.1)],
        [pb.ExplainRequest(context=PROMPT, budget_nodes=4, max_documents=2)],
        [opening, pb.DraftStreamRequest(sequence_number=1, steps=[step]), closing],
        [opening, pb.StepRequest(step=step), closing],
        [first, second, second],
        [predicting, adding, pb.DraftStreamRequest(sequence_number=1, steps=[step])],
        [pb.DraftStreamRequest(sequence_number=1, openings=[predicting], predictions=[adding])],
        [opening, pb.DeleteSessionDataRequest(session_id=SESSION), pb.DeleteTenantDataRequest()],
        [pb.DraftRequest(context=PROMPT, vocabulary_fingerprint="ab" * 32)],
        [
            pb.ShareFindingsRequest(model_fingerprint="cd" * 32, findings=_findings()),
            pb.FetchFindingsRequest(model_fingerprint="cd" * 32),
        ],
        [pb.ListIndexesRequest(), pb.GetServerInfoRequest()],
    ]
    return [_row(messages, tenant) for messages in rows for tenant in (a, b)]


def _findings() -> pb.Findings:
    contexts, token_ids = np.array([1, 3, 5], "<i8"), np.arange(24, dtype="<i4")
    return pb.Findings(
        contexts=contexts.tobytes(), token_ids=token_ids.tobytes(), log_odds=bytes(96)
    )


def _row(messages: list[Any], tenant: str) -> bytes:
    calls = [
        Call(type(each).__name__.removesuffix("Request"), tenant, each.SerializeToString())
        for each in messages
    ]
    return b"".join(map(bytes, calls))


def _tree() -> pb.DraftTree:
    return pb.DraftTree(
        token_ids=[5, 6, 7, 8],
        parents=[-1, 0, 0, 2],
        probabilities=[0.9, 0.5, 0.4, 0.1],
        sources=[pb.SOURCE_CONTEXT, pb.SOURCE_GENERATIONS, pb.SOURCE_PHRASES, pb.SOURCE_CORPUS],
    )


def _replies() -> list[pb.DraftStreamResponse]:
    statuses = [pb.SessionStatus(session_id="s", code=5, message="no such session")]
    return [
        pb.DraftStreamResponse(trees=[_tree(), _tree()], sequence_number=1),
        pb.DraftStreamResponse(trees=[_tree(), pb.DraftTree()], statuses=statuses),
        pb.DraftStreamResponse(statuses=[pb.SessionStatus(code=10, message="lost")]),
        pb.DraftStreamResponse(padding=[b"\0" * 9]),
    ]


def _explanation() -> pb.ExplainResponse:
    place = pb.DocumentOccurrence(index="i", name="d", licence="MIT", position=3)
    node = pb.NodeProvenance(match_length=3, count=2, context_positions=[1], documents=[place])
    return pb.ExplainResponse(tree=_tree(), nodes=[node] * 4)


def _credentials() -> list[bytes]:
    scopes = '"scopes": ["draft", "delete"]'
    line = f'{{"tenant": "acme", "token": "{TokenHash.of(new_token())}", {scopes}}}\n'
    other = f'{{"tenant": "acme", "certificate": "DNS:engine.example", {scopes}}}\n'
    pem = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    return [line.encode(), f"# who\n{line}{other}".encode(), pem]


def _records() -> list[bytes]:
    origin = session_origin(SESSION)
    made = [
        Record(b"r" * 16, 1 << 33, "acme", 1.7e9, _TOKENS),
        Record(b"r" * 16, 2, VICTIM, 1.7e9, _TOKENS + 70_000, origin),
        Record(b"r" * 16, 0, "acme", 1.7e9, _TOKENS[:0], origin),
    ]
    whole = [encode(record, _STREAM) for record in made]
    return whole + [each[5:] for each in whole]  # the checksum is put before these


def _log() -> list[bytes]:
    key = log_records.numbered_key(log_records.tenant_key(log_records.OUTPUTS, "acme"), 7)
    content = log_records.encode_output(Output(_TOKENS, 1.7e9, session_origin(SESSION)))
    position = Position(unsent={Scope("acme"): 1.7e9}, outputs="1-0", numbers={b"r" * 16: 3})
    sealed = key.ljust(20, b"\0") + log_records.seal(key, content)
    return [sealed, content, to_bytes(prior_weights()), position.to_bytes()]
