import json
import math
from pathlib import Path

import pytest
import torch
from commands import told
from small import SmallNet
from torch import nn
from torch.nn import functional

from fedortho.data.images import Images, evaluation_batches, made_images
from fedortho.errors import BadSetting, FedOrthoError
from fedortho.experiments.theory import LayerTheory, measure_theory, theory_figure, theory_sentences
from fedortho.reports.figures.style import caption_of, finding_of, png
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run


def images() -> Images:
    pixels = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return made_images(pixels, torch.arange(60) % 3, ["a", "b", "c"])


def test_quantities_are_those_of_a_loop_over_all_patches() -> None:
    net, given = SmallNet(3, 1).eval(), images()
    (found,) = measure_theory(net, given, "features.3")
    patches, responses = [], []
    with torch.no_grad():
        hidden = net.features[:3](torch.cat([batch for batch, _ in evaluation_batches(given, 60, "cpu")]))
        for image in hidden:
            columns = functional.unfold(image.unsqueeze(0), 3, padding=1)[0].double()
            patches += list(columns.T)
            responses.append(net.features[3](image.unsqueeze(0))[0].flatten(1).double())
    x, w = torch.stack(patches), net.features[3].weight.detach().flatten(1).double()
    sigma = torch.cov(x.T, correction=0)
    products = [float(a @ b) for i, a in enumerate(w) for j, b in enumerate(w) if i != j]
    covariances = [abs(float(a @ sigma @ b)) for i, a in enumerate(w) for j, b in enumerate(w) if i != j]
    assert found.epsilon == pytest.approx(float((w @ w.T - torch.eye(len(w))).norm()))
    assert found.largest_product == pytest.approx(max(map(abs, products)))
    assert found.largest_norm_error == pytest.approx(max(abs(float(a @ a) - 1) for a in w))
    assert found.eta == pytest.approx(float(torch.linalg.eigvalsh(sigma - torch.eye(len(sigma))).abs().max()))
    assert found.largest_covariance == pytest.approx(max(covariances), rel=1e-4)
    assert found.mean_covariance == pytest.approx(sum(covariances) / len(covariances), rel=1e-4)
    every = torch.stack(responses)  # (images, kernels, positions)
    spread = (w @ sigma @ w.T).diagonal().sqrt()
    largest = ((every.amax(2) - w @ x.mean(0)) / spread).mean()
    assert found.maxima["64"] == pytest.approx(float(largest), rel=1e-4)


def test_white_patches_and_orthogonal_kernels_have_what_the_theory_promises() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Flatten(), nn.Linear(4 * 64, 2))
    nn.init.eye_(net[0].weight.data.view(4, 4))
    white = made_images(
        torch.randn(400, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 2, ["a", "b"]
    )
    (found,) = measure_theory(net, white, "0")
    assert found.epsilon == 0
    assert found.lemma_holds
    assert found.eta < 0.05
    assert found.largest_covariance <= found.bound < 0.05
    assert found.maxima["64"] == pytest.approx(math.sqrt(2 * math.log(64)), rel=0.25), "it grows, and does not fall"
    assert found.maxima["1"] < 0.1 < found.maxima["4"] < found.maxima["16"] < found.maxima["64"]


def test_grouped_convolutions_are_refused_by_name() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Flatten(), nn.Linear(256, 3)
    )
    with pytest.raises(BadSetting, match="grouped"):
        measure_theory(net, images(), "1")
    net = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(BadSetting, match="one kernel"):
        measure_theory(net, images(), "0")


@pytest.mark.slow
def test_the_command_compares_two_runs_and_draws(tmp_path: Path) -> None:
    settings = TrainSettings(data="digits", model="small:SmallNet", epochs=1, crop=0, flip=0.0, threads=1, device="cpu")
    runs = [tmp_path / name / "run" for name in ("one", "other")]  # the same name twice
    for run in runs:
        train_run(run, settings)
    words = ("theory", runs[0], "--images", "50", "--layers", "all", "--beside", runs[1])
    text = told(*words, "--figure", tmp_path / "theory.png")
    assert "The lemma holds in 6 of 6 layers" in text
    assert "run, beside: small:SmallNet on digits, seed 0, 50 training images" in text
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(told(*words, "--json"))
    assert [layer["layer"] for layer in found["run"]] == ["features.0", "features.3", "features.6"]
    assert list(found) == ["run", "run, beside"]
    with pytest.raises(FedOrthoError, match="at least 1"):
        told("theory", runs[0], "--images", "0")
    with pytest.raises(FedOrthoError, match=r"--figure is .*theory\.bmp; expected a name that ends with \.png"):
        told("theory", runs[0], "--figure", tmp_path / "theory.bmp")
    assert not (tmp_path / "theory.bmp").exists()


def test_a_figure_of_runs_with_long_names_is_not_cut_off() -> None:
    layers = [LayerTheory("features.24", 8, 0.5, 0.2, 0.1, 4.0, 2.0, 0.5, {"1": -1e-9, "4": 1.0})]
    assert layers[0].cells[-1] == "0.0: 1, 1.0: 4"
    names = [f"cifar10-vgg-mini-lazy-0.1-seed0-without-class-{one}-seed0" for one in (1, 2)]
    figure = theory_figure(dict.fromkeys(names, layers), "two networks")
    png(figure)  # lays it out
    width = figure.bbox.width
    for ax in figure.axes:
        legend, place = ax.get_legend(), ax.get_window_extent()
        assert legend is not None
        assert place.width > 0.35 * width, "its legend leaves it room"
        assert legend.get_window_extent().x1 <= width
        assert legend.get_window_extent().x0 >= place.x0


def test_a_figure_says_what_holds() -> None:
    layer = LayerTheory("conv", 8, 0.5, 0.2, 0.1, 4.0, 2.0, 0.5, {"1": 0.0, "4": 1.0})
    worse = LayerTheory("conv", 8, 0.5, 0.7, 0.1, 4.0, 2.0, 0.5, {"1": 0.0, "4": 1.0})
    assert layer.bound == 6.5
    assert (
        "holds in 1 of 2 layers and the covariance bound in 2, at least 3.25 times"
        in theory_sentences({"plain": [worse], "orthogonal": [layer]})[0]
    )
    figure = theory_figure({"plain": [worse], "orthogonal": [layer]}, "tiny on digits, seed 0, 50 training images")
    assert "grows" in finding_of(figure)
    assert caption_of(figure) == "tiny on digits, seed 0, 50 training images; layers: conv"
