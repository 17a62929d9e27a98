from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionFilter(_message.Message):
    __slots__ = ("tenant", "session_id", "min_idle_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_IDLE_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    min_idle_s: float
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., min_idle_s: _Optional[float] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: SessionFilter
    def __init__(self, filter: _Optional[_Union[SessionFilter, _Mapping]] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("tenant", "session_id", "num_tokens", "num_prompt_tokens", "num_bytes", "idle_s", "is_kept")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    IS_KEPT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_bytes: int
    idle_s: float
    is_kept: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., idle_s: _Optional[float] = ..., is_kept: bool = ...) -> None: ...

class EndSessionsRequest(_message.Message):
    __slots__ = ("filter", "forget", "all")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    filter: SessionFilter
    forget: bool
    all: bool
    def __init__(self, filter: _Optional[_Union[SessionFilter, _Mapping]] = ..., forget: bool = ..., all: bool = ...) -> None: ...

class EndSessionsResponse(_message.Message):
    __slots__ = ("num_ended", "num_kept", "num_not_on_disk")
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    NUM_NOT_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    num_ended: int
    num_kept: int
    num_not_on_disk: int
    def __init__(self, num_ended: _Optional[int] = ..., num_kept: _Optional[int] = ..., num_not_on_disk: _Optional[int] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantInfo]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantInfo, _Mapping]]] = ...) -> None: ...

class TenantInfo(_message.Message):
    __slots__ = ("tenant", "num_sessions", "session_tokens", "session_bytes", "is_in_memory", "generations_tokens", "generations_bytes", "num_own_indexes", "recycled_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_OWN_INDEXES_FIELD_NUMBER: _ClassVar[int]
    RECYCLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_sessions: int
    session_tokens: int
    session_bytes: int
    is_in_memory: bool
    generations_tokens: int
    generations_bytes: int
    num_own_indexes: int
    recycled_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., num_sessions: _Optional[int] = ..., session_tokens: _Optional[int] = ..., session_bytes: _Optional[int] = ..., is_in_memory: bool = ..., generations_tokens: _Optional[int] = ..., generations_bytes: _Optional[int] = ..., num_own_indexes: _Optional[int] = ..., recycled_bytes: _Optional[int] = ...) -> None: ...

class EvictTenantRequest(_message.Message):
    __slots__ = ("tenant", "lose")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LOSE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    lose: bool
    def __init__(self, tenant: _Optional[str] = ..., lose: bool = ...) -> None: ...

class EvictTenantResponse(_message.Message):
    __slots__ = ("was_in_memory", "num_sessions")
    WAS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    was_in_memory: bool
    num_sessions: int
    def __init__(self, was_in_memory: bool = ..., num_sessions: _Optional[int] = ...) -> None: ...

class GetUseRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class GetUseResponse(_message.Message):
    __slots__ = ("tenants", "since_s", "others")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[UseInfo]
    since_s: float
    others: UseInfo
    def __init__(self, tenants: _Optional[_Iterable[_Union[UseInfo, _Mapping]]] = ..., since_s: _Optional[float] = ..., others: _Optional[_Union[UseInfo, _Mapping]] = ...) -> None: ...

class UseInfo(_message.Message):
    __slots__ = ("tenant", "num_drafts", "num_nodes", "num_tokens", "work_s", "num_refused", "num_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_drafts: int
    num_nodes: int
    num_tokens: int
    work_s: float
    num_refused: int
    num_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., num_drafts: _Optional[int] = ..., num_nodes: _Optional[int] = ..., num_tokens: _Optional[int] = ..., work_s: _Optional[float] = ..., num_refused: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ListAttachedIndexesRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ListAttachedIndexesResponse(_message.Message):
    __slots__ = ("indexes",)
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedCompositeFieldContainer[AttachedIndex]
    def __init__(self, indexes: _Optional[_Iterable[_Union[AttachedIndex, _Mapping]]] = ...) -> None: ...

class AttachedIndex(_message.Message):
    __slots__ = ("path", "tenant", "snapshot", "published_s", "num_tokens", "num_documents", "num_bytes", "vocabulary_size", "vocabulary_fingerprint", "is_missing", "is_held")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IS_MISSING_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    path: str
    tenant: str
    snapshot: int
    published_s: float
    num_tokens: int
    num_documents: int
    num_bytes: int
    vocabulary_size: int
    vocabulary_fingerprint: str
    is_missing: bool
    is_held: bool
    def __init__(self, path: _Optional[str] = ..., tenant: _Optional[str] = ..., snapshot: _Optional[int] = ..., published_s: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_documents: _Optional[int] = ..., num_bytes: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ..., is_missing: bool = ..., is_held: bool = ...) -> None: ...

class AttachIndexRequest(_message.Message):
    __slots__ = ("path", "tenant")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    path: str
    tenant: str
    def __init__(self, path: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AttachIndexResponse(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: AttachedIndex
    def __init__(self, index: _Optional[_Union[AttachedIndex, _Mapping]] = ...) -> None: ...

class DetachIndexRequest(_message.Message):
    __slots__ = ("path", "tenant")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    path: str
    tenant: str
    def __init__(self, path: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class DetachIndexResponse(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: AttachedIndex
    def __init__(self, index: _Optional[_Union[AttachedIndex, _Mapping]] = ...) -> None: ...

class GetSettingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSettingsResponse(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    def __init__(self, settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value_json", "origin", "can_change")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    CAN_CHANGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value_json: str
    origin: str
    can_change: bool
    def __init__(self, name: _Optional[str] = ..., value_json: _Optional[str] = ..., origin: _Optional[str] = ..., can_change: bool = ...) -> None: ...

class ReloadSettingsRequest(_message.Message):
    __slots__ = ("check_only",)
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    check_only: bool
    def __init__(self, check_only: bool = ...) -> None: ...

class ReloadSettingsResponse(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[SettingChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[SettingChange, _Mapping]]] = ...) -> None: ...

class SettingChange(_message.Message):
    __slots__ = ("name", "before_json", "after_json", "origin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_JSON_FIELD_NUMBER: _ClassVar[int]
    AFTER_JSON_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    before_json: str
    after_json: str
    origin: str
    def __init__(self, name: _Optional[str] = ..., before_json: _Optional[str] = ..., after_json: _Optional[str] = ..., origin: _Optional[str] = ...) -> None: ...

class SnapshotStateRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class SnapshotStateResponse(_message.Message):
    __slots__ = ("path", "num_bytes", "seconds")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    path: str
    num_bytes: int
    seconds: float
    def __init__(self, path: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("was_draining", "num_sessions")
    WAS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    was_draining: bool
    num_sessions: int
    def __init__(self, was_draining: bool = ..., num_sessions: _Optional[int] = ...) -> None: ...
