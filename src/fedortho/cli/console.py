"""Tables, sentences and progress bars of the command line."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from fedortho.federated.roster import ranges
from fedortho.models.predictions import Evaluation
from fedortho.models.sites import Finding
from fedortho.requests.checking import ModelCheck
from fedortho.requests.forgetting import ServedRequest
from fedortho.requests.levels import ForgettingPlan
from fedortho.runs.record import ServedRecord
from fedortho.runs.rounds import kept_rounds
from fedortho.runs.run import Run
from fedortho.storage.records import to_json
from fedortho.training.loop import Epoch, Progress
from fedortho.unlearning.trials import Trial

out = Console(emoji=False)  # class:Dress: is not an emoji
err = Console(stderr=True, emoji=False)
SHORT = 10  # characters that stay on one line
NAME = 16  # characters of a word that stay on one line in the first column
LONGEST = 20_000  # characters of a line


def one_line(text: str) -> str:
    """Any text as one line that a terminal shows as it is: what cannot be printed, line breaks too, is spelled out.

    >>> print(one_line("dress\\nchecked: signed by NIST \\x1b[2J"))
    dress\\nchecked: signed by NIST \\x1b[2J
    """
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def line_of(*parts: str | tuple[str, str]) -> Text:
    """Texts of anybody, or pairs of a text and its style, as one line without markup."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((one_line(text), style) for text, style in pairs))


def say(*parts: str | tuple[str, str]) -> None:
    out.print(line_of(*parts), soft_wrap=True)


def warn(*parts: str | tuple[str, str]) -> None:
    err.print(line_of(*parts), soft_wrap=True)


def say_table(table: Table) -> None:
    """Print a table; one that is wider than the terminal is not cut."""
    out.print(table, crop=False)


def say_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_plan(plan: ForgettingPlan, *, as_json: bool, alone: bool) -> None:
    """What will be done, before it begins; as JSON only if nothing follows."""
    if as_json and alone:
        say_json(to_json(plan))
    elif not as_json:
        title, *steps = plan.lines()
        for line in (title, *(f"  {step}" for step in steps), *(["dry run: nothing was done"] * alone)):
            say(line)


def print_served(served: ServedRequest, run_path: Path) -> None:
    """A served request: accuracies before and after, the edit, its cost and where the run is."""
    record, result = served.record, served.result
    say(f"{run_path}: {record.request} by {record.method}")
    both = (record.before, record.after)
    shares = [(name, *(f"{getattr(each, name):.1%}" for each in both)) for name in ("forget", "retain", "test")]
    caption = "forget: training images of the forget set; retain: all test images"
    if result.request.kind == "class":
        caption = "forget and retain: test images of these classes and of the others"
    out.print(_filled(Table(caption=caption, caption_justify="left"), ("accuracy", "before", "after"), shares))
    _print_edit(served)
    if result.plan is None:
        cost = result.cost
        say(f"{cost.seconds:.2f} s, {cost.images_read:,} images read, {cost.images_trained:,} trained on")
    else:
        read = result.plan.images_read
        say("; ".join(f"{phase} {s:.2f} s ({read[phase]:,} images read)" for phase, s in result.plan.seconds.items()))
    if result.cost.exchanges:
        say(wire_line(served))
    if len(record.all_forgotten) > 1:
        every = ", ".join(f"{request} {share:.1%}" for request, share in record.all_forgotten.items())
        say(f"forget accuracy of all requests: {every}; retain accuracy lost in all: {served.retain_paid:.1%}")
    if served.advice:
        say((served.advice, "yellow"))
    if served.run is not None:
        say(f"{'was written before' if served.was_finished else 'written'} to {served.run.path}")
    for copy in served.copies:
        say(f"copy of the data: {copy}")
    if served.run is not None and result.request.samples:
        say(f"you may now delete the files of these images: {served.run.path} stays usable without them")


def _print_edit(served: ServedRequest) -> None:
    """Whether the accuracy that the method aimed at is met, what was edited, and the trial that was chosen."""
    record, result, target = served.record, served.result, served.record.settings.get("target")
    if result.request.kind == "class":
        if isinstance(target, float) and record.after.forget > target:
            say((f"the target, {target:.1%}, is not met on test images", "yellow"))
    elif result.chosen is not None and not record.settings.get("ratio"):
        lenient = (
            "the accuracy on unseen images of the same labels, which is lenient (--shadows estimates a better one)"
        )
        source = "the accuracy of models without them, as given" if record.settings.get("limit") else lenient
        is_met = record.before.forget <= result.chosen.limit
        met = "; met before any edit: nothing that only they taught can be measured" if is_met else ""
        say(f"limit: {result.chosen.limit:.1%}, {source}{met}")
    if numbers := record.directions or record.kernels:
        kind = "directions removed" if record.directions else "kernels edited"
        say(f"{kind}: {', '.join(f'{number} in {site}' for site, number in numbers.items())}")
    elif record.chosen is not None:
        say("classifier edit: nothing was pruned")
    else:
        say(f"tensors replaced: {len(result.patch.names())}")
    if result.plan is not None and result.plan.left_out:
        say(f"left out, as they cannot be edited (see fedortho check): {', '.join(result.plan.left_out)}")
    if record.chosen is not None:
        scrub = f"scrub at strength {record.chosen.scrub:g}" if record.chosen.scrub else "no scrub"
        trials = f"{len(record.trials)} trial{'s' * (len(record.trials) > 1)}"
        say(f"ratio {record.chosen.ratio:g}, {scrub}, {trials}")
        if record.effect is not None:
            say(str(record.effect))


def frontier_table(frontier: Sequence[Trial]) -> Table:
    table = Table(caption="trials: forget on training images, retain on validation images", caption_justify="left")
    lines = [(f"{one.ratio:g}", f"{one.scrub:g}", f"{one.forget:.1%}", f"{one.retain:.1%}") for one in frontier]
    return _filled(table, ("ratio", "scrub", "forget", "retain"), lines, left=0)


def words_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A narrow table, its first column left-aligned; long names fold, numbers and dates stay whole, nothing is cut."""
    table = _filled(Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False), header, lines)
    for column, cells in zip(table.columns, zip(*lines, strict=True), strict=False):
        longest, is_date = max(map(len, cells)), all(cell[:1].isdigit() for cell in cells)
        column.overflow, column.min_width = "fold", longest if longest <= SHORT or is_date else None
    words = max((len(word) for line in lines for word in line[0].split()), default=0)
    if words <= NAME:
        table.columns[0].min_width = max(table.columns[0].min_width or 0, words)
    return table


def _filled(table: Table, header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> Table:
    """The table with columns and rows; the first `left` columns are left-aligned."""
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < left else "right")
    for line in lines:
        table.add_row(*map(line_of, line))
    return table


def print_check(found: ModelCheck) -> None:
    """The edits that apply to each layer, and which steps work."""
    out.print(_check_table(found.layers))
    say(f"memory format: {found.memory_format}")
    for name, reason in {**found.methods, "classifier edit": found.classifier, "training": found.training}.items():
        say(f"{name}: {reason or 'works'}")
    if not found.edited and found.is_served:
        say(("no convolution can be edited: forgetting is a classifier edit alone", "yellow"))
    if found.edited:
        say(f"hide edits {', '.join(found.edited)}")
    for name, reason in found.left_out.items():
        say(f"  left out: {name} ({reason})")


def _check_table(findings: Sequence[Finding]) -> Table:
    table = Table(caption_justify="left")
    for name in ("layer", "kernels", "norm", "conv", "channel", "residual group", "why not"):
        table.add_column(name, justify="right" if name == "kernels" else "left", overflow="fold")
    for finding in findings:
        layer = finding.layer
        reasons = [finding.conv, finding.channel, finding.group]
        works = ("yes*" if finding.is_undone else "yes", "yes", f"with {len(layer.writers) - 1} more")
        edits = ["no" if reason else word for reason, word in zip(reasons, works, strict=True)]
        edits[2] = "–" if len(layer.writers) == 1 else edits[2]
        why = next(filter(None, reasons), "")
        table.add_row(*map(line_of, (layer.name, str(layer.kernels), layer.norm_kind or "none", *edits, why)))
    if any(finding.is_undone for finding in findings):
        table.caption = "* undone by re-estimating batch-norm statistics; the channel edit is not"
    return table


def class_table(score: Evaluation, names: tuple[str, ...]) -> Table:
    found = zip(names, score.confusion, score.per_class, strict=True)
    lines = [(name, str(sum(row)), "–" if share is None else f"{share:.1%}") for name, row, share in found]
    table = _filled(Table(), ("class", "images", "right"), lines)
    table.add_section()
    table.add_row("all", str(score.images), f"{score.accuracy:.1%}")
    return table


def print_run(run: Run) -> None:
    result, about, data, history = run.record.result, run.record.model, run.record.data, run.history()
    known = [("test", result.test_accuracy, f"{data.test:,} images")]
    source = f": {data.valid_source}" if data.valid_source else ""
    known += [("valid", result.valid_accuracy, f"{data.valid:,} images{source}")]
    scores = ", ".join(f"{name} {share:.1%} ({images})" for name, share, images in known if share is not None)
    ortho = f", orthogonality penalty {history[-1].ortho:.3g}" if history and history[-1].ortho is not None else ""
    say((str(run.path), "bold"), f": {run.settings.model} ({about.weights:,} weights) on {run.settings.data}")
    say(f"  accuracy: {scores}{ortho}")
    unit = run.settings.passes.unit
    if kept := kept_rounds(run.path, unit):
        say(f"  {unit} kept: {len(kept)}, {sum(kept.values()) / 1e6:,.1f} MB on disk")
    if data.first_new is not None:
        say(f"  continued {run.settings.start}: images from row {data.first_new} on joined with this run")
    say(f"  model digest {about.digest[:16]}")
    if run.record.requests and (told := clients_line(run.record.requests[-1])):
        say(f"  {told}")


def clients_line(served: ServedRecord) -> str:
    """Who answered and who confirmed the patch of a federated request; empty if that is not recorded."""
    if served.answered is None or served.confirmed is None:
        return ""
    return f"clients that answered: {ranges(served.answered)}; that confirmed the patch: {ranges(served.confirmed)}"


class PlainColumn(TextColumn):
    """Text of a progress bar, whoever wrote it."""

    def render(self, task: Task) -> Text:
        return line_of(self.text_format.format(task=task))


@contextmanager
def bars() -> Iterator[Bars]:
    columns = (PlainColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    news = PlainColumn("{task.fields[news]}")
    console = Console(quiet=True) if out.quiet else err  # lines of epochs and rounds go there, too
    with Bars(*columns, news, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield shown


def bar(bars: Bars, text: str) -> Callable[[int, int], None]:
    task = bars.add_task(text, total=None, visible=False, news="")

    def show(done: int, total: int) -> None:
        bars.update(task, completed=done, total=total, visible=done < total)

    return show


def training_bar(bars: Bars) -> Callable[[Progress], None]:
    task = bars.add_task("training", total=None, visible=False, news="")
    printed = 0

    def show(now: Progress) -> None:
        nonlocal printed
        news = f"loss {now.loss:.3f}  accuracy {now.accuracy:.1%}  {now.images_per_second:,.0f} images/s"
        news += "" if now.ortho is None else f"  orthogonality {now.ortho:.3g}"
        text = f"epoch {now.epoch + 1}/{now.epochs}"
        bars.update(task, description=text, completed=now.step, total=now.steps, visible=True, news=news)
        if len(now.history) > max(printed, now.epoch):
            printed, entry = len(now.history), now.history[-1]
            line = _epoch_line(entry, f"epoch {entry.epoch + 1}/{now.epochs}")
            line += "" if entry.ortho is None else f"  orthogonality {entry.ortho:.3g}"
            bars.console.print(line_of(f"{line}  {entry.seconds:.0f} s"), soft_wrap=True)

    return show


def federation_bar(bars: Bars) -> Callable[[Any], None]:
    """Show the progress of a federation: round, clients that have answered, bytes; a line for each round."""
    task = bars.add_task("federation", total=None, visible=False, news="")
    printed = 0

    def show(now: Any) -> None:
        nonlocal printed
        up, down = now.bytes_up / 1e6, now.bytes_down / 1e6
        text = f"round {min(now.round + 1, now.rounds)}/{now.rounds}"
        news = f"clients  {down:,.1f} MB down, {up:,.1f} MB up"
        bars.update(task, description=text, completed=now.answered, total=now.asked or None, visible=True, news=news)
        if len(now.history) > printed and not now.asked:
            printed, entry = len(now.history), now.history[-1]
            clients = f"{entry.clients} client{'s' * (entry.clients != 1)}"
            line = _epoch_line(entry, f"round {entry.epoch + 1}/{now.rounds}  {clients}")
            line += "" if entry.drift is None else f"  drift {entry.drift:.2f}"
            bars.console.print(line_of(f"{line}  {down:,.1f} MB down, {up:,.1f} MB up"), soft_wrap=True)

    return show


def _epoch_line(entry: Epoch, begin: str) -> str:
    valid = "" if entry.valid is None else f"  validation {entry.valid:.1%}"
    return f"{begin}  loss {entry.loss:.3f}  accuracy {entry.accuracy:.1%}{valid}"


def wire_line(served: ServedRequest) -> str:
    """What a request sent over the network, over all clients."""
    cost = served.result.cost
    up, down = cost.bytes_up / 1000, cost.bytes_down / 1000
    exchanges = f"{cost.exchanges} exchange{'s' * (cost.exchanges > 1)} with clients"
    small = f"; {cost.withheld} groups of few images were withheld" if cost.withheld else ""
    told = clients_line(served.record)
    return f"{exchanges}, {down:,.0f} KB down and {up:,.0f} KB up in all, then the patch{small}{told and f'; {told}'}"
