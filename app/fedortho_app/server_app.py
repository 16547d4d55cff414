"""The app that Flower loads beside the SuperLink; its code is in fedortho.requests.server_app."""

from fedortho.requests.server_app import server_app

app = server_app()
