"""The tables of the paper as experiments: networks, requests and methods at a scale; our rows beside the paper's."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadData, BadSetting, unknown
from fedortho.experiments.relations import (
    COLUMNS,
    METRICS,
    Relation,
    SeedRow,
    TableRow,
    as_text,
    differences,
    judge_differences,
    noise_of_images,
    over_seeds,
    parse_relations,
    read_pairs,
)
from fedortho.methods import make_method
from fedortho.methods.hyperparameters import read_settings
from fedortho.models.zoo import MODELS
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.storage.files import canonical_json, read_json
from fedortho.storage.provenance import Environment
from fedortho.storage.records import Scalar
from fedortho.storage.settings import make_settings, read_toml

HERE = Path(__file__).parent
EXPERIMENTS = tuple(sorted(path.stem for path in HERE.glob("*.toml") if path.stem != "recipes"))
SCALES = ("demo", "small", "wide", "paper")
NUMBERS = {*COLUMNS, *(f"{metric}-sd" for metric in COLUMNS), "label"}  # printed columns
EARLY = "tiny-imagenet"  # 64x64 images, for which a stem may downsample early
PAPER_DATA = {  # classes, training images, test images
    "cifar10": (10, 50_000, 10_000),
    "cifar100": (100, 50_000, 10_000),
    "tiny-imagenet": (200, 100_000, 10_000),
}
FIRST_SAMPLES = re.compile(r"first (\d+) of class:(\d+)")


@dataclass(frozen=True)
class MethodVariant:
    """A method with its settings; `varied` are those that the table varies."""

    method: str
    settings: Mapping[str, Any]  # `layers = "ortho"` are the layers that the network made orthogonal
    varied: Mapping[str, Any]
    fraction: float = 0.0  # of the clients that train in a round of the method; 0: as in training

    def on(self, network: TrainSettings) -> Mapping[str, Any]:
        """Its settings for a network; one without orthogonal layers is edited in its deep ones."""
        is_ortho = self.settings.get("layers") == "ortho"
        return {**self.settings, "layers": network.ortho_layers} if is_ortho else self.settings


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
    limits: Mapping[str, str] = field(default_factory=dict)  # flags: seeds, methods, rows, other-data

    @property
    def command(self) -> str:
        """The command that runs it."""
        flags = [f"--{flag} {value}".strip() for flag, value in self.limits.items()]
        return " ".join([f"fedortho reproduce {self.name} --scale {self.scale}", *flags])

    @property
    def printed_words(self) -> str:
        """Which rows of the paper stand beside ours."""
        where = ", ".join(self.beside.values()) or "the same"
        return f"in brackets the paper's: {where}" if self.printed else "the paper prints no numbers"

    @property
    def file_name(self) -> str:
        """The name of its result file; a narrowed table has its own, and never replaces that of the whole table."""
        words = [self.name, self.scale, *(word for limit in self.limits.items() for word in limit if word)]
        return re.sub(r"[^\w.,=-]+", "-", "-".join(words)) + ".json"


def load_experiment(
    name: str,
    scale: str = "demo",
    *,
    seeds: str = "",
    methods: str = "",
    rows: str = "",
    other_data: bool = False,
    early_stem: bool = False,
    accumulate: int = 1,
) -> Experiment:
    """An experiment of the package; its seeds, methods and rows (key=value) can be limited.

    The scale `paper` accepts other data than the paper's only with `other_data`; then no number is judged. With
    `early_stem` residual networks for 64x64 images halve their activations twice before the first block, and
    `accumulate` trains batches in so many parts: both need less memory, and neither is in the paper.

    >>> load_experiment("pruning", "paper").seeds
    (0, 20, 23)
    """
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if other_data and scale != "paper":
        raise BadSetting(
            f"--other-data is for --scale paper; at scale {scale} no number is judged anyway; leave it out"
        )
    table = read_toml(HERE / f"{name}.toml")
    if scale not in table:
        raise BadSetting(f"{name} has no scale {scale}; choose from {', '.join(one for one in SCALES if one in table)}")
    chosen = select_rows(make_experiment(name, scale, table), methods, rows, seeds)
    networks = tuple(_smaller(each, early_stem, accumulate) for each in chosen.networks)
    if early_stem and networks == tuple(_smaller(each, False, accumulate) for each in chosen.networks):
        raise BadSetting(f"--early-stem is for ResNets on {EARLY}; {name} has none at scale {scale}")
    words = {"other-data": other_data, "early-stem": early_stem}
    limits = {**chosen.limits, **{word: "" for word, is_so in words.items() if is_so}}
    limits |= {"accumulate": str(accumulate)} if accumulate > 1 else {}
    return replace(chosen, networks=networks, limits=limits)


def _smaller(settings: TrainSettings, early_stem: bool, accumulate: int) -> TrainSettings:
    """A network that needs less memory."""
    name = f"{settings.model}-early"
    is_early = early_stem and settings.data == EARLY and name in MODELS
    return replace(settings, accumulate=accumulate, model=name if is_early else settings.model)


def make_experiment(name: str, scale: str, table: Mapping[str, Any]) -> Experiment:
    """An experiment from the keys of its file; those of the scale win over those above it."""
    keys = {key: value for key, value in table.items() if key not in SCALES} | table[scale]
    recipes, networks, variants = read_toml(HERE / "recipes.toml"), list[TrainSettings](), list[MethodVariant]()
    for given, _ in (each for entry in keys["networks"] for each in combinations(entry)):
        settings = recipes[given.pop("like")] | given if "like" in given else given
        networks.append(make_settings(FederateSettings if "clients" in settings else TrainSettings, settings))
    known = read_settings(networks[0].data, networks[0].model, keys.get("settings", "published"))
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in keys["methods"]]
    for settings, varied in (each for entry in entries for each in combinations(entry)):
        method, fraction = settings.pop("name"), settings.pop("fraction", 0.0)
        tuned = {} if method == "paper" else known.get(method, {})  # a row of the paper has the paper's settings
        variants.append(MethodVariant(method, {**tuned, **settings}, varied, fraction))
        make_method(method, variants[-1].settings)  # refuses wrong settings
    return Experiment(
        name,
        scale,
        keys["what"],
        tuple(keys["requests"]),
        keys.get("is-sequence", False),
        tuple(keys["seeds"]),
        tuple(networks),
        tuple(variants),
        tuple(relation for text in keys["relations"] for relation in parse_relations(text)),
        keys.get("beside", {}),
        tuple(printed_rows(name)),
    )


def printed_rows(table: str) -> list[TableRow]:
    """The rows of a table of the paper; standard deviations are metrics of their own (forget-sd)."""
    printed, rows = read_json(HERE / "printed.json"), []
    found = printed["tables"].get(table, {"columns": [], "rows": []})  # a search that the paper only mentions has none
    for values in found["rows"]:
        cells = zip(found["columns"], values, strict=True)
        known = {column: value for column, value in cells if value is not None}
        known["method"] = printed["names"][known["method"]]
        numbers = {name: float(value) for name, value in known.items() if name in NUMBERS}
        rows.append(TableRow({name: value for name, value in known.items() if name not in NUMBERS}, {0: numbers}))
    return rows


def combinations(entry: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """All combinations of the values that are lists: the whole entry, and what was chosen from lists.

    >>> [keys for keys, _ in combinations({"ratio": [0.1, 0.2], "name": "ssd"})]
    [{'ratio': 0.1, 'name': 'ssd'}, {'ratio': 0.2, 'name': 'ssd'}]
    """
    lists = {key: value for key, value in entry.items() if isinstance(value, list)}
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        yield dict(entry) | chosen, chosen


def network_key(settings: TrainSettings) -> dict[str, Scalar]:
    """What tells networks of a table apart; a network without orthogonality has no `lambda`."""
    split = settings.split if isinstance(settings, FederateSettings) else "central"
    ortho = settings.ortho_layers if settings.ortho else "none"
    model = settings.model.removesuffix("-early")  # rows of one table
    key: dict[str, Scalar] = {"data": settings.data, "model": model, "split": split, "ortho": ortho}
    key |= {"lambda": settings.ortho} if settings.ortho else {}
    return key | ({"align": settings.align} if isinstance(settings, FederateSettings) else {})


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


def select_rows(experiment: Experiment, methods: str = "", rows: str = "", seeds: str = "") -> Experiment:
    """Only these methods and seeds (with commas between) and the rows with these values (key=value)."""
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
    limits = {key: value for key, value in {"seeds": seeds, "methods": methods, "rows": rows}.items() if value}
    chosen = replace(experiment, networks=networks, requests=requests, variants=variants, limits=limits)
    return replace(chosen, seeds=read_seeds(seeds)) if seeds else chosen


@dataclass(frozen=True)
class DataSummary:
    """How much data a table was run on."""

    classes: int
    train: int
    valid: int  # held out of the training images for validation; the paper has no hold-out
    test: int

    @property
    def text(self) -> str:
        """In words."""
        held = f", {self.valid:,} more held out for validation (the paper has no hold-out)" if self.valid else ""
        return f"{self.classes} classes, {self.train:,} training images{held}, {self.test:,} test images"


def summarise_data(experiment: Experiment, name: str, data: Dataset) -> DataSummary:
    """How much data this is; at the scale `paper`, other data than the paper's is refused unless it is named so."""
    valid = len(data.known_rows) - len(data.train) - len(data.gone)
    found = DataSummary(data.train.classes, len(data.train), valid, len(data.test))
    papers, here = PAPER_DATA.get(name), (found.classes, len(data.known_rows), found.test)
    if experiment.scale == "paper" and here != papers and "other-data" not in experiment.limits:
        numbers = "{} classes, {:,} training and {:,} test images"
        wanted = f"the paper's has {numbers.format(*papers)}" if papers else "the paper does not have it"
        advice = "give all of it, or --other-data, with which no number is judged"
        raise BadData(f"{name} here has {numbers.format(*here)}; {wanted}; {advice}")
    return found


@dataclass(frozen=True)
class PairFinding:
    """Two rows that a claim is about: differences in points or seconds for each seed, and what they come to."""

    rows: tuple[Mapping[str, Any], Mapping[str, Any]]
    differences: tuple[float, ...]
    verdict: str


@dataclass(frozen=True)
class ClaimFinding:
    """A claim of the paper with the pairs of rows here, and the verdicts on the paper's own rows."""

    relation: str
    here: tuple[PairFinding, ...]
    paper: tuple[str, ...]


@dataclass(frozen=True)
class ExperimentResults:
    """The result file of an experiment."""

    schema: ClassVar[int] = 2
    what: str
    command: str
    scale: str
    rows: tuple[SeedRow, ...]
    claims: tuple[ClaimFinding, ...]
    environment: Environment
    data: Mapping[str, DataSummary] = field(default_factory=dict)  # by name


def check_claims(experiment: Experiment, rows: Sequence[SeedRow]) -> tuple[ClaimFinding, ...]:
    """Each claim of the paper, checked on our rows and on the printed ones."""
    ours, findings = over_seeds(rows), []
    for claim in experiment.relations:
        edits = {edited(pair): pair for pair in claim.pairs(ours)}.values()  # each once
        here = [(pair, values) for pair in edits if (values := differences(claim, pair))]
        printed = [values for pair in claim.pairs(experiment.printed) if (values := differences(claim, pair))]
        pairs = [
            PairFinding((a.key, b.key), tuple(v), judge_differences(v, noise_of_images(claim, (a, b))))
            for (a, b), v in here
        ]
        findings.append(ClaimFinding(claim.text, tuple(pairs), tuple(map(judge_differences, printed))))
    return tuple(findings)


def edited(pair: tuple[TableRow, TableRow]) -> str:
    """What tells pairs of rows apart: their keys, with the layers that `ortho` stands for."""
    keys = [dict(row.key) for row in pair]
    for key in keys:
        if key.get("layers") == "ortho":  # without orthogonal layers the deep ones are edited
            key["layers"] = "deep" if key["ortho"] == "none" else key["ortho"]
    return canonical_json(keys)


def printed_beside(experiment: Experiment, row: TableRow) -> Mapping[str, float]:
    """What the paper prints for a row of ours, or for its like in the setting that `beside` names; empty: nothing."""
    key = {**row.key, **experiment.beside}
    for candidate in experiment.printed:
        if all(name in key and as_text(key[name]) == as_text(value) for name, value in candidate.key.items()):
            return candidate.values[0]
    return {}


def row_verdict(experiment: Experiment, row: TableRow) -> str:
    """How a row compares with the printed one; numbers are compared at the paper's own scale only."""
    printed = printed_beside(experiment, row)
    if not row.of("forget"):
        return "refused"
    if "other-data" in experiment.limits:
        return "other data"
    if not printed or experiment.scale != "paper":
        return "other setting" if printed else "not printed"
    off = {metric: abs(fmean(row.of(metric)) - printed[metric]) for metric in METRICS if metric in printed}
    if not all(f"{metric}-sd" in printed for metric in off):
        return f"off by {max(off.values()):.1f}; no sd printed"
    outside = [metric for metric in off if off[metric] > 2 * printed[f"{metric}-sd"]]
    return f"outside 2 sd: {', '.join(outside)}" if outside else "within 2 sd"
