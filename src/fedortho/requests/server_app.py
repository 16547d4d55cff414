"""The server app by the name that the apps of deployments import."""

from fedortho.requests.federated_jobs import server_app

__all__ = ["server_app"]
