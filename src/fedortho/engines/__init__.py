"""The engine with all images in one place, and how a holder of images answers a query."""
