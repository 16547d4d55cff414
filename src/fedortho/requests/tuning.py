"""Hyper-parameters by an equal budget for every method, chosen on validation images, never on test images.

A search takes place on another request than the one that it is for: another class, another client, other samples.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest, as_request
from fedortho.devices import using_threads
from fedortho.engines.query import Selection, draw
from fedortho.errors import BadSetting, Busy, FedOrthoError
from fedortho.methods import find_method, make_method, unlearn
from fedortho.methods.method import Schedule, serves
from fedortho.models.predictions import accuracy, evaluate
from fedortho.requests.comparing import Settings, chosen_methods, read_result, settings_by_method
from fedortho.requests.levels import has_kept
from fedortho.requests.run_context import RunContext, method_for_run, open_context
from fedortho.requests.search import Attempt, Budget, GridSearch, Search, grid_of, is_tunable
from fedortho.requests.shadowing import estimate_limit
from fedortho.runs.run import Run, open_run
from fedortho.storage.files import check_writable, locked, tensors_digest, write_json
from fedortho.storage.provenance import Environment, environment
from fedortho.storage.records import write_record
from fedortho.storage.settings import as_mapping, field_types

PATIENCE = 60.0  # seconds to wait while another process writes


@dataclass(frozen=True)
class TuningTrials:
    """FILE.trials.json: the searches by method, and what they were made with."""

    schema: ClassVar[int] = 2
    model: str  # digest
    request: str  # that the settings are for
    tuned_on: str  # the request that the trials served
    budget: Budget
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings to start from
    shadows: int = 0  # models that say which accuracy is wanted on the forget set; 0: as unseen images
    wanted: float | None = None  # what they say
    searches: Mapping[str, Search] = field(default_factory=dict)
    environment: Environment | None = None


def tune(
    run: Run | Path | str,
    request: ForgetRequest | str,
    methods: str | Sequence[str] = "all",
    *,
    on: ForgetRequest | str | None = None,
    out: Path | str | None = None,
    settings: Settings = "published",
    budget: Budget | None = None,
    shadows: int = 0,
    data: Dataset | None = None,
    watch: Callable[[str, int, Attempt], None] | None = None,
) -> dict[str, Search]:
    """Search the hyper-parameters of methods on validation images, with the same budget for every method.

    The trials serve the request `on`, by default another of the same kind and size, drawn by the budget's seed, so that
    nothing is chosen on what is reported. The JSON file `out` receives the best settings by method, for
    `compare(settings=out)`, and OUT.trials.json all attempts. With `shadows` the accuracy wanted on clients or samples
    is what so many shadow models say of those that they did not see. An interrupted search goes on after its last
    attempt; several processes may tune different methods into one file. `settings` are those to start from. `all` are
    the methods that serve the request and have something to tune. `watch` receives name, number and attempt.
    """
    run, budget = open_run(run), budget or Budget()
    data = data or run.load_data()
    request = as_request(request, data)
    names, base, context = chosen_methods(methods), settings_by_method(run, settings), open_context(run, data)
    if methods == "all":
        able = [name for name in names if is_tunable(name) and serves(find_method(name), request)]
        names = [name for name in able if has_kept(run, name)]
    if shadows and request.classes:
        raise BadSetting(f"shadow models are for clients and samples; {request} is to be answered 0 %: leave them out")
    for name in names:
        grid_of(name)  # refuses a method that has nothing to tune
        _check_served(name, request)
        if not has_kept(run, name):
            raise FedOrthoError(f"{name} replays what {run.path} did not keep; leave it out")
    on = as_request(on, data) if on else stand_in(request, context, budget.seed)
    about = TuningTrials(run.record.model.digest, str(request), str(on), budget, dict(base), shadows)
    file = None if out is None else _TuningFile(Path(out), about)
    wanted = None if file is None else file.about.wanted
    if shadows and wanted is None:
        how: dict[str, Any] = {"shadows": shadows, "data": data, "device": run.settings.device}
        wanted = estimate_limit(run, on, **how).limit
    if file is not None:
        file.about = replace(about, wanted=wanted)
    search = partial(tune_method, context, on, budget=budget, wanted=wanted, watch=watch)
    if file is None:
        return {name: search(name, base=base.get(name)) for name in names}
    busy = []
    for name in names:
        try:
            with locked(file.path.with_suffix(f".{name}")):
                known = file.searches().get(name, Search(()))
                if not known.settled:  # a larger budget may go on
                    search(name, base=base.get(name), known=known.attempts, save=partial(file.write, name))
        except Busy:
            busy.append(name)
    found = file.write()
    if busy := [name for name in busy if name not in found or found[name].best is None]:
        raise Busy(f"another process is tuning {', '.join(busy)} into {out}; run this again when it has finished")
    return found


def _check_served(name: str, request: ForgetRequest) -> None:
    if not serves(find_method(name), request):
        raise FedOrthoError(f"{name} does not serve {request}; leave it out")


def stand_in(request: ForgetRequest, context: RunContext, seed: int) -> ForgetRequest:
    """Another request of the same kinds, drawn by a seed, of nothing that the run has forgotten before.

    It names as many other classes and clients, and other samples of the same labels.
    """
    drawn, train = random.Random(seed), context.data.train
    taken = request if context.forgotten is None else context.forgotten + request
    labels = set(taken.labels(train.names))
    classes = [str(label) for label in range(train.classes) if label not in labels]
    clients = [client for client in context.clients or () if client not in taken.clients]
    left = Selection(exclude=taken).select(train, context.clients)
    asked, samples = list[int](), list[int]()
    if request.samples:
        asked = ForgetRequest(samples=request.samples).split(train, context.clients)[0].labels.tolist()
    try:
        for label, number in Counter(asked).items():
            samples += drawn.sample(left.rows[left.labels == label].tolist(), number)
        classes, clients = drawn.sample(classes, len(request.classes)), drawn.sample(clients, len(request.clients))
    except ValueError as error:
        raise FedOrthoError(f"there is no other request like {request} to tune on; name one with --on") from error
    return ForgetRequest(tuple(classes), tuple(clients), tuple(map(str, samples)))


def tune_method(
    context: RunContext,
    request: ForgetRequest,
    name: str,
    budget: Budget | None = None,
    *,
    base: Mapping[str, Any] | None = None,
    wanted: float | None = None,
    known: Sequence[Attempt] = (),
    save: Callable[[Search], object] | None = None,
    watch: Callable[[str, int, Attempt], None] | None = None,
) -> Search:
    """The search of one method on this very request; each attempt changes some settings of `base`.

    A class should never be predicted; samples and clients should be recognised as often as `wanted` or, without it, as
    unseen images of their labels are by the original model: that ignores that these images differ from others. An
    attempt that fails (its loss diverges) counts as the worst. `known` attempts are not made again.
    """
    _check_served(name, request)
    budget, reported, save = budget or Budget(), len(context.data.train), save or (lambda _: None)
    images = min(budget.images, reported) if context.clients is None else reported
    search, contexts = GridSearch(name, budget, images, reported), {reported: context}
    if images < reported:
        contexts[images] = _on_fewer_images(context, request, images, budget.seed)
    with using_threads(context.run.settings.threads):
        before, unseen = _baseline(context, request)
        wanted = unseen if wanted is None else wanted
        while (step := search.following()) is not None:
            settings, images = step
            here = (images, search.place(settings))
            same = [each for each in known if (each.images, search.place(each.settings)) == here]
            settings = {**(base or {}), **settings}
            tried = same[0] if same else _attempt(contexts[images], request, name, settings, budget, before, wanted)
            search.made.append(tried)
            if not same:
                save(Search(tuple(search.made)))
                if watch is not None:
                    watch(name, len(search.made) - 1, tried)
    result = search.result()
    save(result)
    return result


def _on_fewer_images(context: RunContext, request: ForgetRequest, images: int, seed: int) -> RunContext:
    """The context with some of its training images; clients and samples that are forgotten stay complete."""
    train = context.data.train
    if request.kind == "class":
        return replace(context, data=replace(context.data, train=draw(train, images, seed)))
    chosen = request.mask(train, context.clients)
    others = torch.nonzero(~chosen).flatten()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
    chosen[others[order[: max(images - int(chosen.sum()), 1)]]] = True
    return replace(context, data=replace(context.data, train=train.subset(torch.nonzero(chosen).flatten())))


def _baseline(context: RunContext, request: ForgetRequest) -> tuple[float, float]:
    """Retain accuracy before, and the wanted forget accuracy: 0 on images of a class, else that of unseen images."""
    model = context.run.load_model().to(context.device)
    _, retain = _measured(context, model, request)
    if request.kind == "class":
        return retain, 0.0
    forget = Selection(include=request).select(context.data.train, context.clients)
    unseen = Selection(exclude=context.forgotten).select(context.data.valid, context.clients)
    shares = evaluate(model, unseen, device=context.device).per_class
    right = torch.tensor([retain if share is None else share for share in shares])
    right[request.labels(forget.names)] = 0.0
    return retain, float(right[forget.labels].mean())


def _measured(context: RunContext, model: nn.Module, request: ForgetRequest) -> tuple[float, float]:
    """Forget and retain accuracy on validation images; clients and samples are training images themselves."""
    model = model.to(context.device)
    part = context.data.valid if request.kind == "class" else context.data.train
    forget = Selection(include=request).select(part, context.clients)
    everything = request if context.forgotten is None else context.forgotten + request
    retain = Selection("valid", None, everything).select(context.data.valid, context.clients)
    return accuracy(model, forget, device=context.device), accuracy(model, retain, device=context.device)


def _attempt(
    context: RunContext,
    request: ForgetRequest,
    name: str,
    settings: Mapping[str, Any],
    budget: Budget,
    before: float,
    wanted: float,
) -> Attempt:
    kind, images = find_method(name), len(context.data.train)
    if issubclass(kind, Schedule):
        published = as_mapping(make_method(name, settings))["epochs"]
        settings = {**settings, "epochs": min(published, budget.epochs)}
    seed = {"seed": budget.seed} if "seed" in field_types(kind) else {}
    try:
        with context.engine() as engine:
            method = method_for_run(context.run, name, settings, seed)
            model = unlearn(context.run.load_model(), engine, request, method).model
        forget, retain = _measured(context, model, request)
    except FedOrthoError as error:
        return Attempt(dict(settings), images, 1.0, 0.0, 1.0, str(error))
    score = (abs(forget - wanted) + max(0.0, before - retain)) / 2
    is_unchanged = tensors_digest(model.cpu().state_dict()) == context.run.record.model.digest
    return Attempt(dict(settings), images, forget, retain, score, unchanged=is_unchanged)


class _TuningFile:
    """The best settings by method, and beside them all searches; several processes may add to it."""

    def __init__(self, path: Path, about: TuningTrials) -> None:
        self.path, self.trials, self.about = path, path.with_suffix(".trials.json"), about
        if path.is_dir():
            raise FedOrthoError(f"{path} is a directory; give the file to write, such as --out {path / 'tuned.json'}")
        if path.exists() and not self.trials.exists():
            raise FedOrthoError(f"{path} exists without {self.trials.name} beside it; choose another --out")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedOrthoError(f"{path} cannot be written: {error.strerror}; choose another --out") from error
        check_writable(path.parent)
        if self.trials.exists() and (known := read_result(TuningTrials, self.trials).wanted) is not None:
            self.about = replace(about, wanted=known)  # shadow models need not be trained again
            self.searches()  # refuses what is about something else

    def searches(self) -> dict[str, Search]:
        """The searches of earlier calls; a file about another model, request, budget or settings is refused."""
        if not self.trials.exists():
            return {}
        found = read_result(TuningTrials, self.trials)
        if replace(found, searches={}, environment=None) != self.about:
            raise FedOrthoError(
                f"{self.trials} is about another model, request, budget or settings; give another --out"
            )
        return dict(found.searches)

    def write(self, name: str = "", search: Search | None = None) -> dict[str, Search]:
        """Add a search, if one is given, and write the best settings of all methods; returns all searches."""
        with locked(self.path.with_suffix(".writing"), PATIENCE):
            every = self.searches()
            if search is not None:
                every[name] = search
                write_record(self.trials, replace(self.about, searches=every, environment=environment()))
            if best := {name: dict(found.best.settings) for name, found in every.items() if found.best is not None}:
                write_json(self.path, best)
        return every
