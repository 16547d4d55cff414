"""The app that Flower loads on a client; its code is in fedortho.federated.client."""

from fedortho.federated.client import client_app

app = client_app()
