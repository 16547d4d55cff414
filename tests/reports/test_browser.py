"""The report in a real browser, Debian's chromium: opens from disk, sorts, fits a phone, can be read in the dark."""

import io
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from verdicts import EVIL, RECORD

from fedortho.data.request import ForgetRequest
from fedortho.reports.gallery import audit_pictures
from fedortho.reports.page import render
from fedortho.reports.pictures import Example, Gallery
from fedortho.reports.summary import Report
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="chromium and chromedriver are not installed: apt-get install chromium chromium-driver",
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)
BOXES = "return [...document.querySelectorAll('.scroll')].map((b) => [b.scrollWidth, b.clientWidth])"
CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[0-9.]+/g).slice(0, 3)
    .map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
return [...document.querySelectorAll("p, li, td, th, h1, h2, h3, dt, dd, a, caption, figcaption, span, button")]
  .filter((e) => e.textContent.trim() && e.offsetParent !== null)
  .map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.tagName + " " + e.className];
  });
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it, and with a class that is named like a script."""
    place = tmp_path_factory.mktemp("browser")
    settings = TrainSettings(data="digits", model="small:TinyNet", epochs=1, threads=1, device="cpu")
    run = train_run(place / "run", settings)
    data = replace(run.record.data, class_names=(*run.record.data.class_names[:9], EVIL))
    run = replace(run, record=replace(run.record, data=data))
    out = io.BytesIO()
    Image.new("L", (8, 8), 200).save(out, "PNG")
    examples = tuple(Example(out.getvalue(), EVIL, EVIL, str(number)) for number in range(5))
    gallery = Gallery((), examples, examples, ("something is missing",))
    judged = replace(RECORD, subject=f"class {EVIL}")
    text = render(Report(run, ForgetRequest.parse("class:9"), judged, gallery, tuple(audit_pictures(RECORD.audits))))
    (place / "report.html").write_text(text, encoding="utf-8")
    return place / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    """The report, just opened in light colours on a wide screen."""
    show(browser, page)
    return browser


def show(browser: Any, page: Path, width: int = 1100, scheme: str = "light", *, unfold: bool = True) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())
    if unfold:
        browser.execute_script("document.querySelectorAll('details').forEach((part) => { part.open = true; })")


def column(browser: Any, table: int, place: int) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('table')[arguments[0]].tBodies[0].rows]"
        ".map((row) => row.cells[arguments[1]].textContent)",
        *(table, place),
    )
    return found


def head(browser: Any, table: int, place: int) -> Any:
    script = "return document.querySelectorAll('table')[arguments[0]].tHead.rows[0].cells[arguments[1]]"
    return browser.execute_script(script, table, place)


def place_of(browser: Any, caption: str) -> int:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('caption')].map((c) => c.textContent)"
    )
    return found.index(caption)


def test_it_opens_from_disk_without_a_complaint_and_without_the_network(opened: Any) -> None:
    assert opened.title.startswith("Class <script>"), "shown as it is"
    assert opened.get_log("browser") == []
    asked = [entry["message"] for entry in opened.get_log("performance")]
    asked = [message for message in asked if '"Network.requestWillBeSent"' in message]
    assert asked, "the page itself was asked for"
    assert all('"url":"file:' in message or '"url":"data:' in message for message in asked)


def test_every_picture_loads_and_has_a_text(opened: Any) -> None:
    pictures = opened.execute_script("return [...document.images].map((i) => [i.complete && i.naturalWidth, i.alt])")
    assert len(pictures) == 12
    assert all(width > 0 and alt for width, alt in pictures)


def test_links_go_to_parts_that_exist_and_headings_are_in_order(opened: Any) -> None:
    targets = opened.execute_script("return [...document.links].map((a) => a.getAttribute('href'))")
    assert len(targets) > 6
    for target in targets:
        assert opened.execute_script("return document.getElementById(arguments[0]) !== null", target[1:])
    opened.find_element("css selector", "nav a[href='#audits']").click()
    assert opened.current_url.endswith("#audits")
    levels = opened.execute_script("return [...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_a_table_is_sorted_by_a_click_and_back_by_another(opened: Any) -> None:
    costs = place_of(opened, "Cost of forgetting")
    assert column(opened, costs, 1)[:4] == ["2.0 s", "1,500", "0", "1.00 GFLOPs"]
    amounts = head(opened, costs, 1)
    button = amounts.find_element("css selector", "button")
    button.click()
    assert column(opened, costs, 1)[-4:] == ["2.0 s", "1,500", "1.00 GFLOPs", "1.00 GFLOPs"], "by value, not by text"
    assert amounts.get_attribute("aria-sort") == "ascending"
    button.click()
    assert column(opened, costs, 1)[:3] == ["1.00 GFLOPs", "1.00 GFLOPs", "1,500"]
    assert amounts.get_attribute("aria-sort") == "descending"


def test_a_table_is_sorted_by_the_keyboard_and_what_is_not_known_stays_last(opened: Any) -> None:
    metrics = place_of(opened, "Metrics and their ideal values")
    button = head(opened, metrics, 1).find_element("css selector", "button")
    opened.execute_script("arguments[0].focus()", button)
    button.send_keys("\ue007")  # enter
    assert column(opened, metrics, 1) == ["1.2 %", "! ERROR"]
    button.send_keys(" ")
    assert column(opened, metrics, 1) == ["1.2 %", "! ERROR"]


def test_what_is_folded_opens_from_the_contents_and_in_print(browser: Any, page: Path) -> None:
    show(browser, page, unfold=False)
    is_open = "return [...document.querySelectorAll('details')].map((d) => d.open)"
    assert browser.execute_script(is_open) == [False] * 3
    browser.find_element("css selector", "nav a[href='#costs']").click()
    assert browser.execute_script(is_open) == [False, True, False]
    browser.execute_cdp_cmd("Page.printToPDF", {})
    assert browser.execute_script(is_open) == [True] * 3


def test_an_audit_has_a_scale_inside_its_card(opened: Any) -> None:
    places = opened.execute_script(
        "return [...document.querySelectorAll('.scale')].map((s) => [s, s.querySelector('.model')]"
        ".map((e) => e.getBoundingClientRect()).map((b) => [b.left, b.right]))"
    )
    assert len(places) == 2, "the audit that was not run has none"
    for (left, right), (bar_left, bar_right) in places:
        assert left <= bar_left < bar_right <= right


def test_tables_and_figures_are_whole_on_a_wide_screen(opened: Any) -> None:
    boxes = opened.execute_script(BOXES)
    assert len(boxes) == 8
    assert all(inside <= box for inside, box in boxes)


@pytest.mark.parametrize("width", [360, 768, 1100])
def test_the_page_itself_never_scrolls_sideways(browser: Any, page: Path, width: int) -> None:
    show(browser, page, width)
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_a_figure_fits_a_phone_and_a_tap_enlarges_it(browser: Any, page: Path) -> None:
    show(browser, page, 390)
    widths = (
        "return [...document.querySelectorAll('figure img')].map((i) => [i.clientWidth, i.parentElement.clientWidth])"
    )
    assert len(browser.execute_script(widths)) == 2
    assert all(image <= box for image, box in browser.execute_script(widths))
    browser.execute_script("document.querySelector('figure img').click()")
    image, box = browser.execute_script(widths)[0]
    assert image > 1.5 * box, "its box scrolls, and not the page"
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    rows = browser.execute_script("return [...document.querySelectorAll('tbody th')].map((h) => h.clientWidth)")
    assert min(rows[:5]) >= 150, "names of metrics are not squeezed into one word a line"
    boxes = browser.execute_script(BOXES)
    assert all(inside <= box for inside, box in boxes[2:]), "tables are whole, too; the first box has a large figure"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(browser: Any, page: Path, scheme: str) -> None:
    show(browser, page, scheme=scheme)
    found = browser.execute_script(CONTRAST)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.slow
def test_it_prints(opened: Any) -> None:
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    heights = opened.execute_script("return [...document.querySelectorAll('figure img')].map((i) => i.clientHeight)")
    assert all(0 < height < 290 for height in heights), "at least three fit on a page"
    shown = opened.execute_script("return getComputedStyle(document.querySelector('th button')).display")
    assert shown == "contents", "a button is not painted in the heads that are repeated on every page"
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = opened.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 20_000
