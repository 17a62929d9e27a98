"""Servers for shards: real ones in processes, and one in a thread that can be slowed down."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.drafter import SequenceOptions
from retriever.errors import RetrieverError
from retriever.sessions.administration import Administration, SessionFilter
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb, retriever_pb2_grpc as pb_grpc
from retriever.wire import messages as wire
from retriever.wire.statuses import status_of


@dataclass
class SlowServicer(pb_grpc.RetrieverServiceServicer):
    """Answers as the service does, each step after a pause.

    Attributes:
        drafter: what answers.
        pause_s: before each step, in seconds.
        num_steps: steps answered.
    """

    drafter: EmbeddedDrafter
    pause_s: float = 0.0
    num_steps: int = field(default=0, init=False)

    def OpenSession(  # noqa: N802  (named by the contract)
        self, request: pb.OpenSessionRequest, context: Any
    ) -> pb.OpenSessionResponse:
        tokens = wire.prompt_of(request).tokens()
        self._or_status(
            context,
            lambda: self.drafter.open(
                request.session_id, tokens, SequenceOptions(remember=not request.forget)
            ),
        )
        return pb.OpenSessionResponse()

    def AddPredictions(  # noqa: N802
        self, request: pb.AddPredictionsRequest, context: Any
    ) -> pb.AddPredictionsResponse:
        raise NotImplementedError

    def Step(  # noqa: N802
        self, request: pb.StepRequest, context: Any
    ) -> pb.StepResponse:
        raise NotImplementedError

    def DraftStream(  # noqa: N802
        self, request_iterator: Iterator[pb.DraftStreamRequest], context: Any
    ) -> Iterator[pb.DraftStreamResponse]:
        for request in request_iterator:
            time.sleep(self.pause_s)
            requests = wire.requests_of(request.steps, wire.DEFAULT_BUDGET_NODES)
            trees = self._or_status(context, lambda asked=requests: self.drafter.draft(asked))  # type: ignore[misc]
            self.num_steps += 1
            yield pb.DraftStreamResponse(
                trees=map(wire.tree_to_message, trees), sequence_number=request.sequence_number
            )

    def CloseSession(  # noqa: N802
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        tokens = wire.new_tokens_of(request).tokens()
        keep = not request.forget
        self._or_status(
            context, lambda: self.drafter.close(request.session_id, tokens, remember=keep)
        )
        return pb.CloseSessionResponse()

    def ListIndexes(  # noqa: N802
        self, request: pb.ListIndexesRequest, context: Any
    ) -> pb.ListIndexesResponse:
        del request, context
        return pb.ListIndexesResponse(
            indexes=[
                pb.IndexInfo(vocabulary_fingerprint=index.vocabulary.fingerprint)
                for index in self.drafter.stats().indexes
            ]
        )

    def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        raise NotImplementedError

    def Draft(self, request: pb.DraftRequest, context: Any) -> pb.DraftResponse:  # noqa: N802
        raise NotImplementedError

    def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:  # noqa: N802
        raise NotImplementedError

    def ShareFindings(  # noqa: N802
        self, request: pb.ShareFindingsRequest, context: Any
    ) -> pb.ShareFindingsResponse:
        raise NotImplementedError

    def FetchFindings(  # noqa: N802
        self, request: pb.FetchFindingsRequest, context: Any
    ) -> pb.FetchFindingsResponse:
        raise NotImplementedError

    def DeleteSessionData(  # noqa: N802
        self, request: pb.DeleteSessionDataRequest, context: Any
    ) -> pb.DeleteSessionDataResponse:
        raise NotImplementedError

    def DeleteTenantData(  # noqa: N802
        self, request: pb.DeleteTenantDataRequest, context: Any
    ) -> pb.DeleteTenantDataResponse:
        raise NotImplementedError

    def lengths(self) -> list[int]:
        """Return the lengths of the open sessions' sequences."""
        slices = Administration(self.drafter.state).sessions(SessionFilter())
        return [each.num_tokens for part in slices for each in part]

    @staticmethod
    def _or_status(context: Any, answer: Callable[[], Any]) -> Any:
        try:
            return answer()
        except RetrieverError as error:
            context.abort(status_of(error), str(error))


@contextmanager
def served(servicer: pb_grpc.RetrieverServiceServicer) -> Iterator[str]:
    """Serve in this process during the block; give the address."""
    server = grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_RetrieverServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def planted_index(path: Path, tokens: list[int], vocabulary: Vocabulary) -> Path:
    """Build an index of one document."""
    build_from_tokens([(f"{path.name}.txt", tokens)], path, vocabulary)
    return path
