"""What a service says of itself: its version, phase, limits and vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from retriever.v1 import retriever_pb2 as pb

_PHASE: Final = "PHASE_"
_UNSPECIFIED: Final = "unspecified"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a service is; see `GetServerInfoResponse` of the wire contract.

    Attributes:
        version: of the service; empty if unknown.
        phase: `starting`, `ready` or `draining`; empty if unknown.
        limits: by the name of the setting: times in seconds, sizes in bytes, infinity for none.
        vocabulary_fingerprint: of the tokenizer that it drafts for; empty if not known yet.
        vocabulary_size: in token ids; 0 if unknown.
        default_budget_nodes: nodes in the tree of a request without a budget.
        models: names of the models that it drafts for, as its operator gave them.
    """

    version: str = ""
    phase: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    vocabulary_fingerprint: str = ""
    vocabulary_size: int = 0
    default_budget_nodes: int = 0
    models: tuple[str, ...] = ()

    def to_message(self) -> pb.GetServerInfoResponse:
        """Return the wire form."""
        return pb.GetServerInfoResponse(
            version=self.version,
            phase=f"{_PHASE}{(self.phase or _UNSPECIFIED).upper()}",
            limits=dict(self.limits),
            vocabulary_fingerprint=self.vocabulary_fingerprint,
            vocabulary_size=self.vocabulary_size,
            default_budget_nodes=self.default_budget_nodes,
            models=self.models,
        )

    @classmethod
    def from_message(cls, message: pb.GetServerInfoResponse) -> "ServerInfo":
        """Return the value of a message; an unknown phase is empty."""
        known = message.phase in pb.Phase.values()
        phase = pb.Phase.Name(message.phase).removeprefix(_PHASE).lower() if known else ""
        return cls(
            message.version,
            "" if phase == _UNSPECIFIED else phase,
            dict(message.limits),
            message.vocabulary_fingerprint,
            message.vocabulary_size,
            message.default_budget_nodes,
            tuple(message.models),
        )
