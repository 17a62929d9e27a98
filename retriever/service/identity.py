"""For whom a call is made."""

from typing import Any


def tenant_of(context: Any) -> str:
    """Return the tenant that a call acts for; "" where callers are not asked who they are.

    To be asked again with every message of a stream: credentials that were withdrawn meanwhile
    let nobody go on.

    Args:
        context: the call's, as the servicer got it.

    Raises:
        AccessRefusedError: the caller's credentials were withdrawn or have expired.
    """
    caller = getattr(context, "caller", None)
    return "" if caller is None else str(caller.tenant)
