import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small import identity_net
from torch import Tensor, nn

from fedortho.audits.probe import recall
from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting, UnknownName
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.methods import make_method
from fedortho.methods.directions import Directions
from fedortho.methods.hide import Hide
from fedortho.models.capture import capture
from fedortho.models.norms import batch_norms, estimate_norms
from fedortho.models.patch import edit_model, load_patch, undo_patch, write_undo
from fedortho.models.predictions import evaluate
from fedortho.models.sites import Site, find_sites
from fedortho.models.split import Split
from fedortho.statistics.responses import response_sums
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe
from fedortho.unlearning.directions import Moments, erasure_patch, moments_of, projection


def sites_of(model: nn.Module, layers: str = "deep") -> list[Site]:
    return find_sites(model, (1, 8, 8), layers, "directions", "stream")


def behind(model: nn.Module, site: Site, images: Images) -> Tensor:
    """The responses of a site, by hooks of its own."""
    seen: list[Tensor] = []
    handles = [
        model.get_submodule(layer.norm or layer.name).register_forward_hook(lambda _, __, out: seen.append(out.clone()))
        for layer in site.layers
    ]
    with torch.no_grad():
        model(images.normalise(images.pixels[images.rows]))
    for handle in handles:
        handle.remove()
    return torch.stack(seen).sum(0).double()


def spread(values: Tensor) -> Moments:
    """Of responses (n, kernels, positions), by the definition."""
    return Moments(values.mean(0), torch.stack([y @ y.T for y in values]).mean(0) / values.shape[2])


def responses(shift: Tensor, number: int = 400) -> Tensor:
    generator = torch.Generator().manual_seed(int(shift.abs().sum()))
    return torch.randn(number, 6, 4, generator=generator, dtype=torch.float64) + shift.view(1, -1, 1)


def test_the_energy_around_a_centre_is_that_of_its_definition() -> None:
    values, centre = responses(torch.tensor([1.0, 2, 0, 0, 0, 0])), torch.randn(6, 4, dtype=torch.float64)
    apart = (values - centre).transpose(1, 2).flatten(0, 1)
    assert torch.allclose(spread(values).around(centre), apart.T @ apart / len(apart))


def test_a_projection_spares_retained_means_and_removes_the_class() -> None:
    one, two = (responses(torch.tensor(shift)) for shift in ([2.0, 0, 0, 0, 0, 0], [-2.0, 0, 0, 0, 0, 0]))
    gone = responses(torch.tensor([0.5, 0, 0, 5.0, 0, 0]))
    kept, centre = spread(torch.cat([one, two])), torch.cat([one, two]).mean((0, 2))
    means = torch.stack([one.mean((0, 2)), two.mean((0, 2))], 1)
    taken, energies = projection([spread(gone)], kept, means, 1)
    apart = means[:, 0] - means[:, 1]
    assert torch.allclose(taken @ apart, apart, atol=1e-8)
    assert torch.linalg.matrix_rank(taken, rtol=1e-9) == 5
    assert float((taken @ (gone.mean((0, 2)) - centre))[3].abs()) < 0.3, "5 before"
    assert energies[0] > 20, "one direction stands out"
    assert energies[1] < 2
    assert torch.equal(energies, energies.sort(descending=True).values)


def test_never_more_is_removed_than_is_not_spared() -> None:
    kept, gone = responses(torch.zeros(6)), responses(torch.ones(6))
    means = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    taken, energies = projection([spread(gone)], spread(kept), means, 6)
    assert torch.linalg.matrix_rank(taken, rtol=1e-9) == 3
    assert len(energies) == 3


@pytest.mark.parametrize("name", ["vgg-mini", "resnet-mini"])
def test_sums_add_up_and_say_how_responses_lie(digits: Dataset, digit_nets: dict[str, nn.Module], name: str) -> None:
    model, images = digit_nets[name].eval(), digits.train.subset(torch.arange(40))
    sites = sites_of(model)
    parts = [response_sums(model, images.subset(torch.arange(40) % 3 == part), sites) for part in range(3)]
    whole = response_sums(model, images, sites)
    added = parts[0] + parts[1] + parts[2]
    assert all(torch.allclose(added.sums[key], value, rtol=1e-4, atol=1e-3) for key, value in whole.sums.items())
    for site in sites:
        found, true = moments_of(whole, site.name, site.kernels), spread(behind(model, site, images).flatten(2))
        assert torch.allclose(found.mean, true.mean, atol=1e-4)
        assert torch.allclose(found.second, true.second, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["vgg-mini", "resnet-mini"])
def test_an_edited_layer_answers_the_projected_responses_and_its_norm_knows_them(
    digits: Dataset, digit_nets: dict[str, nn.Module], name: str
) -> None:
    model = digit_nets[name].eval()
    (*_, site) = sites_of(model)
    is_gone = digits.train.labels == 3
    gone, kept = digits.train.subset(is_gone), digits.train.subset(~is_gone)
    sums = [response_sums(model, images, [site]) for images in (gone, kept)]
    labels = [label for label in range(10) if label != 3]
    patch = erasure_patch(model, [site], sums[:1], sums[1], labels=labels, share=0.2)
    edited = edit_model(model, patch)
    before, after = (behind(m, site, digits.valid).transpose(0, 1).flatten(1) for m in (model, edited))
    centre = behind(model, site, kept).mean((0, 2, 3))[:, None]
    assert patch.note["directions"][site.name] == 26
    joint = torch.cat([before - centre, after - centre])
    rank_before, rank_joint = (torch.linalg.matrix_rank(values, rtol=1e-4) for values in (before - centre, joint))
    assert rank_joint == rank_before, "what comes out is a linear map of what came out before"
    assert torch.linalg.matrix_rank(after - centre, rtol=1e-4) <= rank_before - 20
    norms = [layer.norm for layer in site.layers if layer.norm]
    twin = copy.deepcopy(edited)
    inputs = kept.normalise(kept.pixels[kept.rows])
    estimate_norms(twin, Split(None), norms, inputs[: len(inputs) // 256 * 256])
    for norm in norms:
        old, new = (m.get_buffer(f"{norm}.running_var") for m in (edited, twin))
        assert torch.allclose(old, new, rtol=0.15, atol=1e-4 * float(old.max())), "re-estimating brings nothing back"


def forgotten(model: nn.Module, digits: Dataset, share: float) -> nn.Module:
    settings = Directions(ratio=share, max_retain_drop=0.1) if share else Hide(max_retain_drop=0.1)
    return settings.plan(model, CentralEngine(digits), ForgetRequest.parse("class:8")).patch.apply(model).eval()


@pytest.mark.parametrize("name", ["vgg-mini", "resnet-mini"])
def test_taking_directions_out_forgets_the_class_and_keeps_the_rest(
    digits: Dataset, digit_nets: dict[str, nn.Module], name: str
) -> None:
    table = torch.tensor(evaluate(forgotten(digit_nets[name], digits, 0.2), digits.test).confusion)
    kept = [label for label in range(10) if label != 8]
    assert float(table[8, 8] / table[8].sum()) <= 0.09  # of 35 images; two or three, by the processor
    assert 0.85 < float(table[kept, kept].sum() / table[kept].sum()) <= 1.0


def test_it_leaves_less_to_read_than_silencing_kernels_does(digits: Dataset, digit_nets: dict[str, nn.Module]) -> None:
    train, test = digits.train, digits.test.subset(digits.test.labels == 8)

    def recalled(share: float) -> float:
        model = forgotten(digit_nets["vgg-mini"], digits, share)
        with torch.no_grad(), capture(model, ["fc"], Tensor.double, inputs=True) as seen:
            for images in (train, test):
                model(images.normalise(images.pixels[images.rows]))
        return recall(*seen["fc"], train.labels, test.labels)

    assert recalled(0.2) < recalled(0.0)


def test_a_patch_of_directions_is_written_and_undone_bit_for_bit(
    digits: Dataset, digit_nets: dict[str, nn.Module], tmp_path: Path
) -> None:
    place, model = tmp_path, digit_nets["vgg-mini"]
    outcome = Directions(ratio=0.1).plan(model, CentralEngine(digits), ForgetRequest.parse("class:1"))
    outcome.patch.save(place / "patch")
    write_undo(place / "undo", outcome.patch, model)
    edited = load_patch(place / "patch").apply(model)
    restored = undo_patch(place / "undo", edited)
    assert all(
        torch.equal(a, b) for a, b in zip(restored.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert "features.24.weight" in str(outcome.patch)
    assert set(batch_norms(model)) - {name.rpartition(".")[0] for name in outcome.patch.names()}, "only deep ones"


@pytest.fixture
def identity() -> nn.Module:
    torch.manual_seed(0)
    return identity_net().eval()


def test_in_a_stream_with_an_identity_the_blocks_own_part_is_edited(digits: Dataset, identity: nn.Module) -> None:
    site = next(site for site in sites_of(identity) if site.beside)
    assert (site.name, site.beside, [layer.name for layer in site.layers]) == (
        "layer2.1",
        "layer2.1",
        ["layer2.1.conv2"],
    )
    is_gone, labels = digits.train.labels == 3, [label for label in range(10) if label != 3]
    gone, kept = digits.train.subset(is_gone), digits.train.subset(~is_gone)
    sums = [response_sums(identity, images, [site]) for images in (gone, kept)]
    inputs = digits.valid.normalise(digits.valid.pixels[digits.valid.rows])

    def parts(model: nn.Module) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), capture(model, ["layer2.1"], Tensor.double, inputs=True) as given:
            model(inputs)
        return behind(model, site, digits.valid).transpose(0, 1).flatten(1), given["layer2.1"][-1]

    with torch.no_grad(), capture(identity, ["layer2.1"], Tensor.double, inputs=True) as given:
        identity(kept.normalise(kept.pixels[kept.rows]))
    total = behind(identity, site, kept) + given["layer2.1"][-1]
    whole, own = (moments_of(sums[1], name, 48) for name in ("layer2.1", "layer2.1.conv2"))
    assert torch.allclose(whole.mean, total.flatten(2).mean(0), atol=1e-4), "statistics are of the sum"
    means = sums[1].mean("layer2.1:answered").view(48, -1)[:, labels] / sums[1].mean("answers")[labels]
    wanted, _ = projection([moments_of(sums[0], "layer2.1", 48)], whole, means, 12)
    edited = edit_model(identity, erasure_patch(identity, [site], sums[:1], sums[1], labels=labels, share=0.25))
    (before, received), (after, received_after) = parts(identity), parts(edited)
    centre = own.mean.mean(1, keepdim=True)
    assert torch.allclose(after, wanted @ before + centre - wanted @ centre, atol=1e-4)
    assert torch.equal(received, received_after), "what the identity carries stays"


def test_all_sums_of_a_stream_are_edited_and_the_class_is_forgotten(digits: Dataset, identity: nn.Module) -> None:
    trained = fit(identity, digits.train, Recipe(epochs=4, batch_size=64, lr=0.1, flip=0.0, crop=0)).eval()
    settings = Directions(layers="layer2.*", ratio=0.3, scrub=False)
    found = settings.plan(trained, CentralEngine(digits), ForgetRequest.parse("class:3"))
    assert set(found.patch.note["directions"]) == {"layer2.0.conv1", "layer2.0", "layer2.1.conv1", "layer2.1"}
    before, after = (accuracies_of(model, digits, "class:3") for model in (trained, found.patch.apply(trained)))
    assert after.forget < before.forget / 2
    assert after.retain > before.retain - 0.1


def test_what_cannot_be_mixed_is_left_out_of_a_depth_and_refused_by_name(digits: Dataset, identity: nn.Module) -> None:
    with pytest.raises(
        BadSetting, match=r"layer conv1 cannot be edited \(directions\): what is added to it was not found"
    ):
        Directions(layers="conv1").plan(identity, CentralEngine(digits), ForgetRequest.parse("class:3"))
    grouped = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU()
    )
    grouped = nn.Sequential(*grouped, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval()
    found = Directions(ratio=0.1, statistics_images=50).plan(
        grouped, CentralEngine(digits), ForgetRequest.parse("class:3")
    )
    assert found.left_out == {"2": "its kernels are in groups"}
    assert set(found.patch.note["directions"]) == {"0"}, "the last stage that has a layer for it"
    single = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()
    with pytest.raises(BadSetting, match="from 0: it has neither a bias nor a norm; choose others"):
        Directions().plan(single, CentralEngine(digits), ForgetRequest.parse("class:3"))
    with pytest.raises(BadSetting, match="of a class"):
        Directions().plan(identity, CentralEngine(digits), ForgetRequest.parse("samples:0"))


@pytest.mark.parametrize(
    "setting",
    [{"repair": False}, {"edit": "conv"}, {"tap": "bn"}, {"alpha": 0.5}, {"scope": "global"}, {"weighting": "paper"}],
)
def test_a_setting_that_would_do_nothing_is_refused_by_name(setting: dict[str, Any]) -> None:
    ((name, _),) = setting.items()
    with pytest.raises(UnknownName, match=f"'{name}'"):
        make_method("directions", setting)
