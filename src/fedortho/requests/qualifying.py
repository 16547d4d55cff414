"""Qualify a run: draw classes, train reference models, choose a method on some of them, confirm it on the others."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedortho.audits.judge import judge_case
from fedortho.audits.qualification import (
    QUALIFICATION,
    ClassTrial,
    MethodTrial,
    Qualification,
    read_qualification,
)
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.evaluation.case import Case
from fedortho.methods import unlearn
from fedortho.methods.method import Method, serves
from fedortho.requests.references import (
    find_references,
    reference_cost,
    reference_name,
    reference_settings,
    train_reference,
)
from fedortho.requests.run_context import method_for_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import load_ledger
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
    candidates: tuple[Method, ...] = ()  # cheapest first; none: `regrow` from its last stage to all stages
    directory: Path | None = None  # of reference models; default: `references` beside the run
    data_dir: str = ""
    device: str = "auto"
    on_training: Watch | None = field(default=None, compare=False)
    on_step: Callable[[str], None] | None = field(default=None, compare=False)


def draw_classes(run: Run, options: QualifyOptions) -> Qualification:
    """The classes that the seed draws for this model, before anything is trained."""
    names, excluded = run.record.data.class_names, run.excluded
    gone = () if excluded is None else excluded.labels(names)
    labels = [label for label in range(len(names)) if label not in gone]
    wanted = options.classes + options.choosing
    if options.classes < 1 or options.choosing < 1 or options.references < 1:
        raise BadSetting("classes, choosing and references must be at least 1")
    if wanted > len(labels) - 1:
        raise BadSetting(f"{wanted} classes are asked for; {run.path} has {len(labels)}, and one must be left to keep")
    drawn = random.Random(f"fedortho qualification {run.record.model.digest} {options.seed}").sample(labels, wanted)
    requests = tuple(f"class:{label}" for label in drawn)
    choosing, confirming = requests[: options.choosing], requests[options.choosing :]
    return Qualification(run.record.model.digest, run.record.data.digest, options.seed, choosing, confirming)


def qualify_run(run: Run | Path | str, options: QualifyOptions | None = None) -> Qualification:
    """Qualify a run and write qualification.json into it, after every class; a killed one goes on where it stopped.

    On validation images of the choosing classes the first candidate is taken that passes on all of them; it is then
    confirmed on test images of the confirming classes, once. `Qualification.chosen` is None if none passed.
    """
    run, options = open_run(run), options or QualifyOptions()
    _check(run)
    with locked(run.path / QUALIFICATION), using_threads(run.settings.threads):
        found = _begun(run, options)
        data = run.load_data(options.data_dir)
        candidates = options.candidates or default_candidates(run)
        for candidate in candidates:
            if not serves(candidate, ForgetRequest.parse(found.choosing[0])):
                raise BadSetting(f"{candidate.name} serves no class requests; leave it out")
        qualifier = _Qualifier(run, data, options)
        for candidate in candidates:
            if found.chosen is not None:
                break
            found = _tried(qualifier, found, candidate)
        if found.chosen is not None:
            found = _confirmed(qualifier, found, candidates)
    return found


def default_candidates(run: Run) -> tuple[Method, ...]:
    """`regrow` with its defaults for this run: the method of the level erase."""
    return (method_for_run(run, "regrow"),)


def _check(run: Run) -> None:
    if isinstance(run.settings, FederateSettings):
        raise FedOrthoError(f"{run.path} is a federation; qualify serves runs that were trained on one machine")
    if run.record.is_edited:
        raise FedOrthoError(f"{run.path} has forgotten before; qualify the run that was trained")


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


@dataclass(frozen=True)
class _Qualifier:
    run: Run
    data: Dataset
    options: QualifyOptions

    @property
    def device(self) -> torch.device:
        return choose_device(self.options.device)

    def trial(self, method: Method, text: str, split: str) -> ClassTrial:
        """Forget one class by a method and audit the result in full, on images of one split."""
        request, model = ForgetRequest.parse(text), self.run.load_model().to(self.device)
        references = self.references(request)
        if self.options.on_step is not None:
            self.options.on_step(f"{method.name} on {text}")
        ledger = load_ledger(self.run.path / "ledger.safetensors", model)
        engine = CentralEngine(self.data, ledger, None, self.device, build=self.run.new_model)
        result = unlearn(model, engine, request, method)
        data = self.data if split == "test" else replace(self.data, test=self.data.valid)
        retrained = [reference.load_model() for reference in references]
        case = Case(result.model, model, tuple(retrained), data, request, device=self.device)
        verdict = judge_case(case, "full", on_step=self.options.on_step, method=method.name)
        mine, theirs = (
            accuracies_of(each.to(self.device), data, request, device=self.device)
            for each in (result.model, retrained[0])
        )
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
            reference_cost(references[0], self.data).flops,
        )

    def references(self, request: ForgetRequest) -> list[Run]:
        """Reference models of the class, found or trained and kept."""
        directory = self.options.directory or self.run.path.parent / "references"
        found = find_references(self.run, request, directory, self.options.data_dir)
        seeds = {reference.settings.seed for reference in found}
        fresh = (seed for seed in range(self.run.settings.seed, 10**6) if seed not in seeds)
        while len(found) < self.options.references:
            settings = reference_settings(self.run, request, seed=next(fresh), data_dir=self.options.data_dir)
            name = reference_name(self.run, request, settings)
            found.append(train_reference(directory, name, settings, data=self.data, watch=self.options.on_training))
        return found[: self.options.references]


def _tried(qualifier: _Qualifier, found: Qualification, method: Method) -> Qualification:
    """The qualification with one candidate tried on the choosing classes, until one fails."""
    for request in found.choosing:
        mine = _trial_of(found.tried, method)
        if request in {trial.request for trial in mine.classes}:
            continue
        if not mine.passed:
            break
        mine = replace(mine, classes=(*mine.classes, qualifier.trial(method, request, "valid")))
        others = tuple(trial for trial in found.tried if not _is_of(trial, method))
        found = _kept(qualifier.run, replace(found, tried=(*others, mine)))
    return found


def _confirmed(qualifier: _Qualifier, found: Qualification, candidates: Sequence[Method]) -> Qualification:
    chosen = found.chosen
    assert chosen is not None, "the caller looked"
    method = next((each for each in candidates if _is_of(chosen, each)), None)
    if method is None:
        raise FedOrthoError(f"{chosen.method} was chosen with other settings; give the candidates of the first call")
    for request in found.confirming:
        mine = found.confirmed or replace(chosen, classes=())
        if request in {trial.request for trial in mine.classes}:
            continue
        mine = replace(mine, classes=(*mine.classes, qualifier.trial(method, request, "test")))
        found = _kept(qualifier.run, replace(found, confirmed=mine))
    return found


def _trial_of(tried: Sequence[MethodTrial], method: Method) -> MethodTrial:
    return next((trial for trial in tried if _is_of(trial, method)), MethodTrial(method.name, as_mapping(method)))


def _is_of(trial: MethodTrial, method: Method) -> bool:
    return (trial.method, dict(trial.settings)) == (method.name, as_mapping(method))


def _kept(run: Run, found: Qualification) -> Qualification:
    write_record(run.path / QUALIFICATION, found)
    return found
