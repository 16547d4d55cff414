"""Judge a run that has served a request: find or train reference models, measure, audit, write verdict.json."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedortho.audits import check_audits
from fedortho.audits.judge import judge_case
from fedortho.audits.qualification import read_qualification
from fedortho.audits.verdict import FILE, IMPORTS, Verdict, read_verdict, write_verdict
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.errors import BadSetting
from fedortho.evaluation.case import COUNTERFACTUALS, REFERENCES
from fedortho.evaluation.shadows import ShadowSettings
from fedortho.federated.server import train_on
from fedortho.methods import make_method
from fedortho.requests.counterfactuals import counterfactuals
from fedortho.requests.references import (
    case_of,
    check_reference,
    check_reference_settings,
    find_references,
    original_of,
    reference_name,
    reference_settings,
    train_references,
)
from fedortho.requests.run_context import open_context
from fedortho.requests.shadowing import shadow_plan, shadow_settings
from fedortho.runs.purge import known_copies
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, last_request, open_run, served_record
from fedortho.runs.settings import FederateSettings
from fedortho.storage.files import check_writable
from fedortho.storage.journal import append_entry
from fedortho.storage.records import to_json
from fedortho.training.loop import Watch
from fedortho.training.recipe import Recipe

logger = logging.getLogger(__name__)
OnStep = Callable[[str], None] | None  # receives the title of each measurement that begins


@dataclass(frozen=True)
class JudgeOptions:
    """How a run is judged."""

    audit: str = "quick"  # budget: quick, full or none
    only: tuple[str, ...] = ()  # names of the audits to run; empty: all of the budget
    reference: Path | Sequence[Path] | None = None  # run of a reference model, or of up to three
    references: Path | None = None  # directory of such runs; default: `references` beside the judged run
    retrain: bool = False  # train a missing reference model and keep it
    reference_models: int = 0  # there are so many after `retrain`, at most three; 0: one, two in the full budget
    shadows: int = 0  # shadow models of the membership audit; 0: the audit is not run
    data_dir: str = ""
    device: str = "auto"
    recipe: Recipe | None = None  # how references of an imported model are trained
    shadow_images: int = ShadowSettings.images  # of which each shadow model is trained on a half; 0: all

    @property
    def trained_references(self) -> int:
        """How many reference models there are after training: the distance, an audit of the full budget, needs two."""
        return (self.reference_models or (2 if self.audit == "full" else 1)) if self.retrain else 0

    @property
    def given(self) -> list[Run]:
        """The runs of reference models that the user names."""
        paths = [self.reference] if isinstance(self.reference, Path | str) else self.reference or ()
        return [open_run(path) for path in paths]


def judge_run(
    run: Run | Path | str,
    request: ForgetRequest | str | None = None,
    options: JudgeOptions | None = None,
    *,
    original: Run | Path | str | None = None,
    data: Dataset | None = None,
    on_training: Watch | None = None,
    on_step: OnStep = None,
) -> Verdict:
    """Judge a run that has served a request (default: its last) and write verdict.json into its directory.

    Judged with `only` some audits, no verdict.json is written: it would replace a complete one. `original` is the run
    before forgetting, `data` the run's data if it is already loaded. `on_training` receives the progress of a reference
    model's training, `on_step` the title of each measurement that begins.
    """
    run, options = open_run(run), options or JudgeOptions()
    served = served_record(run, _parsed(run, request, options))
    request = ForgetRequest.parse(served.request)  # one spelling: verdicts are found by it
    original = original_of(run, original).at(options.data_dir, options.device, options.recipe)
    check_judge_options(original, request, options)
    digest, is_other = run.record.model.digest, original.path.resolve() != run.path.resolve()
    if options.audit != "none" and is_other and original.record.model.digest == digest:
        raise BadSetting(f"{run.path} and {original.path} have the same weights: nothing was edited, nothing to judge")
    if same := [reference.path for reference in options.given if reference.record.model.digest == digest]:
        raise BadSetting(f"{same[0]} and {run.path} have the same weights; give a reference of another seed")
    journal = original.path.absolute().parent  # the journal that recorded the request
    for directory in [journal, *([] if options.only else [run.path])]:
        check_writable(directory)
    data = data or run.load_data(options.data_dir)
    with using_threads(original.settings.threads):
        references = references_for(run, original, request, options, data, on_training)
        if references and not options.given and options.audit != "none":  # given ones are compared as they are
            if on_step is not None and options.retrain:
                on_step("reference models, treated alike")
            method, directory = make_method(served.method, served.settings), references_directory(run, options)
            context = open_context(original, data)
            references += counterfactuals(context, method, request, references, directory, make=options.retrain)
        verdict = _verdict_on(run, request, data, original, references, options, on_step)
    if not options.only:
        _keep_verdict(run.path, verdict, options.audit, is_deleted=bool(len(data.gone)))
    event, details = "verified" if verdict.passes else "judged", {"label": verdict.label, "passes": verdict.passes}
    models = {role: verdict.digests[role] for role in ("before", "after")}
    append_entry(journal, event, run.path.name, str(request), **models, details=details)
    return verdict


def _keep_verdict(directory: Path, verdict: Verdict, audit: str, *, is_deleted: bool) -> None:
    """Write a verdict; one without audits never replaces one with them, but tells it which copies are left."""
    is_audited = audit != "none" and any(result.outcome != "NOT RUN" for result in verdict.audits)
    earlier = read_verdict(directory) if is_deleted and not is_audited else None
    is_same = earlier is not None and earlier.request == verdict.request
    if earlier is not None and is_same and earlier.digests["after"] == verdict.digests["after"]:
        logger.info("%s keeps what was measured before the images were deleted", directory / FILE)
        write_verdict(directory, replace(earlier, copies=verdict.copies))
    elif audit != "none" or not (directory / FILE).exists():
        write_verdict(directory, verdict)


def audit_run(
    run: Run | Path | str,
    request: ForgetRequest | str | None = None,
    options: JudgeOptions | None = None,
    *,
    after_rounds: int = 0,
    original: Run | Path | str | None = None,
    on_training: Watch | None = None,
    on_step: OnStep = None,
) -> Verdict:
    """Run audits at their full budget: all, or those in `options.only`.

    A simulated federation is first trained for `after_rounds` more rounds without the forget set.
    """
    run, options = open_run(run), replace(options or JudgeOptions(), audit="full")
    request, data, audited = _parsed(run, request, options), run.load_data(options.data_dir), run
    original = original_of(run, original)
    if after_rounds:
        check_rounds(run)
        check_judge_options(original, request, options)
        audited = train_on(run.at(options.data_dir, options.device), after_rounds)
    return judge_run(audited, request, options, original=original, data=data, on_training=on_training, on_step=on_step)


def check_rounds(run: Run) -> None:
    """Refuse further rounds of a run that is not a federation simulated on this machine."""
    if not (isinstance(run.settings, FederateSettings) and (run.path / "clients").is_dir()):
        raise BadSetting(f"{run.path} is no federation that is simulated here; leave --after-rounds out")


def check_judge_options(original: Run, request: ForgetRequest, options: JudgeOptions) -> None:
    """Refuse options that contradict each other or the run, before anything is computed."""
    check_audits(options.audit, options.only)
    if options.shadows and options.audit != "full":
        raise BadSetting(f"--shadows {options.shadows} belongs to --audit full, not to --audit {options.audit}")
    if not 0 <= options.reference_models <= len(REFERENCES):
        raise BadSetting(f"--reference-models is {options.reference_models}; expected 1 to {len(REFERENCES)}, or 0")
    if options.reference_models and not options.retrain:
        raise BadSetting(f"--reference-models {options.reference_models} says how many --retrain trains; give it too")
    if len(options.given) > len(REFERENCES):
        raise BadSetting(f"{len(options.given)} reference models are given; expected at most {len(REFERENCES)}")
    for reference in options.given:
        check_reference(original, reference, request)


def check_trainable(original: Run, request: ForgetRequest, options: JudgeOptions, data: Dataset | None = None) -> None:
    """Refuse to train reference models, where they are missing, that have no recipe or lack purged images of `data`."""
    found = options.given or find_references(original, request, options.references)
    if len(found) < options.trained_references:
        settings = reference_settings(original, request)
        check_reference_settings(reference_name(original, request, settings), settings, data)


def _parsed(run: Run, request: ForgetRequest | str | None, options: JudgeOptions) -> ForgetRequest:
    last = last_request(run)  # refuses a run that has forgotten nothing
    return run.request(request, options.data_dir) if request else last


def references_for(
    run: Run, original: Run, request: ForgetRequest, options: JudgeOptions, data: Dataset, on_training: Watch | None
) -> list[Run]:
    """Reference models that are given, found (at most three) or trained, as many as the options say.

    One with the weights of the judged model, which may be retrained itself, is left out.
    """
    directory = references_directory(run, options)
    found = options.given or find_references(original, request, options.references)  # beside the original by default
    found = found or find_references(original, request, directory)  # where --retrain writes them
    fresh = train_references(original, request, found, directory, data, on_training)
    references = [each for each in found if each.record.model.digest != run.record.model.digest]
    while len(references) < options.trained_references:
        trained = next(fresh)
        references += [trained] if trained.record.model.digest != run.record.model.digest else []
    return references[: len(REFERENCES)]


def references_directory(run: Run, options: JudgeOptions) -> Path:
    """Where reference models of a run are kept."""
    return options.references or run.path.parent / "references"


def _verdict_on(
    run: Run,
    request: ForgetRequest,
    data: Dataset,
    original: Run,
    references: list[Run],
    options: JudgeOptions,
    on_step: OnStep,
) -> Verdict:
    """The verdict on a run's model, with what its record tells about method, settings and cost."""
    served, device = served_record(run, request), choose_device(options.device)
    case = case_of(run, request, data, original, references, device)
    if options.shadows:
        place = references_directory(run, options) / "shadows"
        settings = shadow_settings(original, options.shadows, options.shadow_images)
        case = replace(case, shadows=shadow_plan(original, served, place, settings, device))
    qualification = None if references else read_qualification(original.path)
    bound_to = (original.record.model.digest, original.record.data.digest, served.method, served.settings)
    origin = {"run": run.path.name, "data": to_json(run.record.data), "settings": dict(run.record.settings)}
    if imported := [each.path.name for each in references if each.record.imported_from]:
        origin[IMPORTS] = imported
    seconds = sum(epoch.seconds for reference in references[:1] for epoch in reference.history())
    if not seconds:  # those of the original, scaled to the retain set
        share = len(case.retain_train) / max(len(data.train), 1)
        seconds = share * sum(epoch.seconds for epoch in original.history())
    return judge_case(
        case,
        options.audit,
        only=options.only,
        on_step=on_step,
        edited=edited_parts(served),
        **{name: getattr(served, name) for name in ("method", "effect", "cost", "settings")},
        retrain_seconds=seconds or None,
        copies=tuple(known_copies(run, request, data)),
        origin=origin,
        qualification=qualification if qualification and qualification.covers(request, *bound_to) else None,
        digests={"before": original.record.model.digest, "after": run.record.model.digest}
        | reference_digests(references),
    )


def reference_digests(references: Sequence[Run]) -> dict[str, str]:
    """The digests of reference models and of their counterfactuals, by role."""
    digests: dict[str, str] = {}
    for roles, is_treated in ((REFERENCES, False), (COUNTERFACTUALS, True)):
        models = [each.record.model.digest for each in references if each.record.is_edited == is_treated]
        digests |= dict(zip(roles, models, strict=False))
    return digests


def edited_parts(served: ServedRecord) -> dict[str, Any]:
    """The kernels and directions that a method of ours edited, and by how much."""
    edited: dict[str, Any] = {"kernels": dict(served.kernels)} if served.kernels else {}
    edited |= {"directions": dict(served.directions)} if served.directions else {}
    return edited | ({"ratio": served.chosen.ratio, "scrub": served.chosen.scrub} if served.chosen else {})
