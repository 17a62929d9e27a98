from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_CONTEXT: _ClassVar[Source]
    SOURCE_GENERATIONS: _ClassVar[Source]
    SOURCE_PHRASES: _ClassVar[Source]
    SOURCE_CORPUS: _ClassVar[Source]
    SOURCE_MODEL: _ClassVar[Source]
    SOURCE_PREDICTIONS: _ClassVar[Source]
    SOURCE_SIBLINGS: _ClassVar[Source]
    SOURCE_GRAMMAR: _ClassVar[Source]

class FailOpenReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAIL_OPEN_REASON_UNSPECIFIED: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_DOWN: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_BUSY: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_TIMEOUT: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_LOST: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_LIMIT: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_VOCABULARY: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_REFUSED: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_INVALID: _ClassVar[FailOpenReason]
    FAIL_OPEN_REASON_DRAINING: _ClassVar[FailOpenReason]

class SaveStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAVE_STATUS_UNSPECIFIED: _ClassVar[SaveStatus]
    SAVE_STATUS_NOTHING: _ClassVar[SaveStatus]
    SAVE_STATUS_MEMORY: _ClassVar[SaveStatus]
    SAVE_STATUS_DISK: _ClassVar[SaveStatus]
    SAVE_STATUS_DISK_REFUSED: _ClassVar[SaveStatus]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_STARTING: _ClassVar[Phase]
    PHASE_READY: _ClassVar[Phase]
    PHASE_DRAINING: _ClassVar[Phase]
SOURCE_UNSPECIFIED: Source
SOURCE_CONTEXT: Source
SOURCE_GENERATIONS: Source
SOURCE_PHRASES: Source
SOURCE_CORPUS: Source
SOURCE_MODEL: Source
SOURCE_PREDICTIONS: Source
SOURCE_SIBLINGS: Source
SOURCE_GRAMMAR: Source
FAIL_OPEN_REASON_UNSPECIFIED: FailOpenReason
FAIL_OPEN_REASON_DOWN: FailOpenReason
FAIL_OPEN_REASON_BUSY: FailOpenReason
FAIL_OPEN_REASON_TIMEOUT: FailOpenReason
FAIL_OPEN_REASON_LOST: FailOpenReason
FAIL_OPEN_REASON_LIMIT: FailOpenReason
FAIL_OPEN_REASON_VOCABULARY: FailOpenReason
FAIL_OPEN_REASON_REFUSED: FailOpenReason
FAIL_OPEN_REASON_INVALID: FailOpenReason
FAIL_OPEN_REASON_DRAINING: FailOpenReason
SAVE_STATUS_UNSPECIFIED: SaveStatus
SAVE_STATUS_NOTHING: SaveStatus
SAVE_STATUS_MEMORY: SaveStatus
SAVE_STATUS_DISK: SaveStatus
SAVE_STATUS_DISK_REFUSED: SaveStatus
PHASE_UNSPECIFIED: Phase
PHASE_STARTING: Phase
PHASE_READY: Phase
PHASE_DRAINING: Phase

class TreeForm(_message.Message):
    __slots__ = ("packed", "ancestors")
    PACKED_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    packed: bool
    ancestors: bool
    def __init__(self, packed: bool = ..., ancestors: bool = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("token_ids", "parents", "probabilities", "sources", "packed", "ancestors")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    sources: _containers.RepeatedScalarFieldContainer[Source]
    packed: bytes
    ancestors: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ..., sources: _Optional[_Iterable[_Union[Source, str]]] = ..., packed: _Optional[bytes] = ..., ancestors: _Optional[bytes] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("context", "budget_nodes", "min_probability", "vocabulary_fingerprint", "predictions", "context_bytes", "tree_form")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_NODES_FIELD_NUMBER: _ClassVar[int]
    MIN_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TREE_FORM_FIELD_NUMBER: _ClassVar[int]
    context: _containers.RepeatedScalarFieldContainer[int]
    budget_nodes: int
    min_probability: float
    vocabulary_fingerprint: str
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    context_bytes: bytes
    tree_form: TreeForm
    def __init__(self, context: _Optional[_Iterable[int]] = ..., budget_nodes: _Optional[int] = ..., min_probability: _Optional[float] = ..., vocabulary_fingerprint: _Optional[str] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., context_bytes: _Optional[bytes] = ..., tree_form: _Optional[_Union[TreeForm, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("tree", "padding")
    TREE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    tree: DraftTree
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tree: _Optional[_Union[DraftTree, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("context", "budget_nodes", "min_probability", "vocabulary_fingerprint", "max_documents", "predictions", "context_bytes")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_NODES_FIELD_NUMBER: _ClassVar[int]
    MIN_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    context: _containers.RepeatedScalarFieldContainer[int]
    budget_nodes: int
    min_probability: float
    vocabulary_fingerprint: str
    max_documents: int
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    context_bytes: bytes
    def __init__(self, context: _Optional[_Iterable[int]] = ..., budget_nodes: _Optional[int] = ..., min_probability: _Optional[float] = ..., vocabulary_fingerprint: _Optional[str] = ..., max_documents: _Optional[int] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., context_bytes: _Optional[bytes] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("tree", "nodes")
    TREE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    tree: DraftTree
    nodes: _containers.RepeatedCompositeFieldContainer[NodeProvenance]
    def __init__(self, tree: _Optional[_Union[DraftTree, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeProvenance, _Mapping]]] = ...) -> None: ...

class NodeProvenance(_message.Message):
    __slots__ = ("match_length", "count", "context_positions", "documents", "predictions")
    MATCH_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    match_length: int
    count: int
    context_positions: _containers.RepeatedScalarFieldContainer[int]
    documents: _containers.RepeatedCompositeFieldContainer[DocumentOccurrence]
    predictions: _containers.RepeatedCompositeFieldContainer[PredictedPlace]
    def __init__(self, match_length: _Optional[int] = ..., count: _Optional[int] = ..., context_positions: _Optional[_Iterable[int]] = ..., documents: _Optional[_Iterable[_Union[DocumentOccurrence, _Mapping]]] = ..., predictions: _Optional[_Iterable[_Union[PredictedPlace, _Mapping]]] = ...) -> None: ...

class PredictedPlace(_message.Message):
    __slots__ = ("label", "position")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    label: str
    position: int
    def __init__(self, label: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class DocumentOccurrence(_message.Message):
    __slots__ = ("index", "name", "licence", "position")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LICENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    index: str
    name: str
    licence: str
    position: int
    def __init__(self, index: _Optional[str] = ..., name: _Optional[str] = ..., licence: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "forget", "vocabulary_fingerprint", "predictions", "group", "policy_version", "oldest_version", "prompt_bytes", "constraint")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    forget: bool
    vocabulary_fingerprint: str
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    group: str
    policy_version: int
    oldest_version: int
    prompt_bytes: bytes
    constraint: Constraint
    def __init__(self, session_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., forget: bool = ..., vocabulary_fingerprint: _Optional[str] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., group: _Optional[str] = ..., policy_version: _Optional[int] = ..., oldest_version: _Optional[int] = ..., prompt_bytes: _Optional[bytes] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("token_ids", "label", "token_bytes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    label: str
    token_bytes: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., label: _Optional[str] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regular_expression", "choices")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGULAR_EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regular_expression: str
    choices: Choices
    def __init__(self, json_schema: _Optional[str] = ..., regular_expression: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddPredictionsRequest(_message.Message):
    __slots__ = ("session_id", "predictions")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    def __init__(self, session_id: _Optional[str] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ...) -> None: ...

class AddPredictionsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("step", "tree_form")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TREE_FORM_FIELD_NUMBER: _ClassVar[int]
    step: SessionStep
    tree_form: TreeForm
    def __init__(self, step: _Optional[_Union[SessionStep, _Mapping]] = ..., tree_form: _Optional[_Union[TreeForm, _Mapping]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("tree", "outcome_trees", "is_draining", "padding")
    TREE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_TREES_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    tree: DraftTree
    outcome_trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    is_draining: bool
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tree: _Optional[_Union[DraftTree, _Mapping]] = ..., outcome_trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ..., is_draining: bool = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DraftStreamRequest(_message.Message):
    __slots__ = ("steps", "sequence_number", "openings", "closings", "timeout_us", "fail_opens", "padding", "predictions", "tree_form")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    CLOSINGS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    FAIL_OPENS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    TREE_FORM_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[SessionStep]
    sequence_number: int
    openings: _containers.RepeatedCompositeFieldContainer[OpenSessionRequest]
    closings: _containers.RepeatedCompositeFieldContainer[CloseSessionRequest]
    timeout_us: int
    fail_opens: _containers.RepeatedCompositeFieldContainer[FailOpenCount]
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    predictions: _containers.RepeatedCompositeFieldContainer[AddPredictionsRequest]
    tree_form: TreeForm
    def __init__(self, steps: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ..., sequence_number: _Optional[int] = ..., openings: _Optional[_Iterable[_Union[OpenSessionRequest, _Mapping]]] = ..., closings: _Optional[_Iterable[_Union[CloseSessionRequest, _Mapping]]] = ..., timeout_us: _Optional[int] = ..., fail_opens: _Optional[_Iterable[_Union[FailOpenCount, _Mapping]]] = ..., padding: _Optional[_Iterable[bytes]] = ..., predictions: _Optional[_Iterable[_Union[AddPredictionsRequest, _Mapping]]] = ..., tree_form: _Optional[_Union[TreeForm, _Mapping]] = ...) -> None: ...

class FailOpenCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: FailOpenReason
    count: int
    def __init__(self, reason: _Optional[_Union[FailOpenReason, str]] = ..., count: _Optional[int] = ...) -> None: ...

class SessionStep(_message.Message):
    __slots__ = ("session_id", "new_token_ids", "length", "budget_nodes", "min_probability", "outcomes", "new_token_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_NODES_FIELD_NUMBER: _ClassVar[int]
    MIN_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    length: int
    budget_nodes: int
    min_probability: float
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    new_token_bytes: bytes
    def __init__(self, session_id: _Optional[str] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ..., budget_nodes: _Optional[int] = ..., min_probability: _Optional[float] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., new_token_bytes: _Optional[bytes] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("token_ids", "token_bytes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_bytes: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class DraftStreamResponse(_message.Message):
    __slots__ = ("trees", "sequence_number", "statuses", "padding", "is_draining", "num_not_kept", "outcome_trees")
    TREES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_NOT_KEPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_TREES_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    sequence_number: int
    statuses: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    is_draining: bool
    num_not_kept: int
    outcome_trees: _containers.RepeatedCompositeFieldContainer[OutcomeTrees]
    def __init__(self, trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ..., sequence_number: _Optional[int] = ..., statuses: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., padding: _Optional[_Iterable[bytes]] = ..., is_draining: bool = ..., num_not_kept: _Optional[int] = ..., outcome_trees: _Optional[_Iterable[_Union[OutcomeTrees, _Mapping]]] = ...) -> None: ...

class OutcomeTrees(_message.Message):
    __slots__ = ("trees",)
    TREES_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    def __init__(self, trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "code", "message", "details")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    code: int
    message: str
    details: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    def __init__(self, session_id: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "new_token_ids", "forget", "length", "new_token_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    forget: bool
    length: int
    new_token_bytes: bytes
    def __init__(self, session_id: _Optional[str] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., forget: bool = ..., length: _Optional[int] = ..., new_token_bytes: _Optional[bytes] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("save_status",)
    SAVE_STATUS_FIELD_NUMBER: _ClassVar[int]
    save_status: SaveStatus
    def __init__(self, save_status: _Optional[_Union[SaveStatus, str]] = ...) -> None: ...

class Findings(_message.Message):
    __slots__ = ("contexts", "token_ids", "log_odds")
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_ODDS_FIELD_NUMBER: _ClassVar[int]
    contexts: bytes
    token_ids: bytes
    log_odds: bytes
    def __init__(self, contexts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., log_odds: _Optional[bytes] = ...) -> None: ...

class ShareFindingsRequest(_message.Message):
    __slots__ = ("model_fingerprint", "findings", "vocabulary_fingerprint")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    findings: Findings
    vocabulary_fingerprint: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., findings: _Optional[_Union[Findings, _Mapping]] = ..., vocabulary_fingerprint: _Optional[str] = ...) -> None: ...

class ShareFindingsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchFindingsRequest(_message.Message):
    __slots__ = ("model_fingerprint", "before", "vocabulary_fingerprint")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    before: int
    vocabulary_fingerprint: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., before: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ...) -> None: ...

class FetchFindingsResponse(_message.Message):
    __slots__ = ("findings", "before")
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    findings: Findings
    before: int
    def __init__(self, findings: _Optional[_Union[Findings, _Mapping]] = ..., before: _Optional[int] = ...) -> None: ...

class DeleteSessionDataRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionDataResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteTenantDataRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteTenantDataResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListIndexesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListIndexesResponse(_message.Message):
    __slots__ = ("indexes",)
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedCompositeFieldContainer[IndexInfo]
    def __init__(self, indexes: _Optional[_Iterable[_Union[IndexInfo, _Mapping]]] = ...) -> None: ...

class IndexInfo(_message.Message):
    __slots__ = ("name", "num_tokens", "num_documents", "vocabulary_size", "vocabulary_fingerprint", "snapshot")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tokens: int
    num_documents: int
    vocabulary_size: int
    vocabulary_fingerprint: str
    snapshot: int
    def __init__(self, name: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_documents: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ..., snapshot: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "phase", "limits", "vocabulary_fingerprint", "vocabulary_size", "default_budget_nodes", "models")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BUDGET_NODES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    version: str
    phase: Phase
    limits: _containers.ScalarMap[str, float]
    vocabulary_fingerprint: str
    vocabulary_size: int
    default_budget_nodes: int
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., limits: _Optional[_Mapping[str, float]] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., default_budget_nodes: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...
