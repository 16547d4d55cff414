"""The report of a run that has forgotten: whole without a network, safe with any name, honest about what is missing."""

import base64
import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from once import run_once
from pages import data_pngs, embedded
from PIL import Image
from verdicts import EVIL, RECORD, VERDICT

from fedortho.audits.result import AuditResult, Outcome
from fedortho.data.request import ForgetRequest
from fedortho.engines.cost import Cost
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.evaluation.metrics import Metric
from fedortho.methods.hide import Hide
from fedortho.reports.gallery import draw_gallery
from fedortho.reports.page import LEFT_OUT, SECTIONS, original_for, render, verdict_of, without_images, write_report
from fedortho.reports.pictures import Example, Gallery, Picture, as_pictures, thumbnail
from fedortho.reports.summary import Report
from fedortho.reports.tables import plain
from fedortho.requests.forgetting import serve_request
from fedortho.requests.references import find_original, find_references, original_of, reference_settings
from fedortho.runs.record import Accuracies, TrialRecord
from fedortho.runs.run import Run, last_request
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import read_json, write_json
from fedortho.storage.journal import append_entry, read_journal


class Elements(HTMLParser):
    """All elements of a page, in order, and which are left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((name, {key: value or "" for key, value in attributes}))
        if name not in ("img", "meta", "link", "br"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def all(self, name: str) -> Iterator[dict[str, str]]:
        return (attributes for found, attributes in self.found if found == name)


@pytest.fixture(scope="module")
def forgot(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has forgotten a class, with the one it was made from and a retrained one beside it."""
    place = tmp_path_factory.mktemp("report")
    settings = TrainSettings(data="digits", model="small:QuickNet", epochs=3, crop=0, flip=0.0, threads=1, device="cpu")
    run = run_once(tmp_path_factory, place / "original", settings)
    request = ForgetRequest.parse("class:3")
    train_run(place / "retrained", replace(reference_settings(run, request), epochs=3))
    served = serve_request(run, run.load_data(), request, Hide(max_retain_drop=0.2, target=0.2), out=place / "forgot")
    assert served.run is not None
    return served.run


@pytest.fixture
def fresh(forgot: Run) -> Iterator[Run]:
    yield forgot
    (forgot.path / "verdict.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def text(forgot: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of that run, with a verdict."""
    place = tmp_path_factory.mktemp("page") / "report.html"
    write_json(forgot.path / "verdict.json", VERDICT)
    write_report(forgot.path, out=place)
    (forgot.path / "verdict.json").unlink()
    return place.read_text(encoding="utf-8")


def serving(run: Run, **other: Any) -> Run:
    """The run as if it had served another request too, which differs in this from its last one."""
    own = run.record.requests
    return replace(run, record=replace(run.record, requests=(*own, replace(own[-1], **other))))


def small_png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    return out.getvalue()


def test_the_report_of_a_real_run_is_one_small_page_with_all_its_parts(text: str) -> None:
    assert 50_000 < len(text.encode()) < 5_000_000
    page = Elements(text)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"verdict", *SECTIONS} <= set(ids)
    figures = {f"figure-{name}" for name in ("classes", "confusion", "confidence", "grad-cam", "training", "probe")}
    assert figures | {"figure-relearning"} <= set(ids)
    for link in page.all("a"):
        assert link["href"].removeprefix("#") in ids
    for picture in page.all("img"):
        assert picture["src"].startswith("data:image/png;base64,")
        assert picture["alt"]
    order = [
        VERDICT["answer"],
        plain(VERDICT["sentence"]),
        "Forget accuracy",
        'id="figures"',
        'id="audits"',
        "<details>",
    ]
    assert sorted(order, key=text.index) == order, "the answer comes first, all metrics are folded"
    assert "digits, small:QuickNet, seed 0.</figcaption>" in text
    assert not re.search("--[a-z]", text[text.index("<main") : text.index("<details>")].replace("<!--", ""))
    assert "retrained without it" in text, "the retrained run beside it was found"


def test_nothing_is_fetched_and_only_our_own_script_may_run(forgot: Run) -> None:
    text = render(Report(forgot, ForgetRequest.parse("class:3"), RECORD))
    page = Elements(text)
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert not re.search(r"url\(|@import|https?:", text)
    assert not any("style" in attributes for _, attributes in page.found), "the policy would refuse it"
    for tag in ("style", "script"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_a_class_named_like_a_script_is_shown_and_not_run(forgot: Run) -> None:
    record = replace(forgot.record, data=replace(forgot.record.data, class_names=(EVIL,) * 10))
    run = replace(forgot, record=record)
    gallery = Gallery(
        (Picture("classes", EVIL, EVIL, small_png()),),
        (Example(small_png(), EVIL, EVIL, "other"),),
        (Example(small_png(), EVIL, None, EVIL),),
        (EVIL,),
    )
    outcomes: tuple[Outcome, ...] = ("FAIL", "NOT RUN", "ERROR")
    named = replace(
        RECORD,
        subject=EVIL,
        method=EVIL,
        metrics=(Metric("forget-accuracy", None, error=EVIL),),
        audits=tuple(AuditResult(outcome, EVIL, name=EVIL, title=EVIL) for outcome in outcomes),
        settings={EVIL: EVIL},
    )
    text = render(Report(run, ForgetRequest.parse("class:3"), named, gallery))
    assert text.count("alert") > 20
    assert EVIL not in text
    assert text.count("<script") == 1


def test_without_a_verdict_the_report_says_what_is_missing(fresh: Run) -> None:
    assert verdict_of(fresh) is None
    text = render(Report(fresh, last_request(fresh), None))
    assert "No audit was run" in text
    assert "was not audited</h1>" in text
    assert "there is no verdict.json in the run" in text
    served = fresh.record.requests[-1]
    assert plain(f"went from {served.before.forget:.1%} to {served.after.forget:.1%}") in text
    assert "There are no figures" in text


def test_the_verdict_is_coloured_by_its_worst_audit(forgot: Run) -> None:
    def kind(*outcomes: Outcome) -> str:
        verdict = replace(RECORD, audits=tuple(AuditResult(outcome, "", name="a") for outcome in outcomes))
        page = Elements(render(Report(forgot, ForgetRequest.parse("class:3"), verdict)))
        return next(header["class"] for header in page.all("header") if header.get("id") == "verdict")

    assert kind("PASS", "PASS") == "verdict good"
    assert kind("PASS", "NOT RUN") == "verdict open"
    assert kind() == "verdict open"
    assert kind("PASS", "NOT RUN", "FAIL") == "verdict bad"
    assert kind("ERROR") == "verdict bad"
    ruined = AuditResult("FAIL", "60 points lost", 0.6, 0.05, name="retention")
    passed = replace(RECORD, audits=(AuditResult("PASS", "", name="a"),), retention=ruined)
    text = render(Report(forgot, ForgetRequest.parse("class:3"), passed))
    assert '"verdict bad"' in text, "a model that lost what it had to keep is no success"
    assert "60 points lost" in text


def test_the_cost_of_another_method_is_the_one_it_recorded(forgot: Run) -> None:
    served = forgot.record.requests[-1]
    for cost, shown in ((Cost(12.5, 0, 0, 0.0, 0, 0, 0), ">12.5 s<"), (None, "was not recorded")):
        run = replace(forgot, record=replace(forgot.record, requests=(replace(served, cost=cost),)))
        assert shown in render(Report(run, ForgetRequest.parse("class:3"), None))


def test_audits_are_shown_with_their_titles(forgot: Run) -> None:
    audit = replace(RECORD.audits[0], title="linear probe", finding="recalls 80 % of it (--audit full)")
    text = render(Report(forgot, ForgetRequest.parse("class:3"), replace(RECORD, audits=(audit,))))
    assert "✗ FAIL</span> probe linear probe</h3>" in text
    assert "Recalls 80\N{NO-BREAK SPACE}% of it.</p>" in text, "flags are left to the folded part"


def test_a_verdict_on_another_model_is_refused(fresh: Run) -> None:
    write_json(fresh.path / "verdict.json", VERDICT | {"digests": {"after": "0" * 64}})
    with pytest.raises(BadCheckpoint, match="is about another model"):
        verdict_of(fresh)


def test_an_error_is_shown_and_never_dropped(forgot: Run) -> None:
    text = render(Report(forgot, ForgetRequest.parse("class:3"), RECORD))
    assert "(the paper&#39;s MIA): too few images" in text
    assert "! ERROR" in text
    failed = replace(RECORD, audits=(AuditResult("ERROR", "out of memory", name="C3"),))
    assert "C3 has no result: out of memory" in render(Report(forgot, ForgetRequest.parse("class:3"), failed))


def test_what_cannot_be_reported_is_refused_in_one_line(fresh: Run, tmp_path: Path) -> None:
    original = find_original(fresh)
    assert original is not None
    with pytest.raises(FedOrthoError, match="has forgotten nothing; first: fedortho forget"):
        write_report(original.path)
    with pytest.raises(FedOrthoError, match="is a directory; give the file"):
        write_report(fresh.path, out=tmp_path)
    write_json(fresh.path / "verdict.json", {"schema": 7})
    with pytest.raises(BadCheckpoint, match="schema 7"):
        write_report(fresh.path)


def test_the_runs_to_compare_with_are_found_beside_or_named(forgot: Run, tmp_path: Path) -> None:
    original = find_original(forgot)
    assert original is not None
    assert original.path.name == "original"
    request = ForgetRequest.parse("class:3")
    retrained = next(iter(find_references(original, request)), None)
    assert retrained is not None
    assert retrained.path.name == "retrained"
    assert not find_references(original, ForgetRequest.parse("class:4"))
    since = serving(forgot, request="class:5")
    assert original_for(since, request) is not None
    parent = forgot.record.model.digest  # as if class 5 had been forgotten after class 3
    later = replace(since, record=replace(since.record, parent=parent))
    for asked, name in ((request, "original"), (ForgetRequest.parse("class:5"), "forgot")):
        before = original_for(later, asked)
        assert before is not None
        assert before.path.name == name, "the run that still knew what this request names"
    with pytest.raises(FedOrthoError, match="was trained with class:3"):
        write_report(forgot.path, reference=original.path, out=tmp_path / "r.html")


def test_figures_show_the_reference_of_the_verdict_and_never_the_model_itself(
    fresh: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(verdict: dict[str, Any]) -> str | None:
        write_json(fresh.path / "verdict.json", VERDICT | {"digests": verdict})
        write_report(fresh.path, out=tmp_path / "r.html")
        return None if shown[-1] is None else shown[-1].record.model.digest

    def draw(*_: Any, reference: Run | None, **__: Any) -> Gallery:
        shown.append(reference)
        return Gallery()

    shown: list[Run | None] = []
    monkeypatch.setattr(f"{write_report.__module__}.draw_gallery", draw)
    same, (retrained,) = fresh.record.model.digest, find_references(original_of(fresh), last_request(fresh))
    digests = [same, "5" * 64, "6" * 64]  # one was retrained with the seed of the judged model
    models = [replace(retrained.record.model, digest=digest) for digest in digests]
    others = [replace(retrained, record=replace(retrained.record, model=model)) for model in models]
    monkeypatch.setattr(f"{write_report.__module__}.find_references", lambda *_: others)
    assert drawn({"after": same, "reference": "6" * 64}) == "6" * 64
    assert drawn({"after": same}) == "5" * 64
    assert drawn({"after": same, "reference": "7" * 64}) is None, "numbers of one model beside figures of another"
    with pytest.raises(FedOrthoError, match=r"is not the reference model of .*judge .* --reference .*, or leave"):
        write_report(fresh.path, reference=retrained, out=tmp_path / "r.html")
    write_json(fresh.path / "verdict.json", VERDICT | {"digests": {"after": same, "before": "7" * 64}})
    with pytest.raises(FedOrthoError, match=r"is not the original model of .*judge .* --original .*, or leave"):
        write_report(fresh.path, original=original_of(fresh), out=tmp_path / "r.html")
    (fresh.path / "verdict.json").unlink()
    write_report(fresh.path, reference=retrained, original=original_of(fresh), out=tmp_path / "r.html")
    assert shown[-1] is retrained, "no verdict tells of another"


def test_without_its_parent_a_run_is_reported_alone(forgot: Run, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("run.json", "split.json", "history.json", "model.safetensors"):
        (alone / name).write_bytes((forgot.path / name).read_bytes())
    write_report(alone, out=tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "The original model was not found" in text
    assert "figure-training" in text
    assert "figure-classes" not in text


def test_examples_show_what_was_lost_and_what_was_kept(text: str) -> None:
    page = Elements(text)
    alts = [picture["alt"] for picture in page.all("img") if "now called" in picture["alt"]]
    lost = [alt for alt in alts if alt.startswith("3, ")]
    kept = [alt for alt in alts if not alt.startswith("3, ")]
    assert lost
    assert all("now called 3 " not in alt and alt.endswith("(before: 3)") for alt in lost)
    assert len(kept) == 12
    assert all(re.fullmatch(r"(\d), now called \1 \(before: \1\)", alt) for alt in kept)
    assert len({alt[0] for alt in kept[:9]}) == 9, "one of each class before the second of any"


@pytest.mark.parametrize("words", [pytest.param("samples:{}", marks=pytest.mark.slow), "class:3 samples:{}"])
def test_images_of_samples_that_had_to_go_are_not_kept_in_the_page(forgot: Run, words: str) -> None:
    data, original = forgot.load_data(), find_original(forgot)
    request = ForgetRequest.parse(words.format(",".join(map(str, data.train.rows[:200].tolist()))))
    run = serving(forgot, request=str(request))
    gallery = draw_gallery(run, data, request, original=original)
    assert gallery.lost == ()
    gone = {thumbnail(picture) for picture in as_pictures(data.train.subset(torch.arange(200)))}
    assert not gone & {example.data for example in gallery.kept}
    assert "this page shows none of them" in render(Report(run, request, None, gallery))


@pytest.mark.slow
def test_images_that_were_lost_are_of_the_class_that_had_to_go(forgot: Run) -> None:
    shown = draw_gallery(forgot, forgot.load_data(), ForgetRequest.parse("class:3"), original=find_original(forgot))
    assert shown.lost
    assert all(example.truth == "3" for example in shown.lost)


def test_numbers_and_trials_are_those_of_the_reported_request_and_not_of_the_last(forgot: Run) -> None:
    run, own = (
        serving(
            forgot,
            request="class:5",
            before=Accuracies(0.111, 0.222, 0.333),
            after=Accuracies(0.0444, 0.0555, 0.0666),
            cost=Cost(98765.0, 0, 0, 0.0, 0, 0, 0),
            settings={"target": 0.987},
            model_before="5" * 64,
            chosen=TrialRecord(0.5, 0.0, 0.44, 0.77),
            trials=tuple(TrialRecord(ratio, 0.0, 0.44, 0.77) for ratio in (0.1, 0.5)),
        ),
        forgot.record.requests[-1],
    )
    data = run.load_data()
    for words, is_other in (("class:3", False), ("class:5", True)):
        request = ForgetRequest.parse(words)
        gallery = draw_gallery(run, data, request, images=False)
        findings = [picture.finding for picture in gallery.pictures if picture.name == "frontier"]
        assert any("leaves 44.0 % forget accuracy" in finding for finding in findings) == is_other
        text = render(Report(run, request, None, gallery))
        for sign in (plain("from 11.1% to 4.4%"), "98765.0 s", "0.987", "5" * 64):
            assert (sign in text) == is_other, sign
    text = render(Report(run, ForgetRequest.parse("class:3"), None))
    assert plain(f"from {own.before.forget:.1%} to {own.after.forget:.1%}") in text


@pytest.mark.slow
def test_images_can_be_left_out_and_the_page_says_so(forgot: Run, tmp_path: Path) -> None:
    pages = {}
    for images in (True, False):
        write_report(forgot.path, out=tmp_path / "r.html", images=images, device="cpu")
        pages[images] = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "figure-grad-cam" in pages[True]
    assert LEFT_OUT not in pages[True]
    assert len(embedded(pages[True]) & data_pngs(forgot)) > 12
    for page in (pages[False], without_images(pages[True]), without_images(pages[False])):
        assert LEFT_OUT in page
        assert Elements(page).open == []
        assert not embedded(page) & data_pngs(forgot)
        assert "figure-grad-cam" not in page
        assert "figure-classes" in page, "figures of numbers stay"
        assert all(name in page for name in SECTIONS)
    with pytest.raises(FedOrthoError, match="images of data are not marked in it"):
        without_images("<p>some other page</p>")


def test_a_served_request_records_its_trials(forgot: Run) -> None:
    entry = read_json(forgot.path / "run.json")["requests"][-1]
    assert entry["chosen"]["ratio"] in [trial["ratio"] for trial in entry["trials"]]
    assert set(entry["trials"][0]) == {"ratio", "scrub", "forget", "retain"}


@pytest.mark.slow
def test_a_report_is_one_call_and_a_request_can_be_chosen(fresh: Run, tmp_path: Path) -> None:
    remarks: list[str] = []
    write_json(fresh.path / "verdict.json", VERDICT | {"request": "class:4"})
    page = write_report(str(fresh.path), "class:3", out=tmp_path / "r.html", images=False, on_remark=remarks.append)
    assert page == tmp_path / "r.html"
    assert remarks == [], "original and reference were found beside the run"
    text = page.read_text(encoding="utf-8")
    assert "<title>Class 3 was not audited</title>" in text
    assert plain(VERDICT["sentence"]) not in text, "the verdict is on another request"


def test_a_refused_request_has_a_page_that_says_why(forgot: Run, tmp_path: Path) -> None:
    original = find_original(forgot)
    assert original is not None
    details = {"reason": "no edit within the budget; nothing was changed"}
    place, digest = original.path.parent, original.record.model.digest
    for request in ("class:4", "class:5"):
        append_entry(place, "refused", "original", request, before=digest, details=details)
    for asked, name in ((None, "5"), ("class:4", "4")):
        text = write_report(original.path, asked, out=tmp_path / "r.html").read_text(encoding="utf-8")
        assert f"<h1>Class {name}: refused, nothing was changed</h1>" in text
        assert "No edit within the budget; nothing was changed.</p>" in text
        assert 'class="tiles"' not in text
        assert "refused 20" in text, "when"
    with pytest.raises(FedOrthoError, match="has forgotten nothing"):
        write_report(original.path, "class:6", out=tmp_path / "r.html")
    text = write_report(forgot.path, out=tmp_path / "r.html", images=False).read_text(encoding="utf-8")
    assert "refused, nothing" not in text, "that run has served another request"


def test_the_journal_and_the_level_are_named(forgot: Run) -> None:
    entries = read_journal(forgot.path.parent).entries
    text = render(Report(forgot, ForgetRequest.parse("class:3"), None, entries=entries))
    assert "class:3 at level hide: forward passes only" in text
    (mine,) = [entry for entry in entries if entry.after == forgot.record.model.digest]
    assert f"entry {mine.number}, head {mine.hash[:16]}" in text, "later entries do not change a page"
    assert re.search(r"<dd>forgotten \d{4}-\d\d-\d\d \d\d:\d\d UTC</dd>", text)
