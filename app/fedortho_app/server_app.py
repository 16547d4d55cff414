"""The app that Flower loads beside the SuperLink; its code is in fedortho.requests.federated_jobs."""

from fedortho.requests.federated_jobs import server_app

app = server_app()
