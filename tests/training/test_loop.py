import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import TinyNet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedortho.training.loop
from fedortho.data.images import Images, images_from_tensors
from fedortho.data.sources import load_images
from fedortho.errors import BadCheckpoint, BadData, BadSetting, FedOrthoError, UnknownName
from fedortho.models.predictions import accuracy, evaluate
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors
from fedortho.training.loop import Progress, fit
from fedortho.training.objectives import TrainingSet
from fedortho.training.orthogonality import ortho_penalty
from fedortho.training.penalties import ortho_layers
from fedortho.training.recipe import Recipe

QUICK = Recipe(epochs=2, batch_size=32, lr=0.05, crop=1)


def digest(model: nn.Module) -> str:
    return tensors_digest(model.state_dict())


def test_training_learns_the_toy_and_leaves_the_input_model_as_it_was(tiny: TinyNet, toy: Images) -> None:
    before = digest(tiny)
    trained = fit(tiny, toy, replace(QUICK, epochs=8, flip=0.0))
    assert digest(tiny) == before
    assert tiny.training
    assert not trained.training
    assert 0.9 < accuracy(trained, toy) <= 1.0
    assert accuracy(tiny, toy) < 0.6


def test_digits_are_learnt_to_a_known_band() -> None:
    digits = load_images("digits")
    model = TinyNet(classes=10)
    trained = fit(model, digits.train, replace(QUICK, epochs=6, lr=0.1, flip=0.0, crop=0))
    assert 0.75 < accuracy(trained, digits.test) < 0.995


@pytest.mark.parametrize("parts", [2, 3, 1000])
def test_gradients_of_parts_of_a_batch_add_up_to_those_of_the_batch(toy: Images, parts: int) -> None:
    """Without batch norm, which normalises each part by its own images, the steps are the same."""
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(toy.classes))
    model(toy.normalise(toy.pixels[:2]))
    recipe, history = replace(QUICK, batch_size=20, momentum=0.5, flip=0.5), list[Progress]()
    whole = fit(model, toy, recipe, watch=history.append)
    parted = fit(model, toy, replace(recipe, accumulate=parts), watch=history.append)
    for name, weight in parted.state_dict().items():
        torch.testing.assert_close(weight, whole.state_dict()[name], rtol=1e-4, atol=1e-5)
    told = [each.history[-1] for each in history if len(each.history) == 2]
    assert told[0].loss == pytest.approx(told[-1].loss, rel=1e-4)
    assert (told[0].accuracy, told[0].images) == (told[-1].accuracy, told[-1].images)


def test_parts_of_a_batch_hold_fewer_activations_and_batch_norm_sees_each_alone(tiny: TinyNet, toy: Images) -> None:
    sizes = list[int]()
    with torch.no_grad():
        tiny.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    trained = fit(tiny, toy, replace(QUICK, epochs=1, accumulate=4))
    assert max(sizes) == 8
    assert digest(trained) != digest(fit(tiny, toy, replace(QUICK, epochs=1)))
    with pytest.raises(BadSetting, match="accumulate is 2"):
        fit(tiny, [TrainingSet(toy), TrainingSet(toy)], replace(QUICK, accumulate=2))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tiny: TinyNet, toy: Images) -> None:
    first, again = fit(tiny, toy, QUICK), fit(tiny, toy, QUICK)
    assert digest(first) == digest(again) != digest(fit(tiny, toy, replace(QUICK, seed=1)))


def test_the_callers_random_state_is_untouched(tiny: TinyNet, toy: Images) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    fit(tiny, toy, QUICK)
    assert torch.equal(torch.rand(3), expected)


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [1, 7, 8, 9, 15])
def test_a_run_killed_at_any_step_goes_on_to_the_same_bytes(
    toy: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    torch.manual_seed(0)
    model = TinyNet(dropout=0.3)
    recipe = replace(QUICK, erase=0.5, ortho_every=3)
    whole: list[Progress] = []
    expected = fit(model, toy, recipe, valid=toy, watch=whole.append)
    monkeypatch.setattr(fedortho.training.loop, "CHECKPOINT_SECONDS", 0.0)  # save after each step
    step, steps = fedortho.training.loop._take_step, 0

    def dying(*arguments: object) -> object:
        nonlocal steps
        steps += 1
        if steps > at:
            raise Killed
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fedortho.training.loop, "_take_step", dying)
    file = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Killed):
        fit(model, toy, recipe, valid=toy, checkpoint=file)
    monkeypatch.setattr(fedortho.training.loop, "_take_step", step)
    news: list[Progress] = []
    resumed = fit(model, toy, recipe, valid=toy, checkpoint=file, watch=news.append)
    assert digest(resumed) == digest(expected)
    timeless = [[replace(entry, seconds=0) for entry in told[-1].history] for told in (whole, news)]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) == 2


def test_a_checkpoint_of_other_settings_or_data_is_refused(tiny: TinyNet, toy: Images, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.safetensors"
    fit(tiny, toy, QUICK, checkpoint=file)
    for changed in (replace(QUICK, lr=0.04), replace(QUICK, epochs=3)):
        with pytest.raises(BadCheckpoint, match="belongs to other settings"):
            fit(tiny, toy, changed, checkpoint=file)
    with pytest.raises(BadCheckpoint, match="belongs to other settings, data"):
        fit(tiny, toy.subset(range(100)), QUICK, checkpoint=file)
    with pytest.raises(BadCheckpoint, match="belongs to other settings, data"):
        fit(tiny, replace(toy, pixels=toy.pixels.flip(0)), QUICK, checkpoint=file)
    with pytest.raises(BadCheckpoint, match="belongs to other settings, data"):
        fit(tiny, replace(toy, mean=(0.1,), std=(0.5,)), QUICK, checkpoint=file)  # another preprocessing
    with pytest.raises(BadCheckpoint, match="belongs to other settings"):
        fit(tiny, [TrainingSet(toy, given=True)], QUICK, checkpoint=file)  # without augmentation
    with pytest.raises(BadCheckpoint, match="belongs to other settings"):
        fit(tiny, toy, QUICK, checkpoint=file, after=1)
    frozen = copy.deepcopy(tiny)
    next(frozen.parameters()).requires_grad_(False)
    with pytest.raises(BadCheckpoint, match="belongs to other settings"):
        fit(frozen, toy, QUICK, checkpoint=file)
    tensors, note = read_tensors(file)
    write_tensors(file, tensors, {key: value for key, value in note.items() if key != "inputs"})
    assert digest(fit(tiny, toy, QUICK, checkpoint=file)), "one of an earlier version, which did not note them"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(BadCheckpoint, match="not a complete safetensors file"):
        fit(tiny, toy, QUICK, checkpoint=file)


@pytest.mark.parametrize("every", [1, 4])
def test_orthogonality_is_reached_in_the_chosen_layers_and_only_there(tiny: TinyNet, toy: Images, every: int) -> None:
    recipe = replace(QUICK, epochs=6, ortho=0.5, ortho_every=every, ortho_layers="features.3")
    with_it, without = fit(tiny, toy, recipe), fit(tiny, toy, replace(recipe, ortho=0.0))

    def penalty(model: nn.Module, name: str) -> float:
        return float(ortho_penalty(model.get_submodule(name)).detach())  # type: ignore[arg-type]

    assert penalty(with_it, "features.3") < 0.1 * penalty(without, "features.3")
    assert penalty(with_it, "features.6") > 0.5 * penalty(without, "features.6")


def test_the_gradient_of_a_step_is_that_of_the_papers_loss(tiny: TinyNet, toy: Images) -> None:
    """One step of plain SGD against the loss written out and left to autograd."""
    torch.manual_seed(9)
    reference = TinyNet()
    recipe = Recipe(
        epochs=1, batch_size=240, lr=0.01, schedule="constant", momentum=0.0, weight_decay=0.0, crop=0, flip=0.0
    )
    recipe = replace(recipe, ortho=0.3, ortho_every=1, align=0.2)
    stepped = fit(tiny, toy, recipe, reference=reference)
    names = [layer.name for layer in ortho_layers(tiny, toy.shape, recipe)]
    theirs = dict(reference.named_parameters())
    twin = copy.deepcopy(tiny).train()
    mine = dict(twin.named_parameters())
    loss = nn.functional.cross_entropy(twin(toy.normalise(toy.pixels)), toy.labels)
    for name in names:
        rows = mine[f"{name}.weight"].flatten(1)
        loss = loss + 0.3 * (rows @ rows.T - torch.eye(len(rows))).square().sum()
        loss = loss + 0.2 * (mine[f"{name}.weight"] - theirs[f"{name}.weight"].detach()).square().sum()
    gradients = torch.autograd.grad(loss, list(mine.values()))
    for (name, weight), gradient in zip(mine.items(), gradients, strict=True):
        assert torch.allclose(stepped.get_parameter(name), weight - 0.01 * gradient, atol=1e-5), name


def test_alignment_keeps_a_client_near_the_received_model(tiny: TinyNet, toy: Images) -> None:
    def drift(recipe: Recipe) -> float:
        moved = fit(tiny, toy, recipe, reference=tiny)
        return float(
            (moved.get_parameter("features.6.weight") - tiny.get_parameter("features.6.weight")).norm().detach()
        )

    assert drift(replace(QUICK, align=1.0, ortho=0.0)) < 0.7 * drift(replace(QUICK, align=0.0, ortho=0.0))


def test_alignment_of_all_weights_reaches_the_classifier(tiny: TinyNet, toy: Images) -> None:
    base = replace(QUICK, align=2.0, ortho=0.0)
    deep, everywhere = (fit(tiny, toy, replace(base, align_layers=where), reference=tiny) for where in ("ortho", "all"))

    def drift(model: nn.Module) -> float:
        return float((model.get_parameter("fc.weight") - tiny.get_parameter("fc.weight")).norm().detach())

    assert drift(everywhere) < drift(deep)


def test_mixed_precision_learns_too(tiny: TinyNet, toy: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # on any machine
    trained = fit(tiny, toy, replace(QUICK, epochs=8, flip=0.0, precision="bfloat16"))
    assert all(weight.dtype == torch.float32 for weight in trained.parameters())
    assert accuracy(trained, toy) > 0.9


def test_a_last_batch_of_one_image_is_joined_to_the_one_before(toy: Images) -> None:
    deep = nn.Sequential(nn.Conv2d(1, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4))
    fit(deep, toy.subset(range(33)), replace(QUICK, crop=0, ortho=0.0))


def test_a_loss_that_is_not_finite_stops_with_advice(tiny: TinyNet, toy: Images) -> None:
    with pytest.raises(FedOrthoError, match=r"the loss became (nan|inf) in epoch \d+, step \d+ .*lower lr"):
        fit(tiny, toy, replace(QUICK, epochs=30, lr=1e6, ortho=0.5, ortho_every=1, schedule="constant"))


def test_nothing_to_train_on_and_unknown_layers_are_refused(tiny: TinyNet, toy: Images) -> None:
    with pytest.raises(BadData, match=r"list must give batches"):
        fit(tiny, [toy.pixels], QUICK)
    with pytest.raises(BadData, match="no images to train on"):
        fit(tiny, toy.subset([]), QUICK)
    with pytest.raises(UnknownName, match=r"no layer 'layer4'; choose from .*features\.0"):
        fit(tiny, toy, replace(QUICK, ortho_layers="layer4"))


def test_a_model_or_reference_that_does_not_fit_is_refused(tiny: TinyNet, toy: Images) -> None:
    with pytest.raises(BadData, match="label 3 but the model has only 2 classes"):
        fit(TinyNet(classes=2), toy, QUICK)
    with pytest.raises(BadSetting, match="cannot read images of 1x8x8"):
        fit(TinyNet(channels=3), toy, replace(QUICK, ortho=0.0, align=0.0))
    narrow = copy.deepcopy(tiny)
    narrow.features[6] = nn.Conv2d(8, 12, 1)
    with pytest.raises(BadSetting, match=r"another network: it lacks features\.6\.weight"):
        fit(tiny, toy, QUICK, reference=narrow)
    solid = copy.deepcopy(tiny)
    solid.unused = nn.Conv3d(1, 1, 1)
    with pytest.raises(BadSetting, match=r"unused\.weight has 5 dimensions"):
        fit(solid, toy, QUICK)
    with pytest.raises(BadSetting, match="one image at a time"):
        fit(tiny, toy, replace(QUICK, batch_size=1))
    torch.nn.utils.parametrizations.weight_norm(tiny.features[6])
    with pytest.raises(BadSetting, match=r"weights of features\.6 are computed"):
        fit(tiny, toy, QUICK)


def test_tall_layers_that_are_all_skipped_are_refused(toy: Images) -> None:
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    with pytest.raises(BadSetting, match="tall = skip leaves none"):
        fit(net, toy, replace(QUICK, tall="skip"))


def test_frozen_weights_stay_as_they_are(tiny: TinyNet, toy: Images) -> None:
    tiny.features[6].weight.requires_grad_(False)
    moved = fit(tiny, toy, replace(QUICK, align_layers="all"), reference=TinyNet())
    assert torch.equal(moved.features[6].weight, tiny.features[6].weight)
    assert not torch.equal(moved.features[3].weight, tiny.features[3].weight)


def test_a_model_that_gives_no_logits_in_training_is_refused(toy: Images) -> None:
    class Auxiliary(TinyNet):
        def forward(self, x: torch.Tensor) -> object:
            answer = super().forward(x)
            return (answer[:, :2], None) if self.training else answer

    with pytest.raises(BadSetting, match="in training the model answers 32 images with tuple"):
        fit(Auxiliary(), toy, QUICK)


def test_the_watcher_hears_of_each_epoch_once_with_its_validation(tiny: TinyNet, toy: Images) -> None:
    news: list[Progress] = []
    fit(tiny, toy, QUICK, valid=toy.subset(range(40)), watch=news.append)
    history = news[-1].history
    assert [entry.epoch for entry in history] == [0, 1]
    assert all(0 <= entry.valid <= 1 and entry.ortho > 0 for entry in history if entry.valid is not None)
    assert news[-1].step == news[-1].steps == 8


def test_evaluation_counts_answers_by_true_label_and_keeps_the_mode() -> None:
    images = images_from_tensors(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 2, 1]), "abcd")
    always_two = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    nn.init.zeros_(always_two[1].weight)
    always_two[1].bias.data = torch.tensor([0.0, 0.0, 1.0, 0.0])
    score = evaluate(always_two.train(), images)
    assert always_two.training
    assert score.confusion == ((0, 0, 2, 0), (0, 0, 1, 0), (0, 0, 1, 0), (0, 0, 0, 0))
    assert score.per_class == (0.0, 0.0, 1.0, None)
    assert score.accuracy == 0.25
    chosen = math.log(3 + math.e) - 1
    assert score.loss == pytest.approx((3 * (chosen + 1) + chosen) / 4)


def test_evaluation_refuses_labels_that_the_model_does_not_know_and_no_images(toy: Images) -> None:
    with pytest.raises(BadData, match="label 3 but the model has only 2 classes"):
        evaluate(TinyNet(classes=2), toy)
    with pytest.raises(BadData, match=r"normalised as in training, not torch\.uint8"):
        evaluate(TinyNet(), [(toy.pixels, toy.labels)])
    with pytest.raises(BadData, match="label -1 is negative"):
        evaluate(TinyNet(), [(torch.zeros(1, 1, 8, 8), torch.tensor([-1]))])
    with pytest.raises(BadData, match="no images to evaluate"):
        evaluate(TinyNet(), toy.subset([]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": -1}, "epochs must be at least 0"),
        ({"batch_size": 0}, "batch-size"),
        ({"ortho_every": 0}, "ortho-every must be at least 1"),
        ({"momentum": 1.5}, "momentum must be at least 0 and at most 1"),
        ({"milestones": "a,b"}, "milestones must be numbers"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "float8"}, "choose from bfloat16, float32"),
        ({"tall": "x"}, "choose from columns, rows, skip"),
        ({"lr": math.nan}, "lr must be a finite number"),
        ({"ortho": math.inf}, "ortho must be a finite number, not inf"),
        ({"seed": 2**63}, "seed must be at least 0 and below"),
    ],
)
def test_a_recipe_out_of_range_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises((BadSetting, UnknownName), match=message):
        Recipe(**change)  # type: ignore[arg-type]


def test_coordinates_that_the_mask_denies_stay_bit_for_bit_and_the_others_move(toy: Images, tiny: nn.Module) -> None:
    mask = {"features.3.weight": torch.ones_like(tiny.features[3].weight, dtype=torch.bool)}
    mask["features.3.weight"][2] = False
    trained = fit(tiny, toy, Recipe(epochs=1, ortho=0.1), trainable=mask)
    before, after = tiny.get_parameter("features.3.weight"), trained.get_parameter("features.3.weight")
    assert torch.equal(before[2], after[2])
    assert not torch.isclose(before[[0, 1, 3]], after[[0, 1, 3]]).all()
    with pytest.raises(BadSetting, match=r"the mask names fc\.scale"):
        fit(tiny, toy, Recipe(epochs=1), trainable={"fc.scale": torch.ones(1, dtype=torch.bool)})


def test_cudnn_stays_on_and_is_deterministic_while_training(tiny: TinyNet, toy: Images) -> None:
    seen, cudnn = set(), torch.backends.cudnn
    tiny.features[0].register_forward_hook(lambda *_: seen.add((cudnn.enabled, cudnn.deterministic, cudnn.benchmark)))
    before = (cudnn.enabled, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32)
    assert cudnn.enabled
    fit(tiny, toy, replace(QUICK, ortho=0.0))
    seen.discard(before[:3])  # checks before training
    assert seen == {(True, True, False)}
    assert (cudnn.enabled, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) == before


class _HostReads(TorchDispatchMode):
    """Counts values that Python reads from tensors: each waits until a GPU has done all that it was given."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device(tiny: TinyNet, toy: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedortho.training.loop, "REPORT_SECONDS", math.inf)
    mask = {"features.3.weight": torch.zeros_like(tiny.features[3].weight, dtype=torch.bool)}
    numbers = []
    for images in (toy.subset(range(64)), toy):
        with _HostReads() as reads:
            fit(tiny, images, replace(QUICK, batch_size=8, ortho_every=1, erase=0.5), reference=tiny, trainable=mask)
        numbers.append(reads.number)
    assert numbers[0] == numbers[1], "8 and 30 steps"
