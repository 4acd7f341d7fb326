"""The API of gateways as a run uses it: the endpoint, keys of tenants, and the pause of clients."""

PATH = "/v1/chat/completions"
# The pause of a client before a new attempt after an error.
RETRY_PAUSE_S = 0.3


def api_key(tenant: str) -> str:
    """Return the gateway's key of a tenant's clients."""
    return f"pm-chaos-{tenant}"


def authorization(tenant: str) -> dict[str, str]:
    """Return the header that identifies a tenant; none without a tenant."""
    return {"authorization": f"Bearer {api_key(tenant)}"} if tenant else {}
