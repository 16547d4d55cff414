"""The tables of the paper as experiments: which networks at which scale, which requests, which methods."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadSetting, unknown
from fedortho.experiments.relations import METRICS, Relation, TableRow, as_text, parse_relation, read_pairs
from fedortho.methods import make_method
from fedortho.methods.hyperparameters import read_settings
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.storage.files import read_json
from fedortho.storage.settings import make_settings, read_toml

HERE = Path(__file__).parent
EXPERIMENTS = tuple(sorted(path.stem for path in HERE.glob("*.toml") if path.stem != "recipes"))
SCALES = ("demo", "small", "paper")
NUMBERS = {*METRICS, *(f"{metric}-sd" for metric in METRICS), "mia", "mia-sd", "seconds", "label"}  # printed columns
FIRST_SAMPLES = re.compile(r"first (\d+) of class:(\d+)")


@dataclass(frozen=True)
class MethodVariant:
    """A method with its settings; `varied` are those that the table varies."""

    method: str
    settings: Mapping[str, Any]
    varied: Mapping[str, Any]


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
    variants: tuple[MethodVariant, ...]
    relations: tuple[Relation, ...]
    beside: Mapping[str, str]  # keys of the printed rows that stand beside ours, where they differ
    printed: tuple[TableRow, ...]  # the paper's rows


def load_experiment(
    name: str, scale: str = "demo", *, seeds: str | Sequence[int] = (), methods: str = "", rows: str = ""
) -> Experiment:
    """An experiment of the package; its seeds, methods and rows (key=value) can be limited.

    >>> load_experiment("pruning", "paper").seeds
    (0, 20, 23)
    """
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    experiment = select_rows(make_experiment(name, scale, read_toml(HERE / f"{name}.toml")), methods, rows)
    chosen = read_seeds(seeds) if seeds and isinstance(seeds, str) else tuple(map(int, seeds))
    return replace(experiment, seeds=chosen or experiment.seeds)


def make_experiment(name: str, scale: str, table: Mapping[str, Any]) -> Experiment:
    """An experiment from the keys of its file; those of the scale win over those above it."""
    keys = {key: value for key, value in table.items() if key not in SCALES} | table[scale]
    networks = _networks(keys["networks"])
    return Experiment(
        name,
        scale,
        keys["what"],
        tuple(keys["requests"]),
        keys.get("is-sequence", False),
        tuple(keys["seeds"]),
        networks,
        _variants(
            keys["methods"], read_settings(networks[0].data, networks[0].model, keys.get("settings", "published"))
        ),
        tuple(parse_relation(text) for text in keys["relations"]),
        keys.get("beside", {}),
        tuple(printed_rows(name)),
    )


def printed_rows(table: str) -> list[TableRow]:
    """The rows of a table of the paper; standard deviations are metrics of their own (forget-sd)."""
    printed = read_json(HERE / "printed.json")
    rows = []
    for values in printed["tables"][table]["rows"]:
        cells = dict(zip(printed["tables"][table]["columns"], values, strict=True))
        known = {column: value for column, value in cells.items() if value is not None}
        known["method"] = printed["names"][known["method"]]
        numbers = {name: float(value) for name, value in known.items() if name in NUMBERS}
        rows.append(TableRow({name: value for name, value in known.items() if name not in NUMBERS}, {0: numbers}))
    return rows


def _networks(entries: Sequence[Mapping[str, Any]]) -> tuple[TrainSettings, ...]:
    recipes, networks = read_toml(HERE / "recipes.toml"), []
    for entry in entries:
        for keys, _ in combinations(entry):
            settings = recipes[keys.pop("like")] | keys if "like" in keys else keys
            networks.append(make_settings(FederateSettings if "clients" in settings else TrainSettings, settings))
    return tuple(networks)


def _variants(
    entries: Sequence[str | Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]]
) -> tuple[MethodVariant, ...]:
    variants = []
    for entry in entries:
        for keys, varied in combinations({"name": entry} if isinstance(entry, str) else entry):
            method = keys.pop("name")
            variants.append(MethodVariant(method, {**settings.get(method, {}), **keys}, varied))
            make_method(method, variants[-1].settings)  # refuses wrong settings
    return tuple(variants)


def combinations(entry: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """All combinations of the values that are lists: the whole entry, and what was chosen from lists.

    >>> [keys for keys, _ in combinations({"ratio": [0.1, 0.2], "name": "ssd"})]
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
    return "samples" if FIRST_SAMPLES.fullmatch(words) else ForgetRequest.parse(words).kind


def request_for(words: str, data: Dataset) -> ForgetRequest:
    """The request that the words of a table mean on this data."""
    match = FIRST_SAMPLES.fullmatch(words)
    if match is None:
        return ForgetRequest.parse(words)
    rows = data.train.rows[data.train.labels == int(match[2])].sort().values[: int(match[1])]
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


def select_rows(experiment: Experiment, methods: str = "", rows: str = "") -> Experiment:
    """Only these methods (names with commas between) and the rows with these values (key=value with commas between)."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    known = dict.fromkeys(variant.method for variant in experiment.variants)
    for name in names or ([methods] if methods else []):  # commas alone name no method, and not all methods
        if name not in known:
            raise unknown(f"method in {experiment.name}", name, known)
    variants = tuple(one for one in experiment.variants if not names or one.method in names)
    networks, requests = experiment.networks, experiment.requests
    keys: list[Mapping[str, Any]] = [*map(network_key, networks), *(one.varied for one in variants)]
    keys += [{"request": request_kind(words)} for words in requests]
    for key, value in read_pairs(rows).items():
        choices = {as_text(each[key]) for each in keys if key in each}
        if not choices:
            raise unknown("key of --rows", key, {name for each in keys for name in each})
        if value not in choices:
            raise unknown(f"{key} in {experiment.name} at scale {experiment.scale}", value, choices)
        networks = tuple(one for one in networks if as_text(network_key(one).get(key, value)) == value)
        requests = tuple(one for one in requests if key != "request" or request_kind(one) == value)
        variants = tuple(one for one in variants if as_text(one.varied.get(key, value)) == value)
    return replace(experiment, networks=networks, requests=requests, variants=variants)
