"""The command reproduce: a table of the paper beside the numbers measured here."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress as Bars
from typer import Argument, Option

from fedortho.cli.console import bar, bars, federation_bar, say, say_json, training_bar
from fedortho.cli.flags import AsJson, Device
from fedortho.experiments.experiment import (
    EXPERIMENTS,
    ClaimFinding,
    Experiment,
    ExperimentResults,
    load_experiment,
    printed_beside,
    row_verdict,
)
from fedortho.experiments.relations import METRICS, as_text, mean_and_sd, over_seeds
from fedortho.experiments.runner import ProgressHooks, Watch, reproduce
from fedortho.storage.records import to_json

SETTING = {
    False: "other setting: smaller networks, other data, fewer epochs; only claims are compared, not numbers",
    True: "the paper's settings; docs/reproduction.md lists what the paper leaves open",
}


@contextmanager
def _each_message_once() -> Iterator[None]:
    """Every row of a table would repeat the same warning; afterwards messages are repeated again."""
    seen: Counter[str] = Counter()

    def is_new(record: logging.LogRecord) -> bool:
        seen[record.getMessage()] += 1
        return seen[record.getMessage()] == 1

    with ExitStack() as stack:
        for handler in logging.getLogger().handlers:
            handler.addFilter(is_new)
            stack.callback(handler.removeFilter, is_new)
        yield


def reproduce_command(
    name: Annotated[str, Argument(metavar="[NAME]", help="an experiment; without one they are listed")] = "",
    scale: Annotated[str, Option(help="demo (needs no data), small (CIFAR-10), paper (weeks of a GPU)")] = "demo",
    seeds: Annotated[str, Option(help="with commas between (default: those of the scale)")] = "",
    methods: Annotated[str, Option(help="only these, with commas between")] = "",
    rows: Annotated[str, Option(help="only rows with these values, such as split=iid,request=class")] = "",
    data_dir: Annotated[str, Option("--data-dir", help="directory that holds CIFAR, Tiny ImageNet")] = "",
    place: Annotated[Path, Option("--out", help="directory of networks and results")] = Path("runs/reproduce"),
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Reproduce a table of the paper: its values beside ours, and which of its claims hold; resumes if stopped."""
    if not name:
        subjects = {name: load_experiment(name).what for name in EXPERIMENTS}
        lines = [*(f"{name}: {what}" for name, what in subjects.items()), "run one: fedortho reproduce pruning"]
        typer.echo(json.dumps(subjects, indent=2) if as_json else "\n".join(lines))
        return
    experiment = load_experiment(name, scale, seeds=seeds, methods=methods, rows=rows)
    with _each_message_once(), bars() as shown:
        results = reproduce(experiment, place, data_dir=data_dir, device=device, hooks=_hooks(shown, name))
    if as_json:
        say_json(to_json(results))
        return
    _print(experiment, results)
    say(f"all numbers: {place / f'{name}-{scale}.json'}; networks and models: {place}")


def _hooks(shown: Bars, name: str) -> ProgressHooks:
    """A bar for the whole table, and one for the current training, which replaces that of the last one."""
    task, decoding = shown.add_task(name, total=None, news=""), bar(shown, "decoding images")
    lasting = set(shown.task_ids)

    def fresh(make: Callable[[Bars], Watch]) -> Watch:
        for old in set(shown.task_ids) - lasting:
            shown.remove_task(old)
        return make(shown)

    return ProgressHooks(
        lambda news, done, of: shown.update(task, completed=done, total=of, news=news),
        lambda: fresh(training_bar),
        lambda: fresh(federation_bar),
        decoding,
    )


def _print(experiment: Experiment, results: ExperimentResults) -> None:
    say(f"{experiment.name}: {experiment.what}")
    networks = " and ".join(dict.fromkeys(f"{one.model} on {one.data}" for one in experiment.networks))
    printed = ", ".join(experiment.beside.values()) or "the same"
    seeds = ", ".join(map(str, experiment.seeds))
    say(f"scale {experiment.scale}: {networks}, seeds {seeds}; in brackets the paper's: {printed}; percent")
    lines = _table(experiment, results)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:  # a table of rich would cut numbers off in a narrow terminal
        say("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
    for row in (row for row in results.rows if row.forgotten and row.key["step"] == len(experiment.requests)):
        shares = ", ".join(f"{request} {share:.1%}" for request, share in row.forgotten.items())
        say(f"forget accuracy in the end: {row.key['method']}, {row.key['split']}, seed {row.seed}: {shares}")
    for why in dict.fromkeys(f"{row.key['method']}: {row.refused}" for row in results.rows if row.refused):
        say(why)
    say("claims of the paper's table, and what was measured here:")
    for claim in results.claims:
        say(f"  {_claim_words(claim)}")
    say(SETTING[experiment.scale == "paper"])


def _table(experiment: Experiment, results: ExperimentResults) -> list[list[str]]:
    """Header and rows: the keys that vary, each metric beside the printed one, the row's verdict."""
    rows = over_seeds(results.rows)
    values = {key: {as_text(row.key[key]) for row in rows if key in row.key} for row in rows for key in row.key}
    varied = ["method", *(key for key, known in values.items() if key != "method" and len(known) > 1)]
    lines = [[*varied, *(name for metric in METRICS for name in (metric, "(paper)")), "verdict"]]
    for row in rows:
        beside = printed_beside(experiment, row)
        cells = [as_text(row.key.get(key, "")) for key in varied]
        for metric in METRICS:
            spread = f"±{beside[f'{metric}-sd']:.2f}" if f"{metric}-sd" in beside else ""
            printed = f"{beside[metric]:.2f}{spread}" if metric in beside else "–"
            cells += [mean_and_sd(row.of(metric)), printed]
        lines.append([*cells, row_verdict(experiment, row)])
    return lines


def _claim_words(claim: ClaimFinding) -> str:
    """A claim of the paper, and in how many pairs of rows it holds here.

    >>> from fedortho.experiments.experiment import PairFinding
    >>> _claim_words(ClaimFinding("a < b", (PairFinding(({}, {}), (-3.0,), "does not hold"),), ()))
    'a < b: does not hold, by -3.0 points (1 seed)'
    """
    if not claim.here:
        return f"{claim.relation}: no such rows here"
    number, pairs = min(len(pair.differences) for pair in claim.here), len(claim.here)
    words = f"{claim.here[0].verdict}, by {sum(claim.here[0].differences) / number:.1f} points"
    if pairs > 1:
        verdicts = Counter(pair.verdict for pair in claim.here)
        words = ", ".join(f"{verdict} in {found} of {pairs}" for verdict, found in verdicts.items())
    return f"{claim.relation}: {words} ({number} seed{'s' if number > 1 else ''})"
