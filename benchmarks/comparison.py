"""All methods on the same networks: hyper-parameters tuned on one class by an equal budget, compared on others.

    python benchmarks/comparison.py all|others|small --data-dir ../shared/data

Each does what is left of the following, in this order; they can be killed and started again, and several processes
started alike share the work. Networks come from --networks and are trained there if they are missing; manifest.py says
how the classes were drawn.

1. vgg-mini: the hyper-parameters of each method, tuned on frog of seed 0 as src/fedortho/requests/search.py says, at
   the one pass over all images at which they are reported;
2. vgg-mini, seed 0: each method, as soon as it is tuned, on automobile (seen during development), airplane and truck;
   methods whose papers have two passes also with two; `hide` also on a copy of the run that kept no statistics since
   training, where it reads a sample instead;
3. vgg-mini, seeds 1 and 2, class by class, then with two passes; 4. and 5. resnet-mini: as 1. and 2., with one pass;
6. vgg-mini, seed 0: as many passes as the papers use, with the settings that one pass was tuned for, class by class;
   at last EU-k and CF-k, whose paper has 62.

`others` are 100 samples and a client, on the images of the package. Its networks are trained without augmentation, so
that they know their training images by heart and there is something to forget: one network of twelve epochs, and a
federation of 20 clients (Dirichlet 0.3, five a round, twenty rounds of two local epochs), each with seeds 0 to 2 and
one partition. Samples and client were drawn before any of these networks was trained: `drawn_requests` draws them by
`random.Random("fedortho comparison others 2026-11-18")`. Hyper-parameters are tuned on seed 0, on other samples of the
same labels and on another client, which the search's seed draws; the accuracy wanted on these comes from eight shadow
models. Then all methods are compared on every seed with one pass or round, and on seed 0 with as many as their papers.

`small` is the class Dress on one network of two epochs, on the images of the package, with one pass and with as many as
the papers have, by settings that were tuned on Sneaker: half an hour.

Results go to comparison.json in benchmarks/results (those of `small` to comparison-fashion-mini.json), the chosen
values and whether they lie inside their grids to searches.json, all trials to tuning/, edited models to
runs/comparison; finished settings for classes are copied to src/fedortho/methods/tuned.
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from manifest import (
    DRAWN,
    REPORTED,
    SEEDS,
    TUNED_ON,
    benchmark_parser,
    check_digest,
    open_network,
    original_name,
    patiently,
)
from result_files import add_row, read_results, write_results

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.query import draw
from fedortho.errors import Busy, FedOrthoError
from fedortho.methods import METHODS
from fedortho.methods.hyperparameters import TUNED
from fedortho.methods.method import Schedule, serves
from fedortho.requests.comparing import compare
from fedortho.requests.federated_jobs import federate_run
from fedortho.requests.references import find_reference, reference_settings
from fedortho.requests.run_context import open_context
from fedortho.requests.search import Attempt, Budget, is_tunable
from fedortho.requests.tuning import TuningTrials, tune
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import locked, read_json, write_json
from fedortho.storage.records import read_record, to_json
from fedortho.storage.settings import field_types

HERE = Path(__file__).parent
MODELS = HERE.parent / "runs" / "comparison"
SAMPLING = ("hide",)  # methods that draw a sample where statistics were not kept
CENTRAL = [name for name in METHODS if name != "federaser"]
FEW, MANY = 2, 10  # passes: little more than one, and as much as retraining
ORDER = ("engine", "model", "seed", "request")
COMMAND = "python benchmarks/comparison.py all|others|small"
BY_HEART: dict[str, Any] = {"threads": 1, "crop": 0, "flip": 0.0, "split_seed": 0}
NETWORK = TrainSettings(epochs=12, keep_epochs="all", **BY_HEART)
FEDERATION = FederateSettings(
    clients=20,
    split="dirichlet:0.3",
    fraction=0.25,
    rounds=20,
    epochs=2,
    batch_size=32,
    keep_rounds="all",
    keep_updates=True,
    **BY_HEART,
)
OTHER_SEEDS = (0, 1, 2)
SMALL, SMALL_REQUEST = TrainSettings(epochs=2, threads=1), "class:Dress"
SAMPLES, SHADOWS = 100, 8
WHAT = "methods side by side; test images; costs by what ran"


@dataclass(frozen=True)
class Job:
    """One method: tuned, or compared on a request."""

    part: str  # tune or compare
    run: Run
    request: ForgetRequest
    method: str
    passes: str = "one"  # or published
    tuned: str = ""  # name of the file of tuned settings
    kept: bool = True  # statistics since training, if the method uses them

    @property
    def epochs(self) -> int:
        kind = METHODS[self.method]
        return kind().epochs if issubclass(kind, Schedule) and self.passes == "published" else 1

    @property
    def label(self) -> str:
        name = self.method if self.kept else f"{self.method}, nothing kept"
        return name if self.epochs == 1 else f"{name} ×{self.epochs}"

    @property
    def named(self) -> tuple[str, str, str]:
        """The key as a part of a file's name, where 100 samples are cut short."""
        return self.run.path.name, self.request.word, self.label

    @property
    def key(self) -> tuple[str, str, str]:
        return self.run.path.name, str(self.request), self.label


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("part", choices=("all", "others", "small"))
    parser.add_argument("--methods", default="", help="only these, separated by commas")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="directory of the results")
    parser.add_argument("--edited", type=Path, default=MODELS, help="directory of the edited models")
    for name, value in asdict(Budget()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of the search's budget")
    parser.add_argument("--train-images", type=int, default=0, help="of every method, to try this script; 0: all")
    arguments = parser.parse_args(words)
    bench = Bench(arguments)
    jobs = {"all": bench.jobs, "others": bench.other_jobs, "small": bench.small_jobs}[arguments.part]
    bench.work(list(jobs()))


class Bench:
    """The jobs, what is known of them from the result files, and how they are done."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.out = arguments.out / ("comparison-fashion-mini.json" if arguments.part == "small" else "comparison.json")
        self.budget = Budget(**{name: getattr(arguments, name) for name in asdict(Budget())})
        self.data = cache(self._data)  # by run directory

    def network(self, model: str, seed: int = 0) -> Run:
        name = original_name(model, seed)
        return open_network(self.arguments.networks, name, self.arguments.data_dir).at(self.arguments.data_dir)

    def _data(self, path: Path) -> Dataset:
        data = open_run(path).load_data(self.arguments.data_dir)
        return replace(data, train=draw(data.train, self.arguments.train_images, 0))

    def other_network(self, settings: TrainSettings, seed: int) -> Run:
        """A network or federation of the part `others`, trained if it is missing."""
        settings, start = replace(settings, seed=seed), self.arguments.networks / "fashion-mini"
        if isinstance(settings, FederateSettings):
            return patiently(lambda: federate_run(Path(f"{start}-federation-by-heart-seed{seed}"), settings))
        return patiently(lambda: train_run(Path(f"{start}-network-by-heart-seed{seed}"), settings))

    def jobs(self) -> Iterator[Job]:
        """Everything, in the order of value; what is compared waits for its search and goes before the next one."""
        vgg, resnet, requests = self.network("vgg-mini"), self.network("resnet-mini"), (*DRAWN, REPORTED)
        published = self._published(vgg, requests)
        for request in requests:
            yield from self._comparing(vgg, request)
        yield from (job for job in published if job.epochs == FEW)
        yield from self._tuning(vgg, REPORTED)
        others = [self.network("vgg-mini", seed) for seed in SEEDS["vgg-mini"][1:]]
        for request in requests:
            for run in others:
                yield from self._comparing(run, request)
        few = [job for run in others for job in self._published(run, requests) if job.epochs == FEW]
        yield from sorted(few, key=lambda job: list(METHODS).index(job.method))
        for request in requests:
            yield from self._comparing(resnet, request)
        yield from self._tuning(resnet, REPORTED)
        more = [job for job in published if job.epochs > FEW]
        yield from sorted(more, key=lambda job: (job.epochs > MANY, requests.index(str(job.request))))

    def other_jobs(self) -> Iterator[Job]:
        """Samples, then a client: what is compared goes before the next search, seed by seed."""
        firsts = [self.other_network(settings, OTHER_SEEDS[0]) for settings in (NETWORK, FEDERATION)]
        requests = drawn_requests(self.data(firsts[0].path))
        for run, request in zip(firsts, requests, strict=True):
            yield from self._comparing(run, request)
            yield from self._tuning(run, request)
        for seed in OTHER_SEEDS[1:]:
            for settings, request in zip((NETWORK, FEDERATION), requests, strict=True):
                yield from self._comparing(self.other_network(settings, seed), request)
        for run, request in zip(firsts, requests, strict=True):
            yield from self._published(run, [request])

    def small_jobs(self) -> Iterator[Job]:
        """One class of a small network: all methods with one pass, then those of more passes."""
        run = patiently(lambda: train_run(self.arguments.networks / "fashion-mini-network-small", SMALL))
        yield from self._comparing(run, SMALL_REQUEST)
        yield from self._published(run, [SMALL_REQUEST])

    def _methods(self, run: Run, request: ForgetRequest) -> list[str]:
        wanted = self.arguments.methods.split(",") if self.arguments.methods else list(METHODS)
        able = list(METHODS) if isinstance(run.settings, FederateSettings) else CENTRAL
        return [name for name in able if name in wanted and serves(METHODS[name], request)]

    def _tuning(self, run: Run, text: str) -> Iterator[Job]:
        request = ForgetRequest.parse(text)
        for name in self._methods(run, request):
            if is_tunable(name):
                yield Job("tune", run, request, name, tuned=tuned_name(run, request))

    def _comparing(self, run: Run, text: str, passes: str = "one") -> Iterator[Job]:
        request = ForgetRequest.parse(text)
        for name in self._methods(run, request):
            yield Job("compare", run, request, name, passes, tuned_name(run, request))
            if name in SAMPLING and passes == "one" and not isinstance(run.settings, FederateSettings):
                yield Job("compare", run, request, name, passes, tuned_name(run, request), kept=False)

    def _published(self, run: Run, requests: Sequence[str]) -> list[Job]:
        """Methods with as many passes as their papers, if that is more than one, those with few passes first."""
        jobs = [job for request in requests for job in self._comparing(run, request, "published")]
        return sorted((job for job in jobs if job.epochs > 1), key=lambda job: job.epochs)

    def work(self, jobs: list[Job]) -> None:
        """Do the first job that is left, ready and not with another process, until none is left."""
        failed: list[Job] = []
        while waiting := [job for job in jobs if job not in failed and not self.is_done(job)]:
            ready = [job for job in waiting if self.is_ready(job)]
            if not ready and not any(job.part == "tune" for job in waiting):
                break  # their searches failed
            if not self._do_one(ready, failed):
                time.sleep(10)
        for job in failed:
            print("failed:", job.part, *job.named, file=sys.stderr, flush=True)

    def _do_one(self, jobs: list[Job], failed: list[Job]) -> bool:
        for job in jobs:
            try:
                with locked(self.arguments.out / "-".join((job.part, job.passes, *job.named))):
                    if not self.is_done(job):
                        print(time.strftime("%H:%M:%S"), job.part, *job.named, flush=True)
                        (self.tune if job.part == "tune" else self.compare)(job)
                    return True
            except Busy:
                continue
            except FedOrthoError as error:
                print(job.part, *job.named, error, file=sys.stderr, flush=True)
                failed.append(job)
                return True
        return False

    def is_done(self, job: Job) -> bool:
        if job.part == "tune":
            return job.method in self.tuned(job)
        return any((row["run"], row["request"], row["label"]) == job.key for row in self.rows())

    def is_ready(self, job: Job) -> bool:
        """Whether the settings that the job needs are tuned; a missing reference is trained by the row of `retrain`."""
        return job.part == "tune" or not is_tunable(job.method) or job.method in self.tuned(job)

    def rows(self) -> tuple[Mapping[str, Any], ...]:
        return read_results(self.out).rows if self.out.exists() else ()

    def tuned(self, job: Job) -> dict[str, Any]:
        """The settings of the methods whose search has ended, from its trials, which git keeps."""
        path = self.arguments.out / "tuning" / f"{job.tuned}.trials.json"
        searches = read_record(TuningTrials, path).searches if path.exists() else {}
        return {name: dict(search.best.settings) for name, search in searches.items() if search.best}

    def tune(self, job: Job) -> None:
        data, path = self.data(job.run.path), self.arguments.out / "tuning" / f"{job.tuned}.json"
        on = TUNED_ON if job.request.kind == "class" else None  # None: drawn
        base: dict[str, dict[str, Any]] = {}
        if isinstance(job.run.settings, FederateSettings):
            size = {"batch_size": job.run.settings.batch_size}
            base = {name: size for name, kind in METHODS.items() if "batch_size" in field_types(kind)}
        tune(
            job.run,
            job.request,
            [job.method],
            on=on,
            out=path,
            settings=base,
            budget=self.budget,
            data=data,
            shadows=SHADOWS if on is None else 0,
            watch=print_trial,
        )
        write_searches(self.arguments.out)
        if self.arguments.out == HERE / "results" and job.request.kind == "class":
            shipped = TUNED / path.name  # methods whose search has not ended keep what they had
            write_json(shipped, (read_json(shipped) if shipped.exists() else {}) | read_json(path))

    def compare(self, job: Job) -> None:
        is_federation = isinstance(job.run.settings, FederateSettings)
        place = self.arguments.edited / f"{job.run.path.name}-{job.request.word}"
        place = place if job.passes == "one" else place.with_name(f"{place.name}-published")
        place = place if job.kept else place.with_name(f"{place.name}-nothing-kept")
        (row,) = compare(
            job.run if job.kept else without_ledger(job.run, self.arguments.edited / "nothing-kept"),
            job.request,
            [job.method],
            out=place,
            settings=self.tuned(job),
            passes=job.passes,
            references=self.arguments.networks,
            data=self.data(job.run.path),
        )
        if job.method == "retrain":
            check_digest(find_reference_of(job, self.arguments.networks, self.arguments.data_dir))
        trials = self.arguments.out / "tuning" / f"{job.tuned}.trials.json"
        on = read_record(TuningTrials, trials).tuned_on if is_tunable(job.method) else ""
        values = {key: value for key, value in to_json(row).items() if key not in ("schema", "environment")}
        about: dict[str, Any] = {
            "run": job.run.path.name,
            "model": job.run.settings.model,
            "seed": job.run.settings.seed,
            "engine": "federation" if is_federation else "central",
            "request": str(job.request),
            "label": job.label,
            "tuned-on": on,
        }
        if job.method == "retrain":  # beside it a table shows the model that all start from
            context = open_context(job.run, self.data(job.run.path))
            about["before"] = to_json(context.accuracies(job.run.load_model(), job.request))
        add_row(self.out, about | values, ("run", "request", "label"), row_order, WHAT, COMMAND)
        print({"label": job.label, "accuracies": values["accuracies"], "refused": row.refused}, flush=True)


def without_ledger(run: Run, directory: Path) -> Run:
    """A copy of a run that kept no statistics since training, nor did the clients of a federation."""
    place = directory / run.path.name
    with locked(place, timeout=60):
        if not (place / "run.json").exists():
            left_out = shutil.ignore_patterns("ledger*", "epochs", "rounds", "updates", "run.json")
            shutil.copytree(run.path, place, ignore=left_out, dirs_exist_ok=True)
            shutil.copy(run.path / "run.json", place)  # the last file, so that a killed copy is made again
    return open_run(place).at(run.settings.data_dir)


def drawn_requests(data: Dataset) -> tuple[str, str]:
    """The samples and the client of the part `others`."""
    drawn = random.Random("fedortho comparison others 2026-11-18")
    samples = drawn.sample(data.train.rows.tolist(), SAMPLES)
    return f"samples:{','.join(map(str, sorted(samples)))}", f"client:{drawn.randrange(FEDERATION.clients)}"


def tuned_name(run: Run, request: ForgetRequest) -> str:
    kind = "" if request.kind == "class" else f"-{request.kind}"
    engine = "federation-" if isinstance(run.settings, FederateSettings) else ""
    return f"{engine}{run.settings.data}-{run.settings.model}{kind}"


def find_reference_of(job: Job, references: Path, data_dir: str) -> Run:
    settings = reference_settings(job.run.at(data_dir), job.request)
    found = find_reference(references, settings, job.run.record.data.digest)
    assert found is not None, "it was compared with"
    return found


def row_order(row: Mapping[str, Any]) -> Any:
    known = list(METHODS)
    place = known.index(row["method"]) if row["method"] in known else len(known)  # one that is gone since
    return [*(row[word] for word in ORDER), place, row.get("label", "")]


def write_searches(out: Path) -> None:
    """searches.json: each chosen value, the range in which it was searched, and whether it lies inside."""
    with locked(out / "searches.writing", timeout=60):
        rows = []
        for path in sorted((out / "tuning").glob("*.trials.json")):
            found = read_record(TuningTrials, path)
            for method, search in found.searches.items():
                about = {"file": path.name.removesuffix(".trials.json"), "tuned-on": found.tuned_on, "method": method}
                score = None if search.best is None else search.best.score
                tried = {"attempts": len(search.attempts), "settled": search.settled, "score": score}
                rows += [about | {"setting": name} | to_json(one) | tried for name, one in search.choices.items()]
        what = "chosen hyper-parameters; settled: the best was compared with all its neighbours at the reported size"
        write_results(out / "searches.json", what, COMMAND, rows)


def print_trial(name: str, number: int, trial: Attempt) -> None:
    print(time.strftime("%H:%M:%S"), name, number, json.dumps(asdict(trial)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
