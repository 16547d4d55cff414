"""The command reproduce: a table of the paper, trained, forgotten and put beside what was printed."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress as Bars

from fedortho.cli.console import bar, bars, federation_bar, say, training_bar
from fedortho.cli.flags import AsJson
from fedortho.experiments.experiment import (
    EXPERIMENTS,
    Experiment,
    check_relations,
    load_experiment,
    narrowed,
    printed_beside,
    read_seeds,
    row_verdict,
)
from fedortho.experiments.relations import METRICS, Row, as_lines, mean_and_sd, word
from fedortho.experiments.runner import Show, Watch, reproduce
from fedortho.storage.files import read_json

SETTING = {
    False: "other setting: smaller networks, other data, fewer epochs; no number has to match, only claims are checked",
    True: "the paper's settings; docs/reproduction.md says what it leaves open",
}


class Once(logging.Filter):
    """Lets each message pass once: a sweep would warn of the same thing at each of its rows."""

    def filter(self, record: logging.LogRecord) -> bool:
        seen, text = vars(self).setdefault("seen", set()), record.getMessage()
        is_new = text not in seen
        seen.add(text)
        return is_new


def reproduce_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="an experiment; without one they are listed")] = "",
    scale: Annotated[str, typer.Option(help="demo (needs no data), small (CIFAR-10), paper (weeks of a GPU)")] = "demo",
    seeds: Annotated[str, typer.Option(help="with commas between (default: those of the scale)")] = "",
    methods: Annotated[str, typer.Option(help="only these, with commas between")] = "",
    rows: Annotated[str, typer.Option(help="only rows with these values, such as split=iid,request=class")] = "",
    data_dir: Annotated[str, typer.Option("--data-dir", help="the directory that holds CIFAR, Tiny ImageNet")] = "",
    place: Annotated[Path, typer.Option("--out", help="where networks and results are kept")] = Path("runs/reproduce"),
    as_json: AsJson = False,
) -> None:
    """Reproduce a table of the paper: its value, ours over seeds, and which of its claims hold; goes on if stopped."""
    if not name:
        told = {name: load_experiment(name).what for name in EXPERIMENTS}
        lines = [*(f"{name}: {what}" for name, what in told.items()), "run one: fedortho reproduce pruning"]
        typer.echo(json.dumps(told, indent=2) if as_json else "\n".join(lines))
        return
    experiment = narrowed(load_experiment(name, scale), methods, rows)
    experiment = replace(experiment, seeds=read_seeds(seeds)) if seeds else experiment
    results = place / f"{name}-{scale}.json"
    for handler in logging.getLogger().handlers:
        handler.addFilter(Once())
    with bars() as shown:
        found = reproduce(experiment, place, data_dir=data_dir, show=_show(shown, name), results=results)
    if as_json:
        typer.echo(json.dumps(read_json(results), indent=2))
        return
    _print(experiment, found)
    say(f"all numbers: {results}; networks and models: {place}")


def _show(shown: Bars, name: str) -> Show:
    """A bar for the whole, and one for what is being trained, which takes the place of the last one's."""
    task, decoding = shown.add_task(name, total=None, news=""), bar(shown, "decoding images")
    lasting = set(shown.task_ids)

    def fresh(make: Callable[[Bars], Watch]) -> Watch:
        for old in set(shown.task_ids) - lasting:
            shown.remove_task(old)
        return make(shown)

    return Show(
        lambda news, done, of: shown.update(task, completed=done, total=of, news=news),
        lambda: fresh(training_bar),
        lambda: fresh(federation_bar),
        decoding,
    )


def _print(experiment: Experiment, rows: Sequence[Row]) -> None:
    say(f"{experiment.name}: {experiment.what}")
    shown = " and ".join(dict.fromkeys(f"{one.model} on {one.data}" for one in experiment.networks))
    printed = ", ".join(experiment.beside.values()) or "the same"
    seeds = ", ".join(map(str, experiment.seeds))
    say(f"scale {experiment.scale}: {shown}, seeds {seeds}; in brackets the paper's: {printed}; accuracies in percent")
    lines = as_lines(rows)
    values = {key: {word(line.key[key]) for line in lines if key in line.key} for line in lines for key in line.key}
    varied = ["method", *(key for key, found in values.items() if key != "method" and len(found) > 1)]
    words = [[*varied, *(name for metric in METRICS for name in (metric, "(paper)")), "verdict"]]
    for line in lines:
        beside = printed_beside(experiment, line)
        pairs = [(mean_and_sd(line.of(metric)), _printed(beside, metric)) for metric in METRICS]
        keys = [word(line.key.get(key, "")) for key in varied]
        words.append([*keys, *(number for pair in pairs for number in pair), row_verdict(experiment, line)])
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    for first, *rest in words:  # no table of rich's: in a narrow terminal it would cut numbers off
        say("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
    for row in (row for row in rows if row.get("step") == len(experiment.requests) and "forgotten" in row):
        told = ", ".join(f"{request} {share:.1%}" for request, share in row["forgotten"].items())
        say(f"all forgotten, in the end: {row['method']}, {row['split']}, seed {row['seed']}: {told}")
    for why in dict.fromkeys(f"{row['method']}: {row['refused']}" for row in rows if "refused" in row):
        say(why)
    say("what the paper's table says, and what was found here:")
    for entry in check_relations(experiment, rows):
        say(escape(f"  {_claim_words(entry)}"))
    say(SETTING[experiment.scale == "paper"])


def _printed(beside: Mapping[str, float], metric: str) -> str:
    spread = f"±{beside[f'{metric}-sd']:.2f}" if f"{metric}-sd" in beside else ""
    return f"{beside[metric]:.2f}{spread}" if metric in beside else "–"


def _claim_words(entry: Mapping[str, Any]) -> str:
    """A claim of the paper, and in how many pairs of rows it holds here.

    >>> _claim_words({"relation": "a < b", "here": [{"differences": [-3.0], "verdict": "does not hold"}]})
    'a < b: does not hold, by -3.0 points (1 seed)'
    """
    here, claim = entry["here"], entry["relation"]
    if not here:
        return f"{claim}: no such rows here"
    number = min(len(pair["differences"]) for pair in here)
    ours = _counted([pair["verdict"] for pair in here])
    ours += f", by {sum(here[0]['differences']) / number:.1f} points" if len(here) == 1 else ""
    return f"{claim}: {ours} ({number} seed{'s' if number > 1 else ''})"


def _counted(verdicts: Sequence[str]) -> str:
    found = Counter(verdicts)
    if len(verdicts) == 1:
        return verdicts[0]
    return ", ".join(f"{verdict} in {number} of {len(verdicts)}" for verdict, number in found.items())
