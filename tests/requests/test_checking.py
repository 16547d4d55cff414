import math
import warnings
from functools import partial

import pytest
import torch
from architectures import CLASSES, SERVED
from refused_architectures import REFUSED

import fedortho as fo
from fedortho.data.images import Dataset
from fedortho.errors import FedOrthoError
from fedortho.methods.directions import Directions
from fedortho.methods.hide import Hide
from fedortho.methods.method import Method
from fedortho.methods.paper import Paper

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's own
FIXED: dict[str, Method] = {
    "hide": Hide(ratio=0.25),
    "directions": Directions(ratio=0.25),
    "paper": Paper(ratio=0.25),
}
ONLY_CLASSIFIER = Hide(target=1.0, max_retain_drop=1.0)


@pytest.fixture(scope="module")
def stripes() -> Dataset:
    """Four classes of 3x16x16, twelve images of each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % CLASSES
    pixels = 50 * labels.view(-1, 1, 1, 1) + torch.randint(0, 50, (48, 3, 16, 16), generator=generator)
    return fo.make_dataset(fo.images_from_tensors(pixels.to(torch.uint8), labels), valid=0.25)


# another of the table has all that is peculiar to these: resnext, padded-shortcuts, efficientnet
SLOW = ("resnet-bottleneck", "resnet-pooled-shortcut", "mobilenet")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in SERVED]
)
def test_what_check_passes_is_served(name: str, stripes: Dataset) -> None:
    torch.manual_seed(0)
    model = SERVED[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = fo.check(model, stripes)
    assert found.is_served
    assert found.training is None
    for method, reason in found.methods.items():
        if method == ("paper", "directions")[len(name) % 2]:
            continue  # check has planned it; half of them are enough here
        how = ONLY_CLASSIFIER if method == "hide" and not found.edited else FIXED[method]
        if reason is not None:
            with pytest.raises(FedOrthoError):
                fo.forget(model, stripes, "class:1", how)
            continue
        result = fo.forget(model, stripes, "class:1", how)
        assert result.patch.before != result.patch.after
        assert math.isfinite(fo.evaluate(result.model, stripes.train).loss)
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(name: str, stripes: Dataset) -> None:
    make, words = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of TorchScript and lazy layers
        model = make()
    calls = [partial(fo.forget, model, stripes, "class:1", method) for method in FIXED]
    for call in (partial(fo.check, model, stripes), *calls):
        with pytest.raises(FedOrthoError, match=words) as refusal:
            call()
        assert "\n" not in str(refusal.value)


def test_a_result_says_what_pruning_did_and_what_the_classifier_did(stripes: Dataset) -> None:
    torch.manual_seed(0)
    mine = stripes.train.subset(stripes.train.labels == 1)
    model = fo.fit(SERVED["bf16"](), stripes.train, fo.Recipe(epochs=3, batch_size=8, crop=0, ortho=0.0))
    before = fo.evaluate(model, mine).accuracy
    pruned = fo.forget(model, stripes, "class:1", Hide(ratio=0.25, trial_images=0))
    assert pruned.plan.effect is None, "nothing is tried where the ratio is given"
    both = fo.forget(model, stripes, "class:1", Hide(target=0.0, trial_images=0, max_retain_drop=1.0))
    assert both.plan.effect.before == before
    last = both.plan.effect.pruned if both.plan.effect.scrubbed is None else both.plan.effect.scrubbed
    assert last == fo.evaluate(both.model, mine).accuracy == 0
    only = SERVED["only-reused"]()
    alone = fo.forget(only, stripes, "class:1", ONLY_CLASSIFIER)
    assert alone.plan.effect.pruned is None, "a classifier edit"
    assert alone.patch.names() == ["head.bias", "head.weight"]
    assert "(classifier edit)" in str(alone.patch)
