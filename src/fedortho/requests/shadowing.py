"""Shadow models of a run: for its membership audit, and for the limit of clients and samples."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import choose_device, using_threads
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting
from fedortho.evaluation.shadow_limit import ShadowLimit, shadow_limit
from fedortho.evaluation.shadows import ShadowPlan, Shadows, ShadowSettings, choose_proxy
from fedortho.methods import find_method, make_method, unlearn
from fedortho.methods.retrain import Retrain
from fedortho.models.zoo import reinitialised
from fedortho.runs.record import ServedRecord
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings
from fedortho.storage.settings import as_mapping
from fedortho.training.recipe import Recipe
from fedortho.unlearning.calibrate import Refused


def shadow_plan(
    run: Run, served: ServedRecord, directory: Path, settings: ShadowSettings, device: torch.device
) -> ShadowPlan:
    """Shadow models for the membership audit, trained like the run, which forget by the recorded method."""
    kind = find_method(served.method)
    recipe = asdict(settings.recipe) if issubclass(kind, Retrain) else {}  # as the shadow models
    method = make_method(served.method, served.settings, recipe)

    def forget(model: nn.Module, data: Dataset, request: ForgetRequest) -> nn.Module:
        engine = CentralEngine(data, device=device, build=run.new_model)
        try:
            return unlearn(model, engine, request, method).model
        except Refused:  # it changes nothing on this model
            return model

    return ShadowPlan(forget, directory, settings, f"{method.name} {sorted(as_mapping(method).items())}")


def shadow_settings(run: Run, models: int, images: int = ShadowSettings.images) -> ShadowSettings:
    """Shadow models by the run's recipe, each with its own seed; `images` is the size of the proxy.

    A federation's recipe is that of one client in one round, so central training passes over the images as often as
    clients did on average. The recipe of an imported model is not known unless it is given: the default one is used.
    """
    settings = run.settings
    epochs = settings.epochs
    if isinstance(settings, FederateSettings):
        epochs = max(round(settings.epochs * settings.rounds * settings.fraction), 1)
    recipe = replace(settings.recipe, epochs=epochs or Recipe.epochs, seed=0)
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
    clients, model, pool = run.clients(data), run.load_model(), data.train
    if run.excluded is not None:
        pool = pool.subset(~run.excluded.mask(pool, clients))
    settings = shadow_settings(run, shadows, images)
    directory = directory or run.path.parent / "references" / "shadows"
    with using_threads(run.settings.threads):
        proxy, forget = choose_proxy(pool, request.mask(pool, clients), settings)
        trained = Shadows(directory, proxy, partial(reinitialised, model), settings, device=at)
        return shadow_limit(trained, forget, model, data.valid, at)
