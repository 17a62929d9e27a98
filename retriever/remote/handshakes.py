"""Why a connection did not come about, in words that say what to do."""

from typing import Final

# What gRPC's details hold, and what that means for whoever connects; the first that fits.
_ADVICE: Final = {
    "certificate has expired": "the service's certificate has expired: have it renewed, or look at "
    "this machine's clock",
    "certificate is not yet valid": "the service's certificate is not valid yet: look at both "
    "machines' clocks",
    "CERTIFICATE_VERIFY_FAILED": "the service's certificate is not signed by an authority that is "
    "trusted here: give the right one as `ca`",
    "Hostname Verification Check failed": "the service's certificate is for another host name: "
    "connect by a name in it, or give that name as `server_name`",
    "WRONG_VERSION_NUMBER": "the service does not encrypt: connect without TLS, or start it with "
    "--certificate",
    "Socket closed": "the service closed the connection: it may want TLS (give `ca`), or a client "
    "certificate that its authority signed and that has not expired (give `certificate` and `key`)",
    "Permission denied": "this user may not open the service's socket: run as the same user",
}
_NEVER_CONNECTED: Final = "failed to connect"


def advice(details: str) -> str:
    """Return why a connection did not come about; empty where the details do not say.

    Args:
        details: of the status that gRPC gave.
    """
    if _NEVER_CONNECTED not in details:
        return ""
    return next((text for sign, text in _ADVICE.items() if sign in details), "")
