"""What Flower loads beside the SuperLink; everything it does is in fedortho.requests.server_app."""

from fedortho.requests.server_app import server_app

app = server_app()
