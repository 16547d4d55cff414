"""Every network of the paper on images of every size of the paper: its first step and its first request, for real."""

from dataclasses import replace

import pytest
import torch

from fedortho.data.images import Dataset, images_from_tensors
from fedortho.engines.central import CentralEngine
from fedortho.experiments.experiment import EXPERIMENTS, PAPER_DATA, load_experiment
from fedortho.experiments.planning import PIXELS
from fedortho.methods import unlearn
from fedortho.methods.paper import Paper
from fedortho.models.zoo import MODELS, build_model
from fedortho.runs.settings import TrainSettings
from fedortho.training.loop import fit

IMAGES = 6


def networks() -> list[TrainSettings]:
    """One of each network and dataset at the paper's scale, with its recipe, and the early stems."""
    found = dict[tuple[str, str], TrainSettings]()
    for name in EXPERIMENTS:
        for settings in load_experiment(name, "paper").networks:
            found.setdefault((settings.model, settings.data), settings)
            early = f"{settings.model}-early"
            if settings.data == "tiny-imagenet" and early in MODELS:
                found.setdefault((early, settings.data), replace(settings, model=early, accumulate=2))
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("settings", networks(), ids=lambda each: f"{each.model} on {each.data}")
def test_the_first_step_and_the_first_request(settings: TrainSettings) -> None:
    side, classes = PIXELS[settings.data], PAPER_DATA[settings.data][0]
    some = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (IMAGES, 3, side, side), dtype=torch.uint8, generator=some)
    labels = torch.arange(IMAGES) % 3
    images = images_from_tensors(pixels, labels, [f"class {number}" for number in range(classes)])
    recipe = replace(settings.recipe, epochs=1, batch_size=IMAGES)
    model = build_model(settings.model, num_classes=classes)
    trained = fit(model, images, recipe)
    assert all(not weight.equal(old) for weight, old in zip(trained.parameters(), model.parameters(), strict=True))
    data = Dataset("random", images, images, images, "")
    result = unlearn(trained, CentralEngine(data), "class:0", Paper())
    before, after = trained.state_dict(), result.model.state_dict()
    changed = {name for name in after if not after[name].equal(before[name])}
    assert changed, "the paper's ratio is at least a kernel of each of its layers"
    assert changed == set(result.patch.scaled)
