"""What a service reports about itself: version, phase, limits and vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from retriever.v1 import retriever_pb2 as pb

_PHASE: Final = "PHASE_"
_UNSPECIFIED: Final = "unspecified"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Version, phase and limits of a service; see `GetServerInfoResponse` of the wire contract.

    Attributes:
        version: version of the service; empty if unknown.
        phase: `starting`, `ready` or `draining`; empty if unknown.
        limits: limits by name of the setting: times in seconds, sizes in bytes, infinity for no
            limit.
        vocabulary_fingerprint: fingerprint of the tokenizer that the service drafts for; empty if
            not known yet.
        vocabulary_size: number of token ids; 0 if unknown.
        default_budget_nodes: tree size, in nodes, for a request without a budget.
        models: names of the models that the service drafts for, as its operator gave them.
    """

    version: str = ""
    phase: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    vocabulary_fingerprint: str = ""
    vocabulary_size: int = 0
    default_budget_nodes: int = 0
    models: tuple[str, ...] = ()

    def to_message(self) -> pb.GetServerInfoResponse:
        """Return the wire form of this information."""
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
        """Return the value of a message; an unknown phase becomes empty."""
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
