"""What the pictures of a report are made of, for tests that search for them."""

import base64
import re

from fedortho.reports.pictures import as_pictures, thumbnail
from fedortho.runs.run import Run


def embedded(page: str) -> set[bytes]:
    """The pictures of a page, as files."""
    return {base64.b64decode(found) for found in re.findall(r"data:image/png;base64,([^\"]+)", page)}


def data_pngs(run: Run) -> set[bytes]:
    """All images of the run's data, as the page would show them."""
    data = run.load_data()
    return {thumbnail(picture) for part in (data.train, data.valid, data.test) for picture in as_pictures(part)}
