"""The HTML page of a request, its figures, and tables of runs."""
