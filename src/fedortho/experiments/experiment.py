"""The tables of the paper as experiments: what to train at which scale, what to ask, and what the paper printed."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting, unknown
from fedortho.experiments.relations import (
    METRICS,
    Relation,
    ResultRow,
    Row,
    as_lines,
    differences,
    judged,
    parse_relation,
    read_pairs,
    word,
)
from fedortho.methods import make_method
from fedortho.methods.hyperparameters import read_settings
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.storage.files import read_json
from fedortho.storage.settings import make_settings, read_toml

HERE = Path(__file__).parent
EXPERIMENTS = tuple(sorted(path.stem for path in HERE.glob("*.toml") if path.stem != "recipes"))
SCALES = ("demo", "small", "paper")
FIRST = re.compile(r"first (\d+) of class:(\d+)")


@dataclass(frozen=True)
class Treatment:
    """A method with its settings; those that the table varies are `swept`."""

    method: str
    settings: Mapping[str, Any]
    swept: Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A table of the paper at one scale."""

    name: str
    scale: str
    what: str
    requests: tuple[str, ...]  # of ForgetRequest, or `first 100 of class:0` for samples
    is_sequence: bool  # each request is served by the model that has served the one before
    seeds: tuple[int, ...]
    networks: tuple[TrainSettings, ...]
    treatments: tuple[Treatment, ...]
    relations: tuple[Relation, ...]
    beside: Mapping[str, str]  # whose printed rows are shown, where the setting is another
    printed: tuple[ResultRow, ...]  # the paper's rows


def load_experiment(name: str, scale: str = "demo") -> Experiment:
    """An experiment of the package.

    >>> load_experiment("pruning", "paper").seeds
    (0, 20, 23)
    """
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    return make_experiment(name, scale, read_toml(HERE / f"{name}.toml"))


def make_experiment(name: str, scale: str, told: Mapping[str, Any]) -> Experiment:
    """An experiment from the keys of its file; those of the scale win over those above it."""
    keys = {key: value for key, value in told.items() if key not in SCALES} | told[scale]
    recipes, networks = read_toml(HERE / "recipes.toml"), []
    for entry in keys["networks"]:
        for found, _ in crossed(entry):
            settings = recipes[found.pop("like")] | found if "like" in found else found
            networks.append(make_settings(FederateSettings if "clients" in settings else TrainSettings, settings))
    treatments, preset = [], read_settings(networks[0].data, networks[0].model, keys.get("preset", "published"))
    for entry in keys["methods"]:
        for found, swept in crossed({"name": entry} if isinstance(entry, str) else entry):
            method = found.pop("name")
            treatments.append(Treatment(method, {**preset.get(method, {}), **found}, swept))
            make_method(method, treatments[-1].settings)
    return Experiment(
        name,
        scale,
        keys["what"],
        tuple(keys["requests"]),
        keys.get("is-sequence", False),
        tuple(keys["seeds"]),
        tuple(networks),
        tuple(treatments),
        tuple(parse_relation(text) for text in keys["relations"]),
        keys.get("beside", {}),
        tuple(printed_lines(name)),
    )


def crossed(entry: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A value that is a list stands for each of its members; with what was chosen from lists.

    >>> [found for found, _ in crossed({"ratio": [0.1, 0.2], "name": "ssd"})]
    [{'ratio': 0.1, 'name': 'ssd'}, {'ratio': 0.2, 'name': 'ssd'}]
    """
    lists = {key: value for key, value in entry.items() if isinstance(value, list)}
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        yield dict(entry) | chosen, chosen


def network_key(settings: TrainSettings) -> dict[str, str]:
    """What tells networks of a table apart."""
    split = settings.split if isinstance(settings, FederateSettings) else "central"
    ortho = settings.ortho_layers if settings.ortho else "none"
    return {"data": settings.data, "model": settings.model, "split": split, "ortho": ortho}


def request_kind(words: str) -> str:
    return "samples" if FIRST.fullmatch(words) else ForgetRequest.parse(words).kind


def request_for(words: str, data: Dataset) -> ForgetRequest:
    """The request that the words of a table mean on this data."""
    found = FIRST.fullmatch(words)
    if found is None:
        return ForgetRequest.parse(words)
    rows = data.train.rows[data.train.labels == int(found[2])].sort().values[: int(found[1])]
    return ForgetRequest(samples=tuple(map(str, rows.tolist())))


def read_seeds(text: str) -> tuple[int, ...]:
    """Seeds with commas between.

    >>> read_seeds("0, 20")
    (0, 20)
    """
    words = [seed.strip() for seed in text.split(",")]
    if wrong := [seed for seed in words if not seed.isdecimal()]:
        raise BadSetting(f"{wrong[0]!r} is no seed; write whole numbers with commas between, such as 0,1,2")
    return tuple(dict.fromkeys(map(int, words)))


def narrowed(experiment: Experiment, methods: str = "", rows: str = "") -> Experiment:
    """Only these methods (names with commas between) and the rows with these values (key=value with commas between)."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    known = dict.fromkeys(treatment.method for treatment in experiment.treatments)
    for name in names or ([methods] if methods else []):  # commas alone are no methods, and not all of them
        if name not in known:
            raise unknown(f"method in {experiment.name}", name, known)
    treatments = tuple(one for one in experiment.treatments if not names or one.method in names)
    networks, requests = experiment.networks, experiment.requests
    keys: list[Mapping[str, Any]] = [*map(network_key, networks), *(one.swept for one in treatments)]
    keys += [{"request": request_kind(words)} for words in requests]
    for key, value in read_pairs(rows).items():
        choices = {word(found[key]) for found in keys if key in found}
        if not choices:
            raise unknown("key of --rows", key, {name for found in keys for name in found})
        if value not in choices:
            raise unknown(f"{key} in {experiment.name} at scale {experiment.scale}", value, choices)
        networks = tuple(one for one in networks if word(network_key(one).get(key, value)) == value)
        requests = tuple(one for one in requests if key != "request" or request_kind(one) == value)
        treatments = tuple(one for one in treatments if word(one.swept.get(key, value)) == value)
    return replace(experiment, networks=networks, requests=requests, treatments=treatments)


def printed_lines(table: str) -> list[ResultRow]:
    """What the paper prints in a table, with our names of methods; sd as further metrics, where there are some."""
    told = read_json(HERE / "printed.json")
    columns = told["tables"][table]["columns"]
    numbers = {*METRICS, *(f"{metric}-sd" for metric in METRICS), "mia", "mia-sd", "seconds", "label"}
    lines = []
    for row in told["tables"][table]["rows"]:
        known = {column: value for column, value in zip(columns, row, strict=True) if value is not None}
        known["method"] = told["names"][known["method"]]
        values = {name: float(value) for name, value in known.items() if name in numbers}
        lines.append(ResultRow({name: value for name, value in known.items() if name not in numbers}, {0: values}))
    return lines


def printed_beside(experiment: Experiment, line: ResultRow) -> Mapping[str, float]:
    """What the paper prints for a row of ours, or for its like in the setting that `beside` names; empty: nothing."""
    key = {**line.key, **experiment.beside}
    for candidate in experiment.printed:
        if all(name in key and word(key[name]) == word(value) for name, value in candidate.key.items()):
            return candidate.values[0]
    return {}


def row_verdict(experiment: Experiment, line: ResultRow) -> str:
    """What may be said of one row: nothing about its numbers, unless the setting is the paper's."""
    printed = printed_beside(experiment, line)
    if not line.of("forget"):
        return "refused"
    if not printed or experiment.scale != "paper":
        return "other setting" if printed else "not printed"
    off = {metric: abs(fmean(line.of(metric)) - printed[metric]) for metric in METRICS if metric in printed}
    if not all(f"{metric}-sd" in printed for metric in off):
        return f"off by {max(off.values()):.1f}; no sd printed"
    wide = [metric for metric in off if off[metric] > 2 * printed[f"{metric}-sd"]]
    return f"outside 2 sd: {', '.join(wide)}" if wide else "within 2 sd"


def check_relations(experiment: Experiment, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each claim with the pairs of rows that it is about: differences in points, and what they come to."""
    lines, told = as_lines(rows), []
    for claim in experiment.relations:
        here = [(pair, found) for pair in claim.pairs(lines) if (found := differences(claim, pair))]
        ours = [{"rows": [a.key, b.key], "differences": found, "verdict": judged(found)} for (a, b), found in here]
        theirs = [judged(found) for pair in claim.pairs(experiment.printed) if (found := differences(claim, pair))]
        told.append({"relation": claim.text, "here": ours, "paper": theirs})
    return told
