"""What a request states for its drafts: keys of `custom_params` in SGLang's sampling parameters.

SGLang carries scalars and lists of scalars there, so each field is a key of its own. A field that
cannot be used is ignored with a warning, with one exception: a request whose tenant, or whether it
may be remembered, is not understood gets no drafts and leaves nothing behind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from logging import getLogger
from typing import Any, Final

import numpy as np

from retriever.drafter import ALONE, GroupDrafter, Kin, Prediction
from retriever.errors import RetrieverError
from retriever.limits import check_tenant_name
from retriever.sequences import checked_kin, checked_predictions

_log = getLogger(__name__)

PREFIX: Final = "foredraft_"
"""Begins the keys of all fields."""

NAMES: Final = ("budget", "off", "tenant", "group", "predictions", "remember")
"""Fields of a request, without the prefix."""

_MOST_WARNINGS: Final = 20
"""Warnings about requests of one process: clients that are wrong are wrong in each request."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class TenantKin(Kin):
    """Which sequences a sequence is like, and whose it is.

    Attributes:
        tenant: whose generations it is drafted from and joins; empty for those of no tenant.
    """

    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RequestFields:
    """What a request states for its drafts.

    Attributes:
        budget_nodes: most nodes that are drafted for it; None for as many as the engine takes.
        is_off: whether it is neither drafted for nor remembered.
        kin: its tenant and group.
        predictions: what it is expected to contain.
        remember: whether its output joins the generations.
    """

    budget_nodes: int | None = None
    is_off: bool = False
    kin: Kin = ALONE
    predictions: tuple[Prediction, ...] = ()
    remember: bool = True

    def budget(self, most: int) -> int:
        """Return the most nodes to draft, of those that the engine takes."""
        return most if self.budget_nodes is None else min(self.budget_nodes, most)


NO_FIELDS: Final = RequestFields()
OFF: Final = RequestFields(is_off=True, remember=False)


@dataclass(slots=True)
class FieldReader:
    """Reads the fields of requests.

    Attributes:
        takes_tenants: whether the drafter keeps tenants apart; see `takes_tenants`.
        encode: of the engine's tokenizer, for predictions that are texts.
        vocabulary_size: tokens that the model knows; None to check no prediction.
        num_ignored: fields that could not be used.
    """

    takes_tenants: bool = False
    encode: Encode | None = None
    vocabulary_size: int | None = None
    num_ignored: int = field(default=0, init=False)

    def of(self, request: Any) -> RequestFields:
        """Return what a request of SGLang states; never raises."""
        stated = getattr(getattr(request, "sampling_params", None), "custom_params", None)
        if not isinstance(stated, Mapping):
            return NO_FIELDS
        ours = {
            name.removeprefix(PREFIX): value
            for name, value in stated.items()
            if isinstance(name, str) and name.startswith(PREFIX)
        }
        return self._read(ours) if ours else NO_FIELDS

    def _read(self, stated: Mapping[str, Any]) -> RequestFields:
        for name in stated.keys() - set(NAMES):
            self._ignore(name, "there is no such field")
        try:
            is_off, remember = _flag(stated, "off", False), _flag(stated, "remember", True)
            tenant = self._tenant(stated.get("tenant"))
        except (ValueError, RetrieverError) as error:
            self._ignore("off, remember or tenant", f"{error}; it gets no drafts")
            return OFF
        if is_off:
            return OFF
        return RequestFields(
            self._budget(stated.get("budget")),
            kin=self._kin(stated.get("group"), tenant),
            predictions=self._predictions(stated.get("predictions")),
            remember=remember,
        )

    def _tenant(self, tenant: Any) -> str:
        if tenant is None or tenant == "":
            return ""
        if not isinstance(tenant, str):
            raise ValueError(f"a tenant is a name, not {tenant!r}")  # noqa: TRY004  (bad input)
        check_tenant_name(tenant)
        if not self.takes_tenants:
            raise ValueError("a service tells tenants by their credentials, not by a request")
        return tenant

    def _budget(self, budget: Any) -> int | None:
        if budget is None:
            return None
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            self._ignore("budget", f"it is a number of tokens from 0 on, not {budget!r}")
            return None
        return budget

    def _kin(self, group: Any, tenant: str) -> Kin:
        name = ""
        if group is not None:
            try:
                name = checked_kin(group=group).group
            except (RetrieverError, TypeError, AttributeError) as error:
                self._ignore("group", str(error))
        if tenant:
            return TenantKin(name, tenant=tenant)
        return Kin(name) if name else ALONE

    def _predictions(self, stated: Any) -> tuple[Prediction, ...]:
        if stated is None:
            return ()
        try:
            texts = self._tokens(stated)
            expected = [Prediction(np.array(tokens, np.int32)) for tokens in texts if tokens]
            return tuple(checked_predictions(expected, self.vocabulary_size))
        except Exception as error:  # noqa: BLE001  a tokenizer raises its own errors
            self._ignore("predictions", str(error))
            return ()

    def _tokens(self, stated: Any) -> list[list[int]]:
        """Return the tokens of each text, or those that are stated of one."""
        if isinstance(stated, str):
            stated = [stated]
        if not isinstance(stated, list):
            raise ValueError("they are texts, or the token ids of one")  # noqa: TRY004  (bad input)
        if all(isinstance(each, int) and not isinstance(each, bool) for each in stated):
            return [stated]
        if self.encode is None or not all(isinstance(each, str) for each in stated):
            raise ValueError("they are texts, or the token ids of one, and texts need a tokenizer")
        return [self.encode(text) for text in stated]

    def _ignore(self, name: str, reason: str) -> None:
        self.num_ignored += 1
        if self.num_ignored <= _MOST_WARNINGS:
            _log.warning("a request's %s%s is ignored: %s", PREFIX, name, reason)


def _flag(stated: Mapping[str, Any], name: str, default: bool) -> bool:  # noqa: FBT001
    value = stated.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} is true or false, not {value!r}")  # noqa: TRY004  (bad input)
    return value


def takes_tenants(drafter: Any) -> bool:
    """Return whether a drafter's sessions may name a tenant, as those of an embedded one."""
    return isinstance(drafter, GroupDrafter) and "tenant" in signature(drafter.open).parameters
