import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import TinyNet
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.errors import BadCheckpoint, BadSetting
from fedortho.models.patch import Patch, bind_patch, load_patch, patch_between, undo_patch, write_undo
from fedortho.models.sites import find_sites
from fedortho.models.zoo import build_model
from fedortho.storage.files import tensors_digest, write_tensors
from fedortho.unlearning.rank import Ranking
from fedortho.unlearning.select import choose_kernels, kernel_count, kernel_patch, merge_chosen, strengths

SHAPE = (1, 8, 8)


def warmed(model: nn.Module, images: Images) -> nn.Module:
    model.train()
    with torch.no_grad():
        model(images.normalise(images.pixels))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.bias, 0.1, 1)
    return model.eval()


def patch_of(model: nn.Module, how: str, layers: str, chosen: dict[str, list[int]], alpha: float) -> Patch:
    edit, tap = how.split("/")
    sites = find_sites(model, SHAPE, layers, edit, tap)
    picked = {s: (torch.tensor(k), strengths(len(k), alpha)) for s, k in chosen.items()}
    return bind_patch(kernel_patch(model, sites, picked, edit), model)


@pytest.mark.parametrize(
    ("ratio", "kernels", "expected"),
    [(0.07, 100, 7), (0.1, 30, 3), (0.01, 128, 2), (0.006, 512, 4), (0.007, 512, 4), (1e-6, 64, 1), (1.0, 64, 64)],
)
def test_the_number_of_kernels_is_the_ceiling_without_floating_point_surprises(
    ratio: float, kernels: int, expected: int
) -> None:
    assert kernel_count(ratio, kernels) == expected


def test_strengths_are_the_printed_formula() -> None:
    for number in (1, 2, 6, 13):
        for alpha in (0.3, 0.5, 1.0):
            expected = [max(alpha, 1 - i / number) for i in range(1, number + 1)]
            assert strengths(number, alpha).tolist() == pytest.approx(expected)
    assert strengths(1, 0.5).tolist() == [0.5]
    assert strengths(4, 0.5, rank_base=0).tolist() == [1.0, 0.75, 0.5, 0.5]


def test_kernels_are_chosen_per_layer_or_over_all_by_scaled_scores() -> None:
    ranking = Ranking({"a": torch.tensor([0.1, 0.4, 0.2, 0.3]), "b": torch.tensor([100.0, 20.0, 90.0, 80.0])})
    chosen = choose_kernels(ranking, 0.5)
    assert {site: kernels.tolist() for site, kernels in chosen.items()} == {"a": [1, 3], "b": [0, 2]}
    scaled = torch.cat([s / s.std() for s in ranking.scores.values()])
    best = set(scaled.argsort(descending=True)[:4].tolist())
    everywhere = choose_kernels(ranking, 0.5, scope="global")
    assert set(everywhere["a"].tolist()) | {4 + k for k in everywhere["b"].tolist()} == best
    spared = choose_kernels(ranking, 1.0, min_difference=0.25)
    assert spared["a"].tolist() == [1, 3]
    assert "b" in everywhere
    rising = choose_kernels(ranking, 0.375, spread="rising")  # 0.25 and 0.5
    assert [len(kernels) for kernels in rising.values()] == [1, 2]
    for ratio in (0, -1, 1.5):
        with pytest.raises(BadSetting, match="ratio must be above 0"):
            choose_kernels(ranking, ratio)


def test_the_larger_strength_counts_for_a_kernel_chosen_twice() -> None:
    first = {"a": (torch.tensor([1, 2]), torch.tensor([0.5, 0.6]))}
    second = {"a": (torch.tensor([2, 3]), torch.tensor([0.4, 1.0])), "b": (torch.tensor([0]), torch.tensor([0.3]))}
    merged = merge_chosen([first, second])
    assert dict(zip(*[x.tolist() for x in merged["a"]], strict=True)) == pytest.approx({1: 0.5, 2: 0.6, 3: 1.0})
    assert merged["b"][0].tolist() == [0]


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_conv_edit_scales_kernel_and_bias_and_nothing_else(toy: Images, alpha: float) -> None:
    model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))
    edited = patch_of(model, "conv/conv", "0", {"0": [3, 1]}, alpha).apply(model)
    expected = model.state_dict() | {n: model.state_dict()[n].clone() for n in ("0.weight", "0.bias")}
    for rank, kernel in enumerate([3, 1], 1):
        factor = 1 - max(alpha, 1 - rank / 2)
        for name in ("0.weight", "0.bias"):
            expected[name][kernel] *= factor
    for name, tensor in edited.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_channel_edit_equals_masking_what_leaves_the_norm(tiny: TinyNet, toy: Images, alpha: float) -> None:
    warmed(tiny, toy)
    edited = patch_of(tiny, "channel/bn", "features.3", {"features.3": [0, 5, 2]}, alpha).apply(tiny)
    factors = torch.ones(8)
    factors[torch.tensor([0, 5, 2])] = (1 - strengths(3, alpha)).float()

    def mask(_: nn.Module, __: object, out: Tensor) -> Tensor:
        return out * factors.view(1, -1, 1, 1)

    with torch.no_grad():
        actual = edited(toy.normalise(toy.pixels))
        tiny.features[4].register_forward_hook(mask)
        assert torch.allclose(actual, tiny(toy.normalise(toy.pixels)), atol=1e-5)


def test_silencing_a_residual_group_equals_masking_the_stream(toy: Images) -> None:
    model = warmed(build_model("resnet-mini", num_classes=4, channels=1), toy)
    kernels = [0, 7, 99]
    edited = patch_of(model, "channel/stream", "layer3.0.conv2", {"layer3.0": kernels}, 1.0).apply(model)

    def mask(_: nn.Module, __: object, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, kernels] = 0
        return out

    with torch.no_grad():
        actual = edited(toy.normalise(toy.pixels))
        model.get_submodule("layer3.0").register_forward_hook(mask)
        assert torch.allclose(actual, model(toy.normalise(toy.pixels)), atol=1e-5)


def test_a_silenced_kernel_is_gone_from_the_weights_too(tiny: TinyNet, toy: Images) -> None:
    """Turning its scale up again brings nothing back."""
    warmed(tiny, toy)
    edited = patch_of(tiny, "channel/bn", "features.3", {"features.3": [2]}, 1.0).apply(tiny)
    assert not edited.features[3].weight[2].any()
    edited.features[4].weight.data.fill_(1.0)
    with torch.no_grad():
        assert not edited.features[:5](toy.normalise(toy.pixels))[:, 2].any()


def test_a_positive_factor_before_batch_norm_is_invisible_under_batch_statistics(tiny: TinyNet, toy: Images) -> None:
    """The paper's edit and its flaw: one forward pass in training mode brings the class back."""
    warmed(tiny, toy)
    edited = patch_of(tiny, "conv/conv", "deep", {"features.6": list(range(12))}, 0.5).apply(tiny)
    inputs = toy.normalise(toy.pixels)
    with torch.no_grad():
        assert (edited(inputs) - tiny(inputs)).abs().max() > 0.1
        assert torch.allclose(edited.train()(inputs), tiny.train()(inputs), atol=1e-2)


@settings(deadline=None)  # the first example traces the network
@given(st.sets(st.integers(0, 11), min_size=1, max_size=11), st.sampled_from(["conv", "channel"]), st.floats(0.1, 1.0))
def test_what_a_patch_does_not_name_stays_bit_for_bit(kernels: set[int], edit: str, alpha: float) -> None:
    torch.manual_seed(1)
    model = TinyNet().eval()
    patch = patch_of(model, f"{edit}/conv", "features.6", {"features.6": sorted(kernels)}, alpha)
    edited = patch.apply(model).state_dict()
    spared = [kernel for kernel in range(12) if kernel not in kernels]
    for name, tensor in model.state_dict().items():
        if name not in patch.names():
            assert torch.equal(edited[name], tensor), name
        else:
            assert torch.equal(edited[name][spared], tensor[spared]), name


def test_a_patch_survives_the_disk_fits_one_model_and_can_be_applied_twice(
    tiny: TinyNet, toy: Images, tmp_path: Path
) -> None:
    warmed(tiny, toy)
    patch = patch_of(tiny, "channel/bn", "deep", {"features.6": [4, 1]}, 0.5)
    patch.save(tmp_path / "patch.safetensors")
    again = load_patch(tmp_path / "patch.safetensors")
    edited = again.apply(tiny)
    assert tensors_digest(edited.state_dict()) == patch.after == again.after
    assert tensors_digest(again.apply(edited).state_dict()) == patch.after
    assert (tmp_path / "patch.safetensors").stat().st_size < 4096
    assert "features.6: 4 × 0.5, 1 × 0.5" in str(again)
    with pytest.raises(BadCheckpoint, match="this patch is for the model"):
        again.apply(TinyNet())
    with pytest.raises(BadCheckpoint, match="it is damaged"):
        Patch(patch.before, "0" * 64, patch.scaled, patch.put).apply(tiny)


def test_what_is_no_undo_file_is_refused(tiny: TinyNet, tmp_path: Path) -> None:
    write_tensors(tmp_path / "other.safetensors", tiny.state_dict())
    with pytest.raises(BadCheckpoint, match="is no undo file; give what forget --keep-undo wrote"):
        undo_patch(tmp_path / "other.safetensors", tiny)


def test_undo_restores_every_bit_and_only_its_own_model(tiny: TinyNet, toy: Images, tmp_path: Path) -> None:
    warmed(tiny, toy)
    before = tensors_digest(tiny.state_dict())
    patch = patch_of(tiny, "channel/bn", "all", {"features.6": [4, 1], "features.3": [0]}, 1.0)
    write_undo(tmp_path / "undo.safetensors", patch, tiny)
    edited = patch.apply(tiny)
    assert tensors_digest(undo_patch(tmp_path / "undo.safetensors", edited).state_dict()) == before
    with pytest.raises(BadCheckpoint, match="undoes the request that ended in the model"):
        undo_patch(tmp_path / "undo.safetensors", tiny)
    with pytest.raises(BadCheckpoint, match="must be made from the model"):
        write_undo(tmp_path / "other", patch, edited)


def test_factors_multiply_over_a_sequence_of_patches(tiny: TinyNet) -> None:
    model: nn.Module = tiny.eval()
    for _ in range(2):
        model = patch_of(model, "conv/conv", "deep", {"features.6": [3]}, 0.5).apply(model)
    ratio = model.get_parameter("features.6.weight")[3] / tiny.features[6].weight[3]
    assert math.isclose(float(ratio.mean().detach()), 0.25, rel_tol=1e-5)


def test_a_patch_between_two_models_replaces_what_differs_and_nothing_else(tiny: TinyNet, tmp_path: Path) -> None:
    changed = copy.deepcopy(tiny)
    with torch.no_grad():
        changed.fc.weight[0, 0] += 1
        changed.features[1].bias[0] = -0.0  # equal to 0.0, with other bytes
    patch = patch_between(tiny, changed, method="mine")
    assert set(patch.replaced) == {"fc.weight", "features.1.bias"}
    patch.save(tmp_path / "patch")
    applied = load_patch(tmp_path / "patch").apply(tiny)
    assert tensors_digest(applied.state_dict()) == tensors_digest(changed.state_dict())
    with pytest.raises(BadCheckpoint, match="architecture"):
        patch_between(tiny, nn.Linear(2, 2))
