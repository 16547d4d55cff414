"""MSG against slow loops: which weights are reset, and how the others learn."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import draw
from fedortho.errors import BadSetting
from fedortho.methods.msg import SLOW, MaskedSmallGradients, renewed, smallest
from fedortho.training.batches import plan_steps
from fedortho.training.objectives import TrainingSet
from fedortho.training.recipe import learning_rate

REQUEST = ForgetRequest.parse("class:3")


def batch_gradients(model: nn.Module, images: Images, size: int) -> dict[str, Tensor]:
    """The sum over batches of the gradient of the mean loss."""
    twin = copy.deepcopy(model).eval()
    for start in range(0, len(images), size):
        batch = images.subset(torch.arange(start, min(start + size, len(images))))
        functional.cross_entropy(twin(batch.normalise(batch.pixels[batch.rows])), batch.labels).backward()
    return {name: weight.grad for name, weight in twin.named_parameters() if weight.grad is not None}


def test_the_weights_with_the_smallest_difference_of_gradients_are_reset(
    digits: Dataset, small_net: nn.Module, engine: CentralEngine
) -> None:
    method = MaskedSmallGradients(epochs=0, ratio=0.25, images=100_000, seed=5)
    started = method(small_net, engine, REQUEST).state_dict()
    is_forget = digits.train.labels == 3
    forget = batch_gradients(small_net, digits.train.subset(is_forget), 64)
    retain = batch_gradients(small_net, digits.train.subset(~is_forget), 64)
    for name, before in small_net.state_dict().items():
        changed = started[name] != before
        if before.dim() < 4:
            assert not changed.any(), name
            continue
        size = (retain[name] - forget[name]).abs().flatten()
        assert int(changed.sum()) == round(0.25 * before.numel())
        assert size[changed.flatten()].max() <= size[~changed.flatten()].min() * (1 + 1e-4)


def test_gradients_are_of_as_many_retained_images_as_are_forgotten(digits: Dataset, small_net: nn.Module) -> None:
    engine = CentralEngine(digits)
    MaskedSmallGradients(epochs=0)(small_net, engine, REQUEST)
    assert engine.tally.images_trained == 2 * int((digits.train.labels == 3).sum())


def test_new_weights_have_the_spread_of_kaiming_by_fan_out() -> None:
    layer = nn.Sequential(nn.Conv2d(64, 128, 3))
    mask = {"0.weight": torch.ones(128, 64, 3, 3, dtype=torch.bool)}
    drawn = renewed(layer, mask, seed=0).get_parameter("0.weight").detach()
    expected = torch.empty(128, 64, 3, 3)
    nn.init.kaiming_normal_(expected, mode="fan_out", nonlinearity="relu")
    assert float(drawn.std()) == pytest.approx(float(expected.std()), rel=0.02)


def test_kept_weights_of_convolutions_learn_by_a_tenth_of_their_gradient(digits: Dataset, small_net: nn.Module) -> None:
    few = replace(digits, train=draw(digits.train, 300, 0))  # five steps: more would magnify rounding
    engine = CentralEngine(few)
    method = MaskedSmallGradients(epochs=1, lr=0.01, ratio=0.3, crop=0, flip=0.0, weight_decay=0.0, momentum=0.0)
    forgot = method(small_net, engine, REQUEST).state_dict()
    twin = copy.deepcopy(MaskedSmallGradients(epochs=0, ratio=0.3)(small_net, engine, REQUEST)).train()
    was = small_net.state_dict()
    factor = {
        name: torch.where(weight.detach() != was[name], 1.0, SLOW) if weight.dim() == 4 else 1.0
        for name, weight in twin.named_parameters()
    }
    retained = few.train.subset(few.train.labels != 3)
    for (rows,) in plan_steps([TrainingSet(retained)], method.batch_size, 0, 0, "mixed"):
        twin.zero_grad()
        inputs, labels = retained.normalise(retained.pixels[rows]), retained.store_labels[rows]
        functional.cross_entropy(twin(inputs), labels).backward()
        with torch.no_grad():
            for name, weight in twin.named_parameters():
                weight.sub_(learning_rate(method.recipe, 0) * factor[name] * weight.grad)
    for name, value in twin.state_dict().items():
        assert torch.allclose(forgot[name], value, rtol=1e-4, atol=1e-5), name


def test_a_share_is_rounded_and_out_of_range_refused() -> None:
    assert smallest(torch.tensor([3.0, -1.0, 2.0, 0.5]), 0.5).tolist() == [False, True, False, True]
    with pytest.raises(BadSetting, match="ratio"):
        MaskedSmallGradients(ratio=0.0)
