"""The commands that run several methods: compare, tune, and reproduce, a table of the paper beside our numbers."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress as Bars
from typer import Argument, Option

from fedortho.cli.console import bar, bars, federation_bar, say, say_json, say_table, training_bar, words_table
from fedortho.cli.flags import AsJson, DataDir, Device, RecipeFile, Request, RunPath, Settings, read_recipe
from fedortho.experiments.experiment import EXPERIMENTS, Experiment, ExperimentResults, load_experiment
from fedortho.experiments.planning import NetworkPlan, plan_experiment
from fedortho.experiments.relations import as_text
from fedortho.experiments.results_table import attack_words, claim_words, results_table
from fedortho.experiments.runner import ProgressHooks, Watch, reproduce
from fedortho.requests.comparing import compare, compared_path, comparison_notes, comparison_table
from fedortho.requests.search import Attempt, Budget, Search
from fedortho.requests.tuning import tune
from fedortho.runs.run import open_run
from fedortho.storage.records import to_json

OTHER_SETTING = "other setting: smaller networks, other data, fewer epochs; only claims are compared, not numbers"
OTHER_DATA = "the paper's settings on other data; only claims are compared, not numbers"
PAPER_SETTING = "the paper's settings; docs/reproduction.md lists what the paper leaves open"


def compare_command(
    run_path: RunPath,
    request: Request,
    methods: Annotated[str, Option(help="all, or names with commas between")] = "all",
    settings: Settings = "published",
    passes: Annotated[str, Option(help="of methods that train: settings, one, published, or several")] = "settings",
    out_path: Annotated[Path | None, Option("--out", help="results directory (default: RUN-compared-REQUEST)")] = None,
    references: Annotated[Path | None, Option(help="directory of references (default: references beside RUN)")] = None,
    recipe: RecipeFile = None,
    data_dir: DataDir = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Run several methods from the same model and show accuracies, cost and the gap to retraining of each."""
    run = open_run(run_path).at(data_dir, device, read_recipe(recipe))
    parsed = run.request(request)
    directory = out_path or compared_path(run, parsed)
    with bars() as shown:
        task = shown.add_task("comparing", total=None, news="")
        how: dict[str, Any] = {"settings": settings, "passes": passes, "references": references}
        how["watch"] = lambda name, number, total: shown.update(task, completed=number, total=total, news=name)
        rows = compare(run, parsed, methods, out=directory, **how)
    if as_json:
        say_json([to_json(row) for row in rows])
        return
    header, *lines = comparison_table(rows)
    say_table(words_table(header, [line for line in lines if len(line) == len(header)]))
    for name, *why in (line for line in lines if len(line) != len(header)):
        say(f"{name}: {' '.join(why)}")
    for note in comparison_notes(rows):
        say(note)
    say(f"results of each method: {directory}")


def tune_command(
    methods: Annotated[str, Argument(metavar="METHODS", help="all, or names with commas between")],
    run_path: RunPath,
    request: Request,
    out_path: Annotated[Path, Option("--out", help="the JSON file to write, for --settings")],
    on: Annotated[str | None, Option(help="the request of trials (default: another like REQUEST, drawn)")] = None,
    settings: Settings = "published",
    shadows: Annotated[int, Option(help="shadow models, 8 to 64, that say what clients or samples should end at")] = 0,
    data_dir: DataDir = "",
    device: Device = "auto",
) -> None:
    """Search hyper-parameters of methods on validation images, with the same budget for every method."""
    budget = Budget()
    say(f"budget of each method: {', '.join(f'{key} {value:,}' for key, value in asdict(budget).items())}")
    run = open_run(run_path).at(data_dir, device)
    how: dict[str, Any] = {"on": on, "out": out_path, "settings": settings, "budget": budget, "shadows": shadows}
    tuned = tune(run, request, methods, **how, watch=_print_attempt)
    for name, search in tuned.items():
        say(f"best for {name}: {_chosen(search)}")
    say(f"written to {out_path}; all trials: {out_path.with_suffix('.trials.json')}")


def _print_attempt(name: str, number: int, attempt: Attempt) -> None:
    accuracies = f"forget {attempt.forget:.1%}  retain {attempt.retain:.1%}"
    failure = f"  {attempt.error}" if attempt.error else ""
    settings = ", ".join(f"{key} {value:g}" for key, value in attempt.settings.items())
    say(f"{name}, trial {number + 1} on {attempt.images:,} images: {settings}: {accuracies}{failure}")


def _chosen(search: Search) -> str:
    return ", ".join(
        f"{key} {choice.value} ({'inside' if choice.inside else 'at the edge of'} {choice.lowest} to {choice.highest})"
        for key, choice in search.choices.items()
    )


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
    scale: Annotated[str, Option(help="demo (needs no data), small, wide (512 kernels), paper (GPU weeks)")] = "demo",
    seeds: Annotated[str, Option(help="with commas between (default: those of the scale)")] = "",
    methods: Annotated[str, Option(help="only these, with commas between")] = "",
    rows: Annotated[str, Option(help="only rows with these values, such as split=iid,request=class")] = "",
    data_dir: Annotated[str, Option("--data-dir", help="directory that holds CIFAR, Tiny ImageNet")] = "",
    other_data: Annotated[
        bool, Option("--other-data", help="at scale paper: the data is not the paper's, so no number is judged")
    ] = False,
    early_stem: Annotated[
        bool, Option("--early-stem", help="ResNets on Tiny ImageNet with an early-downsampling stem: less memory")
    ] = False,
    accumulate: Annotated[int, Option(help="parts of a batch whose gradients are added: less memory")] = 1,
    networks: Annotated[
        Path | None, Option(help="directory of runs: those trained by the same settings are copied, not trained again")
    ] = None,
    place: Annotated[Path, Option("--out", help="directory of networks and results")] = Path("runs/reproduce"),
    device: Device = "auto",
    plan: Annotated[bool, Option("--plan", help="print networks, cells, hours and memory; train nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table of the paper: its values beside ours, and which of its claims hold; resumes if stopped."""
    if not name:
        subjects = {name: load_experiment(name).what for name in EXPERIMENTS}
        lines = [*(f"{name}: {what}" for name, what in subjects.items()), "run one: fedortho reproduce pruning"]
        typer.echo(json.dumps(subjects, indent=2) if as_json else "\n".join(lines))
        return
    limits: dict[str, Any] = {"seeds": seeds, "methods": methods, "rows": rows, "other_data": other_data}
    experiment = load_experiment(name, scale, **limits, early_stem=early_stem, accumulate=accumulate)
    if plan:
        planned = plan_experiment(experiment, place, data_dir=data_dir, networks=networks, device=device)
        _print_plan(planned, as_json)
        return
    with _each_message_once(), bars() as shown:
        where: dict[str, Any] = {"data_dir": data_dir, "networks": networks, "device": device}
        results = reproduce(experiment, place, **where, hooks=_hooks(shown, name))
    if as_json:
        say_json(to_json(results))
        return
    _print_experiment(experiment, results)
    say(f"all numbers: {place / experiment.file_name}; networks and models: {place}")


def _print_plan(plans: list[NetworkPlan], as_json: bool) -> None:
    if as_json:
        say_json([asdict(plan) for plan in plans])
        return
    for plan in plans:
        say(plan.text)
    networks, cells = sum(plan.networks + plan.references for plan in plans), sum(plan.cells for plan in plans)
    hours = sum((plan.networks + plan.references - plan.trained) * plan.hours for plan in plans)
    trained = sum(plan.trained for plan in plans)
    known = f", {trained} of them trained before" if trained else ""
    say(
        f"together {networks} networks{known}, {cells} cells, {hours:,.1f} hours of training here, if nothing else runs"
    )
    say("edits, baselines and measurements come on top")


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


def _print_experiment(experiment: Experiment, results: ExperimentResults) -> None:
    say(f"{experiment.name}: {experiment.what}")
    networks = " and ".join(dict.fromkeys(f"{one.model} on {one.data}" for one in experiment.networks))
    seeds = ", ".join(map(str, experiment.seeds))
    say(f"scale {experiment.scale}: {networks}, seeds {seeds}; {experiment.printed_words}; percent, seconds")
    for data, found in results.data.items():
        say(f"{data}: {found.text}")
    lines = results_table(experiment, results)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:  # a table of rich would cut numbers off in a narrow terminal
        say("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
    if experiment.is_sequence:
        say("retain: all classes at step 0, then those that are left; the fewer are left, the easier they are")
    for row in (row for row in results.rows if row.forgotten and row.key["step"] == len(experiment.requests)):
        shares = ", ".join(f"{request} {share:.1%}" for request, share in row.forgotten.items())
        which = ", ".join(f"{key} {as_text(value)}" for key, value in row.key.items() if key not in ("request", "step"))
        say(f"forget accuracy in the end: {which}, seed {row.seed}: {shares}")
    for why in dict.fromkeys(f"{row.key['method']}: {row.refused}" for row in results.rows if row.refused):
        say(why)
    say(
        "MIA confidence: forgotten images called members by a threshold on the confidence (Song et al. 2019); the "
        "paper does not say which attack it has: compare with retrain, not with its value; lower than retrain is not "
        f"better; {attack_words(results)}"
    )
    if results.claims:
        say("claims of the paper's table, and what was measured here:")
    for claim in results.claims:
        say(f"  {claim_words(claim)}")
    at_scale = OTHER_DATA if "other-data" in experiment.limits else PAPER_SETTING
    say(at_scale if experiment.scale == "paper" else OTHER_SETTING)
