r"""Drafts over gRPC with the contract alone: protoc generates stubs, and foredraft is not needed.

    pip install grpcio grpcio-tools
    python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. \
        retriever/v1/retriever.proto
    python draft_client.py 127.0.0.1:50051 [TOKEN]

Reads a line of token ids for each step of one sequence, the prompt first, and prints each draft.
"""

import json
import sys

import grpc

from retriever.v1 import retriever_pb2 as pb, retriever_pb2_grpc as calls

PATIENCE_S = 0.05  # about one pass of the model; without a draft by then, decode without one


class Sequence:
    """A sequence for which the service drafts."""

    def __init__(self, channel: grpc.Channel, name: str, prompt: list[int], token: str) -> None:
        self.stub = calls.RetrieverServiceStub(channel)
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.name, self.length = name, len(prompt)
        opening = pb.OpenSessionRequest(session_id=name, prompt=prompt)
        self.stub.OpenSession(opening, metadata=self.metadata, timeout=10)

    def step(self, tokens: list[int], nodes: int = 8) -> tuple[list[int], list[int]]:
        """Commit tokens; return the draft's tokens and parents, both empty if it takes too long."""
        self.length += len(tokens)
        step = pb.SessionStep(
            session_id=self.name, new_token_ids=tokens, length=self.length, budget_nodes=nodes
        )
        request = pb.StepRequest(step=step)
        try:
            tree = self.stub.Step(request, metadata=self.metadata, timeout=PATIENCE_S).tree
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return [], []
        return list(tree.token_ids), list(tree.parents)

    def close(self) -> str:
        """End the sequence. Its output is saved for later drafts. Return the save status."""
        closing = pb.CloseSessionRequest(session_id=self.name, length=self.length)
        ended = self.stub.CloseSession(closing, metadata=self.metadata, timeout=10)
        return pb.SaveStatus.Name(ended.save_status)


if __name__ == "__main__":
    steps = [[int(token) for token in line.split()] for line in sys.stdin]
    with grpc.insecure_channel(sys.argv[1]) as opened:
        sequence = Sequence(opened, f"example-{id(opened)}", steps[0], "".join(sys.argv[2:3]))
        for new in steps[1:]:
            print(json.dumps(sequence.step(new)), flush=True)
        print(json.dumps(sequence.close()))
