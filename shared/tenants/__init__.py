"""Division of resources among tenants.

- `fair_turns`, by `fair_queue`: slots of renderers, gateways and grammar compilers.
- `tenant_shares`: memory of a gateway for bodies.
- `storage_shares`, by `storage_quotas`: bytes of streams. Coordinators measure them, and all
  workers refuse what exceeds a share.
"""
