"""SSD against an oracle that does everything by hand in float64."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import SETTINGS
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.query import Query
from fedortho.errors import BadCheckpoint, FedOrthoError
from fedortho.federated.server import federated_engine, local_grid
from fedortho.methods import make_method
from fedortho.methods.ssd import SSD
from fedortho.statistics.observe import Observation
from fedortho.storage.files import tensors_digest

REQUEST = ForgetRequest.parse("class:3")


class ThreeLayers(nn.Module):
    """Convolution, hidden layer, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.last(torch.tanh(self.hidden(torch.tanh(self.conv(x)).mean((2, 3)))))
        return answer


def importance(model: nn.Module, images: Images, batch: int, label_free: bool) -> dict[str, Tensor]:
    """The mean over batches, the last partial one among them, of squared (or absolute) batch-mean gradients."""
    twin = ThreeLayers().double()
    twin.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    total = {name: torch.zeros_like(weight) for name, weight in twin.named_parameters()}
    inputs, labels = images.normalise(images.pixels[images.rows]).double(), images.labels
    starts = range(0, len(labels), batch)
    for start in starts:
        twin.zero_grad()
        answers = twin(inputs[start : start + batch])
        loss = answers.square().sum(1).mean()
        if not label_free:
            loss = functional.cross_entropy(answers, labels[start : start + batch])
        loss.backward()
        for name, weight in twin.named_parameters():
            assert weight.grad is not None
            total[name] += weight.grad.abs() if label_free else weight.grad.square()
    return {name: value / len(starts) for name, value in total.items()}


@pytest.mark.parametrize("label_free", [False, True])
def test_it_is_what_the_formula_says_with_a_last_partial_batch(digits: Dataset, label_free: bool) -> None:
    torch.manual_seed(0)
    model, batch, alpha, lam = ThreeLayers(), 64, 1.3, 0.9
    gone = digits.train.subset(digits.train.labels == 3)
    assert len(gone) % batch
    assert len(digits.train) % batch
    forget, everything = (importance(model, images, batch, label_free) for images in (gone, digits.train))
    forgot = SSD(alpha, lam, batch, label_free)(model, CentralEngine(digits), REQUEST)
    selected = 0
    for name, weight in model.named_parameters():
        chosen = forget[name] > alpha * everything[name]
        ratio = torch.where(chosen, (lam * everything[name] / forget[name]).clamp_max(1.0), 1.0)
        selected += int(chosen.sum())
        assert torch.allclose(forgot.get_parameter(name).double(), weight.detach().double() * ratio, rtol=1e-4), name
    assert 0 < selected < sum(weight.numel() for weight in model.parameters())


def test_the_importance_of_all_images_is_kept_and_needs_no_second_pass(
    digits: Dataset, small_net: nn.Module, engine: CentralEngine, tmp_path: Path
) -> None:
    method = SSD(alpha=50.0, keep=str(tmp_path / "importance.safetensors"))
    first = method(small_net, engine, REQUEST)
    before = engine.tally.images_trained
    again = method(small_net, engine, REQUEST)
    assert engine.tally.images_trained - before == int((digits.train.labels == 3).sum())
    assert tensors_digest(first.state_dict()) == tensors_digest(again.state_dict())
    with pytest.raises(BadCheckpoint, match="of another model, batch or variant"):
        SSD(batch_size=32, keep=method.keep)(small_net, engine, REQUEST)


def test_an_importance_over_other_images_is_not_taken_for_that_of_all(
    digits: Dataset, small_net: nn.Module, engine: CentralEngine, tmp_path: Path
) -> None:
    method = SSD(alpha=50.0, keep=str(tmp_path / "importance.safetensors"))
    some = CentralEngine(replace(digits, train=digits.train.subset(range(400))))
    method(small_net, some, REQUEST)
    with pytest.raises(BadCheckpoint, match="over other images"):
        method(small_net, engine, REQUEST)


def test_a_federation_that_lost_a_client_does_not_reuse_what_it_kept(
    digits: Dataset, small_net: nn.Module, tmp_path: Path
) -> None:
    method = SSD(alpha=50.0, keep=str(tmp_path / "importance.safetensors"))
    settings = replace(SETTINGS, model="small:SmallNet")
    kept = []
    with local_grid(settings, tmp_path / "clients") as grid:
        for _ in range(2):
            engine = federated_engine(grid, settings, digits)
            engine.send_model(small_net, ledger=False)
            kept.append(tensors_digest(method(small_net, engine, REQUEST).state_dict()))
        smaller = federated_engine(grid, settings, digits, [ForgetRequest.parse("client:1")])
        with pytest.raises(BadCheckpoint, match="or over other images"):
            method(small_net, smaller, REQUEST)
    assert kept[0] == kept[1]


def test_running_statistics_stay(small_net: nn.Module, engine: CentralEngine) -> None:
    forgot = SSD(alpha=2.0)(small_net, engine, REQUEST)
    assert all(torch.equal(forgot.get_buffer(name), buffer) for name, buffer in small_net.named_buffers())


@pytest.mark.parametrize("name", ["ssd", "salun", "msg"])
def test_a_forget_set_that_clients_withhold_is_refused_by_name(
    name: str, small_net: nn.Module, engine: CentralEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def withheld(model: nn.Module, queries: Sequence[Query]) -> list[list[Observation]]:
        nothing = {name: torch.zeros(1, weight.numel()).double() for name, weight in model.named_parameters()}
        return [[Observation(nothing, torch.tensor([0])) for _ in query.selections] for query in queries]

    monkeypatch.setattr(engine, "measure", withheld)
    engine.info = replace(engine.info, is_federated=True)
    with pytest.raises(FedOrthoError, match=f"class:3 selects no image, or no client has --least-group .*; {name}"):
        make_method(name)(small_net, engine, REQUEST)
