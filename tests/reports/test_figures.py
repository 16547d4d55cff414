"""Figures: values that can be checked by hand, and titles that say what was found."""

import builtins
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from small import TinyNet
from torch import Tensor, nn

from fedortho.data.images import Images, images_from_tensors
from fedortho.errors import FedOrthoError
from fedortho.models.predictions import Evaluation, evaluate
from fedortho.models.zoo import build_model
from fedortho.reports.figures import attention, results
from fedortho.reports.figures.style import axis_names, entitle, finding_of, legible, new_figure, png
from fedortho.reports.pictures import as_pictures
from fedortho.training.loop import Epoch


def scored(*rows: Sequence[int]) -> Evaluation:
    table = tuple(tuple(row) for row in rows)
    return Evaluation(sum(map(sum, table)), 0.0, 0.0, table)


def epoch(number: int, valid: float | None, clients: int | None = None) -> Epoch:
    return Epoch(number, 1.0, 0.5, None, valid, 1.0, clients)


def test_grad_cam_equals_its_formula(tiny: TinyNet, toy: Images) -> None:
    pytest.importorskip("captum")
    few = toy.subset(range(3))
    tiny.eval().requires_grad_(False)
    found = attention.grad_cam(tiny, few, "features.6")
    inputs = few.normalise(few.pixels[few.rows])
    for image, label in zip(inputs, few.labels.tolist(), strict=True):
        maps = tiny.features[:7](image.unsqueeze(0)).detach().requires_grad_(True)
        tiny.fc(tiny.features[7:](maps).mean((2, 3)))[0, label].backward()
        assert maps.grad is not None
        expected = (maps.grad.mean((2, 3), keepdim=True) * maps).sum(1)[0].relu().detach()
        assert torch.allclose(found[0], expected, atol=1e-6)
        found = found[1:]
    assert not any(p.requires_grad for p in tiny.parameters()), "the model is left as it was"


def test_without_its_libraries_a_figure_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tiny: TinyNet, toy: Images
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".", maxsplit=1)[0] in ("captum", "matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FedOrthoError, match=r"Grad-CAM needs captum; install it: pip install 'fedortho\[figures\]'"):
        attention.grad_cam(tiny, toy.subset([0]), "features.6")
    with pytest.raises(FedOrthoError, match="figures need matplotlib"):
        results.frontier_figure([results.Point(0.1, 0.2, 0.3)], results.Point(0.1, 0.2, 0.3))


def test_examples_are_the_first_of_each_class_that_all_models_recognise(toy: Images) -> None:
    class Answer(nn.Module):
        def __init__(self, wrong: int) -> None:
            super().__init__()
            self.wrong = wrong

        def forward(self, x: Tensor) -> Tensor:
            out = nn.functional.one_hot(toy.labels[: len(x)], 4).float()
            out[self.wrong] = out[self.wrong].roll(1)
            return out

    chosen = attention.recognised_examples([Answer(1), Answer(2)], toy)
    assert chosen.rows.tolist() == [0, 5, 6, 3]
    with pytest.raises(FedOrthoError, match="no image of 1 is recognised by every model"):
        attention.recognised_examples([Answer(1)], toy.subset(range(4)))


def test_attention_left_is_told_for_the_class_and_the_others(toy: Images) -> None:
    before = torch.ones(4, 8, 8)
    after = before * torch.tensor([0.05, 1.0, 0.9, 1.1]).view(4, 1, 1)
    figure = attention.grad_cam_figure(toy.subset(range(4)), {"VGG": (before, after)}, [0])
    assert finding_of(figure).endswith("attention to 0 that is left: 5.0 % in VGG (others: 100.0 %)")
    assert len(figure.axes) == 12


def test_the_frontier_marks_what_was_chosen() -> None:
    points = [results.Point(0.2, 0.0, 0.8), results.Point(0.01, 0.9, 0.85), results.Point(0.1, 0.004, 0.84)]
    figure = results.frontier_figure(points, points[2], target=0.01, least=0.83)
    assert finding_of(figure) == "Editing 10.0 % of the kernels leaves 0.4 % forget accuracy and 84.0 % retain accuracy"
    assert list(figure.axes[0].lines[0].get_xdata()) == [0.01, 0.1, 0.2], "in the order of ratios"


def test_classes_and_confusion_tell_what_moved_where() -> None:
    before, after = scored([9, 1, 0], [0, 10, 0], [0, 2, 8]), scored([0, 3, 7], [0, 9, 1], [0, 0, 10])
    names = ["cat", "dog", "cow"]
    told = finding_of(results.class_accuracy_figure(before, after, names, [0], reference=before))
    assert told == "Cat falls from 90.0 % to 0.0 %; of the retained classes dog loses most, 10.0 points"
    told = finding_of(results.confusion_figure(before, after, names, [0]))
    assert told.startswith("Images of cat are now most often called cow (+70 points); the shares of predictions")
    assert results.confusion_change(before, after)[2].tolist() == pytest.approx([0, -0.2, 0.2])


def test_of_many_classes_those_that_changed_most_are_shown_and_all_that_had_to_go() -> None:
    before = scored(*([10 if i == j else 0 for j in range(30)] for i in range(30)))
    rows = [list(row) for row in before.confusion]
    rows[7][7], rows[7][0] = 4, 6
    labels = results.most_changed(before, scored(*rows), [29], most=5)
    assert len(labels) == 5
    assert {7, 29} <= set(labels)
    names = [f"class {i}" for i in range(30)]
    assert len(results.confusion_figure(before, scored(*rows), names, [29]).axes[0].texts) == 0, "too many to write"


def test_confidence_is_the_probability_of_the_own_class(tiny: TinyNet, toy: Images) -> None:
    tiny.eval()
    few = toy.subset(range(6))
    with torch.no_grad():
        expected = tiny(few.normalise(few.pixels[few.rows])).softmax(1)[range(6), few.labels]
    assert torch.allclose(results.own_confidence(tiny, few), expected)
    figure = results.confidence_figure(
        {"original": torch.tensor([1.0, 0.8]), "unlearned": torch.tensor([0.0, 0.0])}, "cat"
    )
    assert finding_of(figure) == "Mean confidence in cat: before 90.0 %, after forgetting 0.0 %"


def test_probes_are_told_by_role() -> None:
    told = finding_of(results.probe_figure({"unlearned": {"a": 0.2, "b": 0.6}, "reference": {"a": 0.2, "b": 0.5}}))
    assert told.endswith("60.0 % after forgetting, 50.0 % retrained without it")


def test_training_is_told_in_epochs_or_in_rounds() -> None:
    rising = [epoch(0, 0.4, 5), epoch(1, None, 5), epoch(2, 0.8, 5)]
    figure = results.training_figure({"ours": rising, "theirs": [epoch(0, 0.1, 5)]})
    assert finding_of(figure) == "Validation accuracy after the last round: ours 80.0 %, theirs 10.0 %"
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 3], "counted from one"
    assert "epoch" in finding_of(results.training_figure({"ours": [epoch(0, 0.4)]}))


def test_close_ticks_have_different_labels() -> None:
    figure = results.training_figure({"ours": [epoch(number, 0.831 + number / 2000) for number in range(5)]})
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == len(set(labels)), labels


def test_a_picture_is_a_small_png_and_shows_the_data() -> None:
    points = [results.Point(0.1, 0.9, 0.9), results.Point(0.2, 0.1, 0.8)]
    one, same, other = (
        png(results.frontier_figure(p, points[0])) for p in (points, points, [points[0], replace_forget(points[1])])
    )
    assert one == same
    assert one != other
    assert len(one) < 100_000
    image = Image.open(io.BytesIO(one))
    assert image.format == "PNG"
    assert min(image.size) > 300


def replace_forget(point: results.Point) -> results.Point:
    return point._replace(forget=0.7)


def test_float_images_and_grey_ones_can_be_drawn_too(toy: Images) -> None:
    floats = replace(toy, pixels=toy.normalise(toy.pixels))
    assert as_pictures(floats.subset([0, 1])).dtype == torch.uint8
    colour = images_from_tensors(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))
    assert as_pictures(colour).shape == (2, 8, 8, 3)


def test_the_last_layer_of_a_residual_network_is_no_shortcut() -> None:
    assert attention.last_layer(build_model("resnet-mini", num_classes=4, channels=1), (1, 8, 8)) == "layer3.0.conv2"


def test_a_real_evaluation_can_be_drawn(tiny: TinyNet, toy: Images) -> None:
    score = evaluate(tiny, toy)
    assert finding_of(results.confusion_figure(score, score, toy.names, [1])).endswith("change by 0.0 %")


ODD = (
    "猫",
    "قطة",
    "बिल्ली",
    "🐈",
    "$x_1$",
    "50$ or 60$",
    "<b>bold</b>",
    "[red]a[/]",
    "a, b",
    "",
    "crane",
    "crane",
    "x" * 300,
    "ß_^é",
)


def test_class_names_of_any_kind_are_drawn_without_a_warning() -> None:
    rows = [[5 * (true == answer) for answer in range(len(ODD))] for true in range(len(ODD))]
    before, after = scored(*rows), scored(*rows[-1:], *rows[:-1])
    drawn = {}
    for figure in (
        results.class_accuracy_figure(before, after, ODD, [0, 4]),
        results.confusion_figure(before, after, ODD, [0, 1, 2]),
        results.confidence_figure({"original": torch.rand(9)}, ODD[2]),
    ):
        caption = finding_of(figure)
        drawn[caption] = png(figure)  # warnings are errors here
        assert drawn[caption].startswith(b"\x89PNG")
        assert any(name in caption for name in ODD[:3]), "a browser has the signs that a figure may lack"


def test_a_sign_without_a_font_is_written_by_its_number_and_one_with_a_font_is_drawn() -> None:
    assert legible("ß $x$ …") == ("ß $x$ …", [])
    text, fonts = legible("a\U0010fffdb")  # for private use: no font has it
    assert (text, fonts) == ("a<U+10FFFD>b", [])
    _, found = legible("𝔄")  # mathematical: DejaVu Sans lacks it, fonts that come with matplotlib have it
    assert found


def test_a_name_with_a_hyphen_is_not_broken_in_a_title() -> None:
    figure, _ = new_figure(2.0, 1.0)
    title = "Cheaper: logit-mask, class-pruning, bad-teacher, eu-k, cf-k, regrow-all"
    entitle(figure, title)
    assert "\n" in figure.get_suptitle()
    assert finding_of(figure) == title


def test_names_on_an_axis_can_be_told_apart() -> None:
    names = axis_names(ODD)
    assert len(set(names)) == len(ODD)
    assert max(map(len, names)) <= 30
    assert names[9:13] == ["(9)", "crane (10)", "crane (11)", f"{'x' * 24}… (12)"]
