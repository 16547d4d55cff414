"""What Flower loads on a client; everything it does is in fedortho.federated.client."""

from fedortho.federated.client import client_app

app = client_app()
