"""The look of every figure: colours for colour-blind readers, a title that states the finding, PNG bytes."""

import io
import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from fedortho.errors import FedOrthoError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which survives the common kinds of colour blindness; yellow is left out: too pale in print
SERIES = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#222222")
BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK = SERIES
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with the colours, so that a grey print can be read too
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (6, 3)))
BEFORE, AFTER, REFERENCE = BLUE, RED, GREEN  # the same thing has the same colour in every figure
HATCH = "////"  # of what comes after
ROLES = {
    "original": (BEFORE, "o", "-"),
    "unlearned": (AFTER, "s", "--"),
    "erased": (PURPLE, "D", ":"),
    "reference": (REFERENCE, "^", "-."),
}
ROLE_NAMES = {
    "original": "before",
    "unlearned": "after forgetting",
    "erased": "after directions",
    "reference": "retrained without it",
}
WIDTHS = {"reference": 5.0, "original": 2.6, "erased": 1.6, "unlearned": 1.3}  # of lines, widest first: none is hidden
HATCHES = {"original": None, "unlearned": HATCH, "erased": "xx", "reference": ".."}  # of bars
LETTERS_PER_INCH = 11.0  # of a title
LONGEST_NAME = 24  # letters of a class on an axis
BOXES = "Last Resort"  # a font that has a box for every sign


class NoLibrary(FedOrthoError):
    """A library that only figures need is not installed."""


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, share_y: bool = False
) -> "tuple[Figure, list[list[Axes]]]":
    """A figure of inches with a grid of axes; no window is opened and no global state is touched."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoLibrary("figures need matplotlib; install it: pip install 'fedortho[figures]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    for ax in grid.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        ax.set_axisbelow(True)
    return figure, [list(row) for row in grid]


def entitle(figure: "Figure", finding: str) -> None:
    """State the finding above the figure, wrapped to its width."""
    title = _wrapped(figure, finding[:1].upper() + finding[1:])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")


def caption(figure: "Figure", about: str) -> None:
    """State below the figure what it was measured on."""
    figure.supxlabel(_wrapped(figure, about, 1.5), x=0.01, ha="left", fontsize=7, color="#444444")


def caption_of(figure: "Figure") -> str:
    """What a figure was measured on, in one line."""
    return " ".join(figure.get_supxlabel().split())


def _wrapped(figure: "Figure", title: str, density: float = 1.0) -> str:
    """Lines as wide as the figure, names with hyphens in one piece; smaller letters have a higher density."""
    width = int(figure.get_figwidth() * LETTERS_PER_INCH * density)
    return "\n".join(textwrap.wrap(title, width, break_on_hyphens=False))


def finding_of(figure: "Figure") -> str:
    """The title of a figure in one line, for a caption or a text that stands for it."""
    return " ".join(figure.get_suptitle().split())


def png(figure: "Figure", dpi: int = 110) -> bytes:
    """The figure as a PNG of at most 256 colours; the same figure gives the same bytes."""
    from matplotlib.text import Text
    from PIL import Image

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)  # dollars in a name are dollars
        if not text.get_text().isascii():
            written, fonts = legible(text.get_text())
            written = _wrapped(figure, written) if text.get_text() == figure.get_suptitle() else written
            text.set(text=written, fontfamily=[*text.get_fontfamily(), *fonts])
    drawn, out = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="rgba", dpi=dpi)
    size = (int(figure.get_figwidth() * dpi), int(figure.get_figheight() * dpi))
    whole = Image.frombytes("RGBA", size, drawn.getvalue()).convert("RGB")
    whole.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


@cache
def _signs(font: str) -> frozenset[str]:
    """The signs that a font file has."""
    from matplotlib.font_manager import get_font

    return frozenset(map(chr, get_font(font).get_charmap()))


def legible(text: str) -> tuple[str, list[str]]:
    """A text that can be drawn (`<U+732B>` for a sign that no font has), and fonts for what the usual one lacks."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    weights = ("normal", "bold")
    known = frozenset.intersection(*(_signs(findfont(FontProperties(weight=weight))) for weight in weights)) | {"\n"}
    fonts: list[str] = []
    if not known.issuperset(text):
        for font in fontManager.ttflist:
            if font.weight == 400 and BOXES not in font.name and not (set(text) - known).isdisjoint(_signs(font.fname)):
                fonts.append(font.name)
                known |= _signs(font.fname)
    runs = [(is_known, list(run)) for is_known, run in groupby(text, known.__contains__)]
    codes = [run if is_known else ["<", " ".join(f"U+{ord(sign):04X}" for sign in run), ">"] for is_known, run in runs]
    return "".join(chain.from_iterable(codes)), fonts


def axis_names(names: Sequence[str]) -> list[str]:
    """Names of classes as they stand on an axis; long, empty and repeated ones with their number.

    >>> axis_names(["cat", "crane", "crane", ""])
    ['cat', 'crane (1)', 'crane (2)', '(3)']
    """
    drawn = [legible(name)[0].strip() for name in names]
    short = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in drawn]
    is_clear = [name in drawn and name != "" and drawn.count(name) == 1 for name in short]
    return [name if is_clear[label] else f"{name} ({label})".strip() for label, name in enumerate(short)]


def percent(share: float) -> str:
    """A share for people, as every page and table writes it.

    >>> percent(0.512), percent(0.0), percent(0.0004)
    ('51.2 %', '0.0 %', 'below 0.1 %')
    """
    return "below 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def line_look(role: str) -> dict[str, Any]:
    """Colour, dashes and width of a role's line; wide ones lie below, so that lines on each other are told apart."""
    (colour, _, dash), wide = ROLES[role], WIDTHS[role]
    look: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": wide, "label": ROLE_NAMES[role]}
    return look | {"alpha": 0.55 if wide > 3 else 1.0, "zorder": 10 - wide}


def grid_lines(ax: "Axes", axis: str = "y") -> None:
    ax.grid(axis=axis, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]  # x, y or both


def grouped_bars(
    ax: "Axes", series: Sequence[tuple[str, Sequence[float], str, str | None]], groups: Sequence[str], **ticks: Any
) -> list[list[float]]:
    """Bars side by side for each group, a series (name, heights, colour, hatch) in each; where they stand."""
    wide, places = 0.8 / max(len(series), 1), []
    for number, (name, heights, colour, hatch) in enumerate(series):
        places.append([group + (number - (len(series) - 1) / 2) * wide for group in range(len(groups))])
        face = colour if hatch is None else "white"
        ax.bar(places[-1], heights, wide, facecolor=face, edgecolor=colour, hatch=hatch, label=name)
    ax.set_xticks(range(len(groups)), groups, **ticks)
    ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=max(len(series), 1))
    return places


def name_axes(ax: "Axes", across: str, up: str, *, grid: str = "y") -> None:
    ax.set_xlabel(across, fontsize=9)
    ax.set_ylabel(up, fontsize=9)
    grid_lines(ax, grid)


def percent_axis(ax: "Axes", axis: str = "y") -> None:
    """Shares, 0 to 1, written as percentages."""
    shown = (ax.yaxis if axis == "y" else ax.xaxis).set_major_formatter
    shown(lambda share, _: f"{round(100 * share, 2):g} %")  # with the digits that keep close ticks apart
