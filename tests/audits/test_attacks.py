"""Each attack against a slow and obvious way to the same number."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from small import TinyNet
from torch import nn
from worlds import World

from fedortho.audits.copies import exported, folded, halved, quantise
from fedortho.audits.distance import cka
from fedortho.audits.measurements import balanced_sample, features
from fedortho.audits.norms import rescale_short
from fedortho.audits.probe import ridge
from fedortho.audits.relearn import prototype, speed_up
from fedortho.data.images import images_from_tensors
from fedortho.evaluation.metric_suite import total_variation
from fedortho.models.graph import stage_entries
from fedortho.models.layout import ordered_batches
from fedortho.models.predictions import logits_of
from fedortho.models.zoo import build_model


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_probe_solves_the_normal_equations_with_a_free_bias() -> None:
    x, labels = random(40, 5) * torch.tensor([1, 10, 0.1, 3, 1]) + 2, torch.arange(40) % 3
    weight, bias = ridge(x, labels, 0.01)
    extended = torch.cat([x, torch.ones(40, 1)], 1)
    penalty = 40 * 0.01 * torch.diag(torch.cat([x.var(0, correction=0), torch.zeros(1)]))
    naive = torch.linalg.inv(extended.T @ extended + penalty) @ extended.T @ torch.eye(3, dtype=torch.float64)[labels]
    assert torch.allclose(weight, naive[:-1], atol=1e-9)
    assert torch.allclose(bias, naive[-1], atol=1e-9)


def test_a_dead_feature_changes_nothing_for_the_probe() -> None:
    x, labels = random(40, 5), torch.arange(40) % 3
    weight, bias = ridge(torch.cat([x, torch.full((40, 1), 7.0)], 1), labels, 0.01)
    alone, shift = ridge(x, labels, 0.01)
    assert torch.allclose(weight[:5], alone)
    assert torch.allclose(bias, shift)
    assert float(weight[5].abs().max()) == 0


def test_cka_is_what_centred_gram_matrices_give() -> None:
    x, y = random(30, 6), random(30, 9, seed=1) + 3
    y[:, :6] += 2 * x
    centre = torch.eye(30, dtype=torch.float64) - 1 / 30
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    hsic = [torch.trace(a @ b) for a, b in ((k, m), (k, k), (m, m))]
    assert cka(x, y) == pytest.approx(float(hsic[0] / (hsic[1] * hsic[2]).sqrt()))
    assert cka(x, y) == pytest.approx(cka(y, x))


def test_cka_does_not_see_rotation_scale_or_shift_and_a_constant_resembles_nothing() -> None:
    x = random(30, 6)
    turn = torch.linalg.qr(random(6, 6, seed=2))[0]
    assert cka(x, 5 * x @ turn + 1) == pytest.approx(1.0)
    assert cka(x, torch.ones(30, 4)) == 0.0


def test_total_variation_runs_from_0_to_1_also_for_certain_answers() -> None:
    certain = torch.tensor([[1e30, 0.0, 0.0]]).softmax(1)
    assert total_variation(certain, certain) == 0.0
    assert total_variation(certain, certain.roll(1, 1)) == 1.0
    assert total_variation(torch.zeros(1, 3).softmax(1), certain) == pytest.approx(2 / 3)


@given(some.integers(2, 8), some.integers(0, 100))
def test_quantising_moves_no_weight_by_more_than_half_a_step(bits: int, seed: int) -> None:
    weight = random(3, 4, 2, 2, seed=seed)
    weight[1] = 0
    done, most = quantise(weight, bits), 2 ** (bits - 1) - 1
    step = weight.abs().amax((1, 2, 3), keepdim=True) / most
    assert bool(((done - weight).abs() <= step / 2 + 1e-12).all())
    assert all(len(row.unique()) <= 2**bits - 1 for row in done)
    assert torch.equal(quantise(done, bits).round(decimals=9), done.round(decimals=9))


def test_a_network_that_fixes_the_size_of_its_batches_is_exported_for_one_image(world: World) -> None:
    class Viewed(TinyNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).view(len(x), -1)  # type: ignore[no-any-return]  # modules return Any

    model, images = Viewed().eval(), torch.rand(3, 1, 14, 14)
    with torch.no_grad():
        assert torch.allclose(exported(copy.deepcopy(model), world.data.test)(images), model(images), atol=1e-5)


@pytest.mark.parametrize("size", [len, lambda x: x.shape[0]], ids=["one image", "any number"])
def test_an_exported_network_that_views_its_maps_is_measured_on_images_of_colour(size: Callable[..., int]) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
            self.head = nn.Linear(4 * 16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            return self.head(x.view(size(x), -1))  # type: ignore[no-any-return]  # modules return Any

    images = images_from_tensors(torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8), torch.arange(5) % 2)
    model = Viewed().eval()
    twin = exported(copy.deepcopy(model), images)
    answers = torch.cat([twin(inputs) for inputs, _ in ordered_batches(twin, images)])
    assert torch.allclose(answers.double(), logits_of(model, images), atol=1e-5)


@pytest.mark.parametrize("name", ["vgg-mini", "resnet-mini"])
def test_folded_and_exported_copies_answer_as_the_network_does(name: str, world: World) -> None:
    model = build_model(name, num_classes=10, channels=1).eval()
    with torch.no_grad():
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                assert isinstance(tensor, torch.Tensor)
                tensor.add_(0.3 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)))
        images = torch.rand(7, 1, 14, 14, generator=torch.Generator().manual_seed(0))
        expected = model(images)
        plain = folded(copy.deepcopy(model), world.data.test)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
        assert torch.allclose(plain(images), expected, atol=1e-4)
        assert torch.allclose(exported(copy.deepcopy(model), world.data.test)(images), expected, atol=1e-5)
        half = halved(copy.deepcopy(model), world.data.test)(images)
        assert not torch.equal(half, expected)
        assert torch.allclose(half, expected, rtol=0.02, atol=0.02)


def test_short_kernels_and_scales_come_back_and_silent_ones_stay_silent(tiny: TinyNet) -> None:
    conv, norm = tiny.features[3], tiny.features[4]
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    with torch.no_grad():
        conv.weight /= conv.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        before = conv.weight.clone()
        conv.weight[1] *= 0.3
        conv.weight[2] = 0
        norm.weight[3], norm.bias[3] = 0.4, 0.2
    both = rescale_short(copy.deepcopy(tiny), (nn.Conv2d, nn.BatchNorm2d)).features
    assert torch.allclose(both[3].weight[[0, 1]], before[[0, 1]], atol=1e-6)
    assert not both[3].weight[2].any()
    assert torch.allclose(both[4].weight, torch.ones(8))
    assert float(both[4].bias[3].detach()) == pytest.approx(0.5)
    scales = rescale_short(copy.deepcopy(tiny), (nn.BatchNorm2d,)).features
    assert torch.equal(scales[3].weight, conv.weight)


def test_a_prototype_takes_its_samples_and_no_more_than_its_share_of_others() -> None:
    weight, bias = random(4, 6), random(4)
    retained, few = random(400, 6, seed=1), random(10, 6, seed=2) * 0.1 + torch.tensor([0, 0, 0, 0, 9.0, 9.0])
    row, shift = prototype(few, retained, weight, bias)
    takes = retained @ row + shift > (retained @ weight.T + bias).amax(1)
    assert float(takes.double().mean()) == pytest.approx(0.05, abs=0.003)
    assert float((row - weight.mean(0)).norm()) == pytest.approx(float((weight - weight.mean(0)).norm(dim=1).mean()))


def test_steps_that_were_not_enough_count_with_the_next_evaluation() -> None:
    assert speed_up(60, None) == 122 / 60, "the reference model was given 120 and needs at least two more"
    assert speed_up(30, None) == 62 / 30, "it was given 60"
    assert speed_up(None, 31) == 0.5
    assert speed_up(None, None) == speed_up(0, 0) == 1.0


def test_features_are_what_the_layers_receive_averaged_over_the_map(world: World) -> None:
    case, model = world.case(world.original), world.original
    images = world.data.test.subset(range(5))
    names = [*stage_entries(model, images.shape), "fc"]
    found = features(case, model, images, names)
    with torch.no_grad():
        x = images.normalise(images.pixels[images.rows])
        by_hand = {name: model.features[: int(name[9:])](x).mean((2, 3)) for name in names[:-1]}
        by_hand["fc"] = model.features(x).mean((2, 3))
    for name, mean in by_hand.items():
        assert torch.allclose(found[name], mean.double(), atol=1e-5)


def test_the_probes_images_hold_equally_many_of_each_class_the_forgotten_one_included(world: World) -> None:
    counts = torch.bincount(balanced_sample(world.case(world.original)).labels, minlength=10)
    assert counts.tolist() == [250] * 10
