"""What Flower loads beside the SuperLink; everything it does is in fedortho.federated.server."""

from fedortho.requests.server_app import server_app

app = server_app()
