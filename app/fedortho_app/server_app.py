"""What Flower loads beside the SuperLink; everything it does is in fedortho.federated.server."""

from fedortho.federated.server import server_app

app = server_app()
