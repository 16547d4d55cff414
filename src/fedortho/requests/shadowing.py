"""Shadow models of a run: for its membership audit, the limit of clients and samples, and how far r2d goes back."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.audits.membership import LIMIT
from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import Selection
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.sample_attack import AUC, attack_samples, margins_under, most_memorised
from fedortho.evaluation.shadow_limit import ShadowLimit, shadow_limit
from fedortho.evaluation.shadows import ShadowPlan, Shadows, ShadowSettings, choose_proxy
from fedortho.methods import make_method, unlearn
from fedortho.methods.hide import Hide
from fedortho.methods.method import CannotServe, Method
from fedortho.methods.r2d import R2D
from fedortho.methods.retrain import Retrain
from fedortho.models.zoo import reinitialised
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, open_run
from fedortho.storage.settings import as_mapping
from fedortho.training.recipe import Recipe
from fedortho.unlearning.calibrate import Refused


def shadow_plan(
    run: Run, served: ServedRecord, directory: Path, settings: ShadowSettings, device: torch.device
) -> ShadowPlan:
    """Shadow models for the membership audit, trained like the run, which forget by the recorded method."""
    method = make_method(served.method, served.settings)
    if isinstance(method, Retrain):
        method = replace(method, **asdict(settings.recipe))  # as the shadow models
    elif isinstance(method, R2D):
        back = method.back and shadow_epochs(method.back, method.epochs, settings.recipe.epochs)
        method = replace(method, **asdict(settings.recipe), back=back, kept="")

    def forget(model: nn.Module, data: Dataset, request: ForgetRequest, kept: Path | None) -> nn.Module:
        engine = CentralEngine(data, device=device, build=run.new_model)
        own = replace(method, kept=str(kept)) if isinstance(method, R2D) else method
        try:
            return unlearn(model, engine, request, own).model
        except Refused:  # it changes nothing on this model
            return model

    name = f"{method.name} {sorted(as_mapping(method).items())}"
    return ShadowPlan(forget, directory, settings, name, replays=isinstance(method, R2D))


def shadow_epochs(back: int, passes: int, epochs: int) -> int:
    """Epochs of a shadow model that are the same share of its training as `back` of a run's epochs or rounds.

    >>> shadow_epochs(2, 6, 6), shadow_epochs(30, 60, 6), shadow_epochs(1, 60, 6)
    (2, 3, 1)
    """
    return min(max(round(back * epochs / passes), 1), epochs - 1)


def shadow_settings(run: Run, models: int, images: int = ShadowSettings.images) -> ShadowSettings:
    """Shadow models by the run's recipe, each with its own seed; `images` is the size of the proxy.

    A federation's recipe is that of one client in one round, so central training passes over the images as often as
    clients did on average. The recipe of an imported model is not known unless it is given: the default one is used.
    """
    passes = run.settings.image_passes
    epochs = max(round(passes), 1) if passes else Recipe.epochs
    recipe = replace(run.settings.recipe, epochs=epochs, seed=0)
    return ShadowSettings(models=models, images=images, recipe=recipe)


def estimate_limit(
    run: Run | Path | str,
    request: ForgetRequest | str,
    *,
    shadows: int = 16,
    images: int = ShadowSettings.images,
    directory: Path | None = None,
    data: Dataset | None = None,
    device: str = "auto",
) -> ShadowLimit:
    """The accuracy on clients or samples that the run's model would have without them, from shadow models.

    Those of the membership audit, trained by the run's recipe and kept in `directory` (default: references/shadows
    beside the run). Validation images stand for unseen ones; no test image is used.
    """
    run = open_run(run)
    data, at = data or run.load_data(), choose_device(device)
    request = run.request(request)
    if request.classes:
        raise BadSetting(
            f"{request} names classes, whose target is given (--target); limits are for clients and samples"
        )
    with using_threads(run.settings.threads):
        trained, forget = _shadows_of(run, request, data, shadow_settings(run, shadows, images), directory, at)
        return shadow_limit(trained, forget, run.load_model(), data.valid, at)


def _shadows_of(
    run: Run, request: ForgetRequest, data: Dataset, settings: ShadowSettings, directory: Path | None, at: torch.device
) -> tuple[Shadows, Tensor]:
    """The shadow models of a run, and a mask over their proxy: the images of the request."""
    clients = run.clients(data)
    pool = Selection(exclude=run.excluded).select(data.train, clients)
    asked = request.mask(pool, clients)
    if not bool(asked.any()):
        raise BadData(f"{request} matches no training image of {run.path}")
    proxy, forget = choose_proxy(pool, asked, settings)
    place = directory or run.path.parent / "references" / "shadows"
    return Shadows(place, proxy, partial(reinitialised, run.load_model()), settings, device=at), forget


def shadowed_method(
    run: Run, request: ForgetRequest, method: Method, shadows: int, data: Dataset | None = None, device: str = "auto"
) -> tuple[Method, str]:
    """A method with what so many shadow models choose for it, in words too: the limit of `hide`, or r2d's distance."""
    if isinstance(method, R2D):
        if method.back:
            raise BadSetting(f"back={method.back} is given, so {shadows} shadow models have nothing to choose")
        choice = choose_back(run, request, shadows=shadows, data=data, device=device)
        return replace(method, back=choice.back), str(choice)
    if request.classes or not isinstance(method, Hide):
        raise BadSetting("shadow models are for clients or samples at the level hide, or for r2d; leave them out here")
    if method.limit:
        raise BadSetting(f"limit {method.limit:g} is given, so {shadows} shadow models have nothing to estimate")
    found = estimate_limit(run, request, shadows=shadows, data=data, device=device)
    return replace(method, limit=found.limit), f"limit {found}"


@dataclass(frozen=True)
class ChosenBack:
    """How far r2d goes back: the least of the tried distances at which the membership attack finds nothing."""

    back: int
    untouched: float  # AUC of the attack on shadow models as trained
    tried: Mapping[int, float]  # distance in epochs or rounds → AUC of the attack
    images: int
    models: int

    def __str__(self) -> str:
        tried = ", ".join(f"{back}: {auc:.3f}" for back, auc in self.tried.items())
        return (
            f"back {self.back}: AUC of the membership attack on {self.images} other, most memorised images of "
            f"{self.models} shadow models, by distance, {tried} (0.5 ± {LIMIT.value:g} wanted; untouched "
            f"{self.untouched:.3f})"
        )


def choose_back(
    run: Run | Path | str,
    request: ForgetRequest | str,
    *,
    shadows: int = 16,
    images: int = ShadowSettings.images,
    directory: Path | None = None,
    data: Dataset | None = None,
    device: str = "auto",
) -> ChosenBack:
    """How many epochs or rounds r2d has to go back in a run, by the membership attack on other samples.

    Distances are doubled, from the last kept epoch on, until shadow models that replayed so much of their training
    without their most memorised images, none of them of the request, cannot be told from those that never had them.
    Rounds of a federation are epochs of its shadow models by their share of the training. Refused if no distance does,
    or if the attack cannot tell even untouched shadow models.
    """
    run = open_run(run)
    data, at = data or run.load_data(), choose_device(device)
    passes, settings = run.settings.passes, shadow_settings(run, shadows, images)
    kept = [int(file.stem) for file in (run.path / passes.unit).glob("*.safetensors")]
    if settings.recipe.epochs < 2 or not kept:
        raise CannotServe(f"{run.path} kept no {passes.unit}, or has one only; r2d needs a model to go back to")
    with using_threads(run.settings.threads):
        trained, forget = _shadows_of(run, run.request(request), data, settings, directory, at)
        chosen = most_memorised(trained, range(settings.choosing), at) & ~forget
        members, tried = trained.members[settings.choosing :][:, chosen], dict[int, float]()
        numbers, targets = range(settings.choosing, settings.models), trained.proxy.subset(chosen)
        rows = [margins_under(trained.original(number), targets, f"shadow model {number}", at) for number in numbers]
        untouched = attack_samples(torch.stack(rows), members, settings.seed)[AUC]
        if abs(untouched - 0.5) <= LIMIT.value:
            raise CannotServe(
                f"the membership attack has no power here (AUC {untouched:.3f} on shadow models as trained), so it "
                "cannot say how far r2d has to go back; train more shadow models, or choose back yourself"
            )
        for back in _distances(passes.planned, kept):
            method = R2D(**asdict(settings.recipe), back=shadow_epochs(back, passes.planned, settings.recipe.epochs))
            rows = [_replayed_margins(run, method, trained, chosen, data, number, at) for number in numbers]
            tried[back] = attack_samples(torch.stack(rows), members, settings.seed)[AUC]
            if abs(tried[back] - 0.5) <= LIMIT.value:
                return ChosenBack(back, untouched, tried, int(chosen.sum()), len(rows))
    told = ", ".join(f"{back}: {auc:.3f}" for back, auc in tried.items())
    raise CannotServe(f"the membership attack finds what r2d forgets at every distance (AUC {told}); retrain")


def _distances(passes: int, kept: Iterable[int]) -> list[int]:
    """Distances to go back that are kept, each at least twice the one before, and the longest.

    >>> _distances(6, [1, 2, 3, 4, 5]), _distances(60, range(10, 60, 10))
    ([1, 2, 4, 5], [10, 20, 40, 50])
    """
    found = sorted({passes - number for number in kept if 0 < number < passes})
    distances: list[int] = []
    for back in found:
        if not distances or back >= 2 * distances[-1] or back == found[-1]:
            distances.append(back)
    return distances


def _replayed_margins(
    run: Run, method: R2D, shadows: Shadows, mask: Tensor, data: Dataset, number: int, at: torch.device
) -> Tensor:
    """φ of the masked images after a shadow model has replayed its last epochs without those that it had; kept."""
    members = shadows.members[number]

    def measure() -> dict[str, Tensor]:
        mine = ForgetRequest(samples=tuple(map(str, shadows.proxy.subset(members & mask).rows.tolist())))
        own = replace(data, train=shadows.proxy.subset(members))
        engine = CentralEngine(own, device=at, build=run.new_model)
        replay = replace(method, kept=str(shadows.epochs(number)))
        model = unlearn(shadows.original(number), engine, mine, replay).model
        return {"margins": margins_under(model, shadows.proxy.subset(mask), f"shadow model {number}", at)}

    return shadows.kept(f"back-{method.back}-{shadows.name_of(mask)}-{number:02}", measure)["margins"]
