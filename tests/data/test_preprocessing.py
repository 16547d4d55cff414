"""Preprocessing is part of a model: usual scales, own statistics, own functions; contradictions are refused."""

import pytest
import torch
from torch import Tensor

import fedortho as fo
from fedortho.data.images import evaluation_batches
from fedortho.data.preprocessing import SCALES, Preprocessing
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting, FedOrthoError

PIXELS = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).repeat(2, 3, 1).view(2, 3, 2, 2)
LABELS = torch.tensor([0, 1])


def inputs(**how: object) -> Tensor:
    images = fo.images_from_tensors(PIXELS, LABELS, **how)  # type: ignore[arg-type]  # of all kinds
    ((batch, _),) = evaluation_batches(images)
    return batch


def centred(pixels: Tensor) -> Tensor:
    return pixels.float() - 128


def smaller(pixels: Tensor) -> Tensor:
    return pixels[:, :1, :1].float()


def test_the_usual_scales_are_what_they_are_called() -> None:
    assert inputs(scale="0-1")[0, 0].flatten().tolist() == pytest.approx([0, 0.2, 1, 0.4])
    assert inputs(scale="-1-1")[0, 0].flatten().tolist() == pytest.approx([-1, -0.6, 1, -0.2])
    assert inputs(scale="0-255")[0, 0].flatten().tolist() == pytest.approx([0, 51, 255, 102])
    assert inputs(scale="imagenet")[0, 2, 1, 0] == pytest.approx((1 - 0.406) / 0.225)
    assert torch.equal(inputs(scale="imagenet"), inputs(mean=SCALES["imagenet"][0], std=SCALES["imagenet"][1]))  # type: ignore[index]  # it has numbers
    assert torch.equal(inputs(scale="data"), inputs()), "without any: the statistics of the images"


def test_a_function_of_ones_own_makes_the_inputs_and_their_shape() -> None:
    assert torch.equal(inputs(transform=centred), PIXELS.float() - 128)
    assert torch.equal(inputs(transform=f"{__name__}:centred"), PIXELS.float() - 128), "by its name too"
    assert fo.images_from_tensors(PIXELS, LABELS, transform=smaller).shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"scale": "imagenet", "mean": (0.5,), "std": (0.5,)}, "--mean and --scale contradict"),
        ({"scale": "0-1", "transform": centred}, "--scale and --transform contradict"),
        ({"mean": (0.5,)}, "--mean has 1 values and --std 0"),
        ({"mean": (0.5,), "std": (0.0,)}, "--std above 0"),
        ({"mean": (0.5, 0.5), "std": (0.1, 0.1)}, "for 2 channels; the images have 3"),
        ({"scale": "0-2"}, "no scale '0-2'.*choose from -1-1, 0-1"),
        ({"transform": lambda x: x}, "must give float inputs"),
        ({"transform": lambda x: torch.rand(x.shape)}, "is random"),
        ({"transform": lambda x: x.nothing}, "fails on uint8 images.*no attribute"),
        ({"transform": "no.such:thing"}, "cannot import 'no.such' for the transform"),
    ],
)
def test_what_contradicts_itself_or_cannot_work_is_refused_in_one_line(how: dict[str, object], told: str) -> None:
    with pytest.raises(FedOrthoError, match=told) as refused:
        inputs(**how)
    assert "\n" not in str(refused.value)


def test_settings_are_text_and_spellings_of_the_same_are_equal() -> None:
    parsed = Preprocessing.parse("0.5, 0.5,0.5", "0.5,0.5,0.5", "", "")
    assert parsed.key == Preprocessing(scale="-1-1").key != Preprocessing(scale="0-1").key
    assert Preprocessing().key == Preprocessing(scale="data").key
    with pytest.raises(BadSetting, match="numbers with commas between"):
        Preprocessing.parse("0.5;0.5", "1,1", "", "")


def test_what_is_stored_for_one_preprocessing_is_not_used_for_another() -> None:
    pixels, labels = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    images = [fo.images_from_tensors(pixels, labels, scale=scale) for scale in ("0-1", "0-1", "imagenet", "data")]
    images.append(fo.images_from_tensors(pixels, labels, transform=lambda batch: batch.float() / 100))
    keys = [CentralEngine(fo.make_dataset(each)).info.data_digest for each in images]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_a_transform_that_looks_at_the_whole_batch_is_refused() -> None:
    with pytest.raises(BadSetting, match="other images of a batch"):
        inputs(transform=lambda batch: batch.float() - batch.float().mean((0, 2, 3), keepdim=True) * len(batch))
