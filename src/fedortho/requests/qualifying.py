"""Qualify a run: draw classes, train reference models, choose a method on some of them, confirm it on the others."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from fedortho.audits.judge import judge_case
from fedortho.audits.qualification import QUALIFICATION, ClassTrial, MethodTrial, Qualification, read_qualification
from fedortho.data.request import ForgetRequest
from fedortho.devices import using_threads
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.methods import make_method, unlearn
from fedortho.methods.method import Method, serves
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.judging import OnStep
from fedortho.requests.levels import erasing_methods
from fedortho.requests.references import case_of, find_references, reference_cost, train_references
from fedortho.requests.run_context import RunContext, open_context
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.files import locked
from fedortho.storage.records import write_record
from fedortho.storage.settings import as_mapping
from fedortho.training.loop import Watch


@dataclass(frozen=True)
class QualifyOptions:
    """How many classes are drawn, and what is tried on them."""

    classes: int = 3  # on whose test images the chosen method is confirmed
    choosing: int = 1  # further ones, on whose validation images it is chosen
    seed: int = 0  # of the draw
    references: int = 2  # reference models for each class
    candidates: tuple[Method, ...] = ()  # cheapest first; none: `erase`, then with all stages reset
    directory: Path | None = None  # of reference models; default: `references` beside the run
    data_dir: str = ""
    device: str = "auto"
    on_training: Watch | None = field(default=None, compare=False)
    on_step: OnStep = field(default=None, compare=False)


def draw_classes(run: Run, options: QualifyOptions) -> Qualification:
    """The classes that the seed draws for this model, before anything is trained; refused where none can be tried."""
    if run.record.is_edited:
        raise FedOrthoError(f"{run.path} has forgotten before; qualify the run that was trained")
    if not run.record.data.valid:
        raise BadData(f"{run.path} has no validation images, on which qualify chooses; train with --valid above 0")
    names = run.record.data.class_names
    gone = () if run.excluded is None else run.excluded.labels(names)
    labels = [label for label in range(len(names)) if label not in gone]
    wanted = options.classes + options.choosing
    for name in ("classes", "choosing", "references"):
        if (number := getattr(options, name)) < 1:
            raise BadSetting(f"{name} is {number}; expected at least 1")
    if wanted > len(labels) - 1:
        asked = f"{wanted} classes are asked for, {options.classes} to confirm and {options.choosing} to choose"
        raise BadSetting(f"{asked}; expected at most {len(labels) - 1}: {run.path} has {len(labels)}, and one is kept")
    drawn = random.Random(f"fedortho qualification {run.record.model.digest} {options.seed}").sample(labels, wanted)
    requests = tuple(f"class:{label}" for label in drawn)
    choosing, confirming = requests[: options.choosing], requests[options.choosing :]
    return Qualification(run.record.model.digest, run.record.data.digest, options.seed, choosing, confirming)


def check_clients(run: Run) -> None:
    """Refuse a federation on whose clients no method can be tried, before reference models are trained for it."""
    settings = run.settings
    if not isinstance(settings, FederateSettings):
        return
    if not (run.path / "clients").is_dir():
        raise FedOrthoError(
            f"{run.path} has no clients/: its clients are not simulated here; qualify serves simulated federations only"
        )
    if settings.without:
        raise FedOrthoError(
            f"{run.path} was trained --without {settings.without}, which its clients still hold; qualify the "
            "federation that was trained with everything"
        )


def qualify_run(run: Run | Path | str, options: QualifyOptions | None = None) -> Qualification:
    """Qualify a run and write qualification.json into it, after every class; a killed one goes on where it stopped.

    On validation images of the choosing classes the first candidate is taken that passes on all of them; it is then
    confirmed on test images of the confirming classes, once. `Qualification.chosen` is None if none passed.
    """
    run, options = open_run(run), options or QualifyOptions()
    check_clients(run)
    file = run.path / QUALIFICATION
    with locked(file), using_threads(run.settings.threads):
        found, run = _begun(run, options), run.at(options.data_dir, options.device)
        context = open_context(run, run.load_data())
        candidates = options.candidates or erasing_methods(run, context.data.train.shape)
        for candidate in candidates:
            if not serves(candidate, ForgetRequest.parse(found.choosing[0])):
                raise BadSetting(f"{candidate.name} serves no class requests; leave it out")
        for candidate in candidates:
            if found.chosen is not None:
                break
            new = MethodTrial(candidate.name, as_mapping(candidate))
            mine = next((trial for trial in found.tried if _is_of(trial, candidate)), new)
            others = tuple(trial for trial in found.tried if trial is not mine)
            for longer in _trials(mine, found.choosing, "valid", partial(_trial, context, options, candidate)):
                found = replace(found, tried=(*others, longer))
                write_record(file, found)
        if (chosen := found.chosen) is None:
            return found
        method = next((each for each in candidates if _is_of(chosen, each)), None)
        method = method or make_method(chosen.method, chosen.settings)  # its settings may be others by now
        mine = found.confirmed or replace(chosen, classes=())
        for longer in _trials(mine, found.confirming, "test", partial(_trial, context, options, method)):
            found = replace(found, confirmed=longer)
            write_record(file, found)
    return found


def _begun(run: Run, options: QualifyOptions) -> Qualification:
    """The qualification of the run's directory, or a new one that is written down before anything is tried."""
    drawn, found = draw_classes(run, options), read_qualification(run.path)
    if found is None:
        write_record(run.path / QUALIFICATION, drawn)
        return drawn
    if replace(found, tried=(), confirmed=None) != drawn:
        raise FedOrthoError(
            f"{run.path / QUALIFICATION} drew {', '.join(found.choosing + found.confirming)} by seed {found.seed} for "
            f"another model, seed or number of classes; remove it to draw again, which voids what it says"
        )
    return found


def _is_of(trial: MethodTrial, method: Method) -> bool:
    return (trial.method, dict(trial.settings)) == (method.name, as_mapping(method))


def _trials(
    mine: MethodTrial, requests: Sequence[str], split: str, trial: Callable[[str, str], ClassTrial]
) -> Iterator[MethodTrial]:
    """The trials of a method with one more class each time; a method that failed is not tried on validation images."""
    for request in requests:
        if request not in {each.request for each in mine.classes} and (mine.passed or split == "test"):
            mine = replace(mine, classes=(*mine.classes, trial(request, split)))
            yield mine


def _trial(context: RunContext, options: QualifyOptions, method: Method, text: str, split: str) -> ClassTrial:
    """Forget one class by a method and audit the result in full, on images of one split."""
    request, run, device = ForgetRequest.parse(text), context.run, context.device
    directory, number = options.directory or run.path.parent / "references", options.references
    references = find_references(run, request, directory)[:number]
    fresh = train_references(run, request, references, directory, context.data, options.on_training)
    references += islice(fresh, number - len(references))
    if options.on_step is not None:
        options.on_step(f"{method.name} on {text}")
    with context.engine() as engine:
        result = unlearn(run.load_model().to(device), engine, request, method)
    data = context.data if split == "test" else replace(context.data, test=context.data.valid)
    alike = counterfactuals(context, method, request, references, directory)
    treated = tuple(each.load_model() for each in alike)
    case = case_of(run, request, data, run, references, device)
    case = replace(case, unlearned=result.model, counterfactuals=treated)
    verdict = judge_case(case, "full", on_step=options.on_step, method=method.name)
    both = (result.model, case.references[0])
    mine, theirs = (replace(context, data=data).accuracies(each, request) for each in both)
    return ClassTrial(
        text,
        split,
        {audit.name: audit.outcome for audit in verdict.results},
        result.patch.after,
        tuple(reference.record.model.digest for reference in references),
        mine.forget,
        mine.retain,
        theirs.retain,
        result.cost.flops,
        max(reference_cost(each, context.data).flops for each in references),
        tuple(each.record.model.digest for each in alike),
    )
