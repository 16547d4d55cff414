"""Images of the data in a report: the marks around them, and a page without them."""

import re

from fedortho.errors import FedOrthoError

# Comments in HTML: text of a page is escaped, so no class name can imitate them.
MARKED = "<!-- images of data are marked in this page -->"
IMAGES_START, IMAGES_END = "<!-- images of data from here -->", "<!-- to here -->"
LEFT_OUT = "Images of the data are left out of this page on purpose: it has no examples and no Grad-CAM pictures."


def without_images(page: str) -> str:
    """The page without the parts that show images of the data; a sentence stands in place of each."""
    if MARKED not in page:
        raise FedOrthoError("images of data are not marked in it, as this version of fedortho report does")
    marked = re.compile(f"{re.escape(IMAGES_START)}.*?{re.escape(IMAGES_END)}", re.DOTALL)
    return marked.sub(f'<p class="soft">{LEFT_OUT}</p>', page)
