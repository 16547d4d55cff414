"""Figures of benchmarks: values that can be checked by hand, and titles that say what was found."""

from dataclasses import replace

import pytest
import torch
from paper_figures import activations, costs, kernels, relearning
from small import TinyNet
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.engines.cost import Cost
from fedortho.errors import BadData, UnknownName
from fedortho.reports.figures.style import caption_of, finding_of

LAYERS = ("features.0", "features.3", "features.6")


def pair_of(value: float) -> Tensor:
    return torch.tensor([[1.0, value], [value, 1.0]])


def test_two_equal_kernels_are_alike_and_two_of_different_groups_are_not() -> None:
    conv = nn.Conv2d(2, 4, 1, groups=2, bias=False)
    conv.weight.data = torch.tensor([1.0, -2.0, 1.0, 1.0]).view(4, 1, 1, 1)
    similarity = kernels.kernel_similarity(nn.Sequential(conv), ["0"])["0"]
    assert similarity.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert kernels.mean_similarity(similarity) == pytest.approx(2 / 6)
    with pytest.raises(UnknownName, match="no convolution 'O'; choose from 0"):
        kernels.kernel_similarity(nn.Sequential(conv), ["O"])


def test_likeness_of_features_equals_a_plain_loop_over_pairs_whatever_the_batches(tiny: TinyNet, toy: Images) -> None:
    few = toy.subset(range(12))
    batches = [
        (few.normalise(few.pixels[few.rows[start : start + 5]]), few.labels[start : start + 5]) for start in (0, 5, 10)
    ]
    tiny.train()
    found = kernels.feature_similarity(tiny, batches, ["features.3"])["features.3"]
    assert tiny.training, "the model keeps its mode"
    tiny.eval()
    with torch.no_grad():
        maps = tiny.features[:4](few.normalise(few.pixels[few.rows])).double()
    for one in range(8):
        for other in range(8):
            a, b = maps[:, one].flatten(), maps[:, other].flatten()
            assert float(found[one, other]) == pytest.approx(abs(float(a @ b) / float(a.norm() * b.norm())), abs=1e-5)


def test_heatmaps_say_how_much_less_similar_the_kernels_became() -> None:
    plain, ortho = {"a": pair_of(0.3), "b": pair_of(0.2)}, {"a": pair_of(0.3), "b": pair_of(0.004)}
    figure = kernels.gram_figure({"plain": plain, "orthogonal": ortho})
    assert finding_of(figure) == (
        "Trained orthogonal, kernels of b are 50 times less similar than plain, those of a about as similar"
    )
    assert len(figure.axes) == 5, "two models, two layers, one scale"
    single = kernels.gram_figure({"plain": {"a": pair_of(0.2)}, "orthogonal": {"a": pair_of(0.4)}})
    assert "2.0 times more similar" in finding_of(single), "also where orthogonality did not help"


def test_depth_and_distribution_name_the_placement_that_helps(tiny: TinyNet) -> None:
    depths = kernels.depths_of(tiny, (1, 8, 8))
    assert depths == {"features.0": "shallow", "features.3": "mid", "features.6": "deep"}
    models = {
        "none": dict(zip(LAYERS, map(pair_of, (0.1, 0.5, 0.3)), strict=True)),
        "deep": dict(zip(LAYERS, map(pair_of, (0.1, 0.5, 0.02)), strict=True)),
    }
    by_depth = kernels.similarity_by_depth_figure(models)
    assert by_depth.axes[0].lines[0].get_ydata() == pytest.approx([0.1, 0.5, 0.3])
    assert finding_of(by_depth) == (
        "None: features are most similar in features.3 (0.50), and in the last layer 0.30 (with deep 0.02)"
    )
    curves = kernels.similarity_curves_figure(models, depths)
    assert finding_of(curves).endswith("least similar with deep: median |cosine| 0.02 (none 0.30)")
    assert [len(ax.lines) for ax in curves.axes] == [6, 3], "three layers each, and the legend's"


def test_answers_of_a_class_equal_the_mean_of_single_images(tiny: TinyNet, toy: Images) -> None:
    tiny.eval()
    few = toy.subset(range(8))  # two of each class
    peaks = activations.class_peaks(tiny, few, "features.3")
    with torch.no_grad():
        single = [tiny.features[:4](few.normalise(few.pixels[row : row + 1])).amax((2, 3))[0] for row in (1, 5)]
    assert torch.allclose(peaks[1], (single[0] + single[1]) / 2, atol=1e-5)
    with pytest.raises(BadData, match="some classes have no image"):
        activations.class_peaks(tiny, toy.subset([0, 1, 2]), "features.3")


def test_the_title_names_the_kernel_that_stands_out_and_what_is_left() -> None:
    before = torch.tensor([[9.0, 1.0], [1.0, 1.0], [3.0, 2.0]])
    after = before.clone()
    after[0, 0] = 4.5
    shown = activations.KernelResponses("orthogonal", before, after, (0, 1))
    figure = activations.activation_figure([shown], ["cat", "dog", "cow"], [0])
    told = "exceeds the other classes by at most 7.0 sd in the orthogonal model (kernel 1, which keeps 50.0 %"
    assert finding_of(figure).startswith(f"Cat {told}")


def test_steps_of_relearning_are_told_by_role() -> None:
    curves = {"unlearned": [(0, 0.0), (10, 0.75), (20, 0.9)], "reference": [(0, 0.0), (10, 0.2), (20, 0.4)]}
    told = finding_of(relearning.relearn_figure(curves, target=0.7))
    assert told == "Steps until the class is relearned: after forgetting 10, retrained without it over 20"


def test_costs_are_compared_with_retraining_by_both_conventions_and_what_is_cheaper_is_named() -> None:
    rows = {
        "retrain": Cost(1.0, 0, 0, 5e12, 1, 600_000, 400_000),
        "hide": Cost(1.0, 0, 0, 1e11, 1, 900, 100, 5e10),
        "ssd": Cost(1.0, 0, 0, 2e11, 1, 9000, 1000, 1.9e11),
        "logit-mask": Cost(1.0, 0, 0, 0.0, 0, 0, 0),
    }
    figure = costs.cost_figure(rows, "a network")
    assert finding_of(figure) == (
        "Hide needs 1,000 times fewer bytes, all clients; 50 times fewer FLOPs, everything counted; 100 times fewer "
        "FLOPs, kept by everybody than retrain. Cheaper than hide by bytes, all clients: logit-mask; FLOPs, everything "
        "counted: logit-mask; FLOPs, kept by everybody: logit-mask, ssd"
    )
    assert caption_of(figure) == "a network"
    assert [text.get_text() for text in figure.axes[0].texts] == ["1 M", "1 k", "10 k", "none"]
    alone = {name: replace(cost, bytes_up=0, bytes_down=0) for name, cost in rows.items()}
    assert len(costs.cost_figure(alone, "a network").axes) == 2, "where nothing travels there is nothing to draw"
