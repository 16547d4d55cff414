import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import CLASSES, SERVED, Answers, Viewed, plain
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from fedortho.data.images import Images, images_from_tensors
from fedortho.errors import BadSetting
from fedortho.models.layout import memory_format_of
from fedortho.models.predictions import evaluate, logits_of
from fedortho.models.prepare import find_logits, prepare_model, released
from fedortho.models.zoo import build_model
from fedortho.storage.checkpoints import fitted_weights, load_weights
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

SHAPE = (3, 16, 16)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of norms that people still have
ONE_EPOCH = Recipe(epochs=1, batch_size=8, crop=0, ortho=0.0)


@pytest.fixture
def some() -> Images:
    pixels = torch.randint(0, 256, (16, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images_from_tensors(pixels, torch.arange(16) % CLASSES)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.orthogonal, weight_norm, spectral_norm, pruned]
)
def test_computed_weights_become_plain_ones_and_the_given_network_keeps_its_own(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    given = plain(wrap).eval()
    images, names = torch.rand(2, *SHAPE), list(given.state_dict())
    expected = given(images)
    prepared = prepare_model(given, CLASSES)
    assert set(prepared.state_dict()) == set(plain().state_dict())
    assert torch.allclose(prepared(images), expected, atol=1e-6)
    assert list(given.state_dict()) == names
    assert torch.equal(given(images), expected)


@pytest.mark.parametrize("name", ["data-parallel", "compiled"])
def test_wrappers_are_taken_off(name: str) -> None:
    assert set(prepare_model(SERVED[name](), CLASSES).state_dict()) == set(plain().state_dict())


def test_half_precision_is_worked_on_in_float32(some: Images) -> None:
    given = SERVED["bf16"]()
    assert {weight.dtype for weight in prepare_model(given, CLASSES).parameters()} == {torch.float32}
    assert {weight.dtype for weight in given.parameters()} == {torch.bfloat16}
    assert evaluate(given, some).images == len(some)  # in its own precision
    assert {weight.dtype for weight in fit(given, some, ONE_EPOCH).parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "object", "aux"])
def test_the_logits_are_found_in_any_answer_and_in_any_copy(kind: str, some: Images) -> None:
    torch.manual_seed(0)
    given, images = Answers(kind).eval(), torch.rand(2, *SHAPE)
    expected = find_logits(given(images), CLASSES)
    for prepared in (prepare_model(given, CLASSES), copy.deepcopy(prepare_model(given, CLASSES))):
        assert torch.equal(prepared(images), expected)
        assert list(prepared.state_dict()) == list(given.state_dict())
        assert isinstance(prepared.train()(images), Tensor)
    assert type(released(prepared.eval())(images)) is type(given(images))
    trained = fit(given, some, ONE_EPOCH)
    assert type(trained(images)) is type(given(images))
    assert logits_of(trained, some).shape == (len(some), CLASSES)


def test_a_network_that_cannot_read_channels_last_is_trained_and_measured_without(some: Images) -> None:
    assert memory_format_of(Viewed(), SHAPE) is torch.contiguous_format
    trained = fit(Viewed(), some, ONE_EPOCH, valid=some)
    assert evaluate(trained, some).images == len(some)


@pytest.mark.parametrize("name", ["resnet-mini", "vgg-mini"])
def test_networks_of_ours_read_channels_last(name: str) -> None:
    assert memory_format_of(build_model(name, num_classes=4), SHAPE) is torch.channels_last


def test_a_network_that_cannot_be_copied_is_refused_in_one_line() -> None:
    given = plain()
    given.generator = (number for number in range(3))  # type: ignore[assignment]  # nothing that can be copied
    with pytest.raises(BadSetting, match="the model cannot be copied"):
        prepare_model(given, CLASSES)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, weight_norm])
def test_a_checkpoint_with_weight_norm_fits_the_plain_network(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    given = plain(wrap).eval()
    prepared, images = prepare_model(plain(), CLASSES).eval(), torch.rand(2, *SHAPE)
    wrapped = {f"module.{name}": tensor for name, tensor in given.state_dict().items()}
    load_weights(prepared, fitted_weights(prepared, wrapped, Path("file")), Path("file"))
    assert torch.allclose(prepared(images), given(images), atol=1e-6)
