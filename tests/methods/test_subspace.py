"""Class-subspace projection against an oracle that takes the SVD of explicit inputs."""

import pytest
import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting
from fedortho.methods.subspace import Subspace

REQUEST = ForgetRequest.parse("class:3")


class TwoLayers(nn.Module):
    """A convolution without padding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.fc(torch.relu(self.conv(x)).flatten(1))
        return answer


def representations(model: TwoLayers, images: Images) -> dict[str, Tensor]:
    """Inputs of both layers as columns, in float64."""
    inputs = images.normalise(images.pixels[images.rows])
    patches = [image[:, i : i + 3, j : j + 3].flatten() for image in inputs for i in range(6) for j in range(6)]
    hidden = torch.relu(model.conv(inputs)).flatten(1).detach()
    return {"conv": torch.stack(patches, 1).double(), "fc": hidden.T.double()}


def scaled(columns: Tensor, alpha: float) -> Tensor:
    basis, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    shares = sizes**2 / (sizes**2).sum()
    return basis @ torch.diag(alpha * shares / ((alpha - 1) * shares + 1)) @ basis.T


def test_it_is_what_the_formula_says(digits: Dataset) -> None:
    torch.manual_seed(0)
    model = TwoLayers()
    gone = digits.train.labels == 3
    forget, retain = (representations(model, digits.train.subset(which)) for which in (gone, ~gone))
    forgot = Subspace(alpha_retain=30.0, alpha_forget=5.0, images=10_000)(model, CentralEngine(digits), REQUEST)
    for name, layer in (("conv", model.conv), ("fc", model.fc)):
        of_forget, of_retain = scaled(forget[name], 5.0), scaled(retain[name], 30.0)
        removed = of_forget - of_forget @ of_retain
        weight = layer.weight.detach().double().flatten(1)
        expected = weight @ (torch.eye(len(removed)).double() - removed).T
        found = forgot.get_parameter(f"{name}.weight").detach().double().flatten(1)
        assert torch.allclose(found, expected, atol=1e-5)
        assert not torch.allclose(found, weight, atol=1e-3)
        assert torch.equal(forgot.get_parameter(f"{name}.bias"), model.get_parameter(f"{name}.bias"))


def test_only_the_images_that_are_asked_for_are_read_and_nothing_is_trained(
    small_net: nn.Module, engine: CentralEngine
) -> None:
    Subspace(images=40)(small_net, engine, REQUEST)
    assert (engine.tally.images_read, engine.tally.images_trained) == (80, 0)


def test_settings_out_of_range_are_refused() -> None:
    for settings in ({"alpha_retain": 0.0}, {"alpha_forget": -1.0}, {"images": 0}):
        with pytest.raises(BadSetting, match=r"above 0|at least 1"):
            Subspace(**settings)  # type: ignore[arg-type]  # floats and an int
