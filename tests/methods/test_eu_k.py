"""EU-k and CF-k: what is reset, trained and frozen, against a plain loop over the last layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import SETTINGS
from torch import nn
from torch.nn import functional

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting
from fedortho.federated.server import federated_engine, local_grid
from fedortho.methods import unlearn
from fedortho.methods.eu_k import CFk, EUk, last_layers
from fedortho.models.zoo import build_model
from fedortho.runs.run import load_run_data
from fedortho.training.batches import plan_steps
from fedortho.training.objectives import TrainingSet
from fedortho.training.recipe import learning_rate

REQUEST = ForgetRequest.parse("class:3")
LAST_TWO = ("features.6", "features.7", "fc")  # convolution, its norm, classifier


def test_layers_are_counted_from_the_output_and_a_norm_belongs_to_its_convolution(small_net: nn.Module) -> None:
    assert last_layers(small_net, 1, (1, 8, 8)) == ["fc"]
    assert last_layers(small_net, 2, (1, 8, 8)) == list(LAST_TWO)
    assert last_layers(small_net, 4, (1, 8, 8))[0] == "features.0"
    with pytest.raises(BadSetting, match="4 layers"):
        last_layers(small_net, 5, (1, 8, 8))
    with pytest.raises(BadSetting, match="at least 1"):
        EUk(k=0)


@pytest.mark.parametrize("kind", [EUk, CFk])
def test_before_training_only_eu_k_has_new_weights_and_only_in_the_last_layers(
    small_net: nn.Module, engine: CentralEngine, kind: type[EUk]
) -> None:
    started = kind(k=2, epochs=0, seed=7)(small_net, engine, REQUEST).state_dict()
    fresh = build_model("small:SmallNet", num_classes=10, channels=1, seed=7).state_dict()
    for name, value in small_net.state_dict().items():
        is_reset = kind is EUk and name.startswith(LAST_TWO)
        assert torch.equal(started[name], fresh[name] if is_reset else value), name


def test_only_the_last_layers_learn_as_in_a_plain_loop(
    digits: Dataset, small_net: nn.Module, engine: CentralEngine
) -> None:
    method = CFk(k=2, epochs=1, lr=0.02, crop=0, flip=0.0, seed=3)
    forgot = method(small_net, engine, REQUEST)
    twin = build_model("small:SmallNet", num_classes=10, channels=1)
    twin.load_state_dict(small_net.state_dict())
    twin.eval()
    learning = [module for name, module in twin.named_modules() if name in LAST_TWO]
    for module in learning:
        module.train()
    weights = [weight for module in learning for weight in module.parameters()]
    optimiser = torch.optim.SGD(weights, lr=0.02, momentum=0.9, weight_decay=5e-4)
    retain = digits.train.subset(digits.train.labels != 3)
    steps = plan_steps([TrainingSet(retain)], method.batch_size, 3, 0, "mixed")
    for number, (rows,) in enumerate(steps):
        inputs, labels = retain.normalise(retain.pixels[rows]), retain.store_labels[rows]
        loss = functional.cross_entropy(twin(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.param_groups[0]["lr"] = learning_rate(method.recipe, number / len(steps))
        optimiser.step()
    for name, value in twin.state_dict().items():
        if name.startswith(LAST_TWO):
            assert torch.allclose(forgot.state_dict()[name].double(), value.double(), atol=1e-4), name
            assert not torch.equal(forgot.state_dict()[name], small_net.state_dict()[name]), name
        else:
            assert torch.equal(forgot.state_dict()[name], small_net.state_dict()[name]), name
    assert all(weight.requires_grad for weight in forgot.parameters())


def test_what_is_frozen_costs_no_backward_pass(small_net: nn.Module, engine: CentralEngine) -> None:
    few, all_of_it = (
        unlearn(small_net, engine, REQUEST, CFk(k=k, epochs=1, crop=0, flip=0.0)).cost.flops for k in (1, 4)
    )
    assert few < 0.5 * all_of_it


@pytest.mark.parametrize("norms", ["fedavg", "recalibrate", "local"])
def test_in_a_federation_only_the_last_layers_are_sent_and_change(
    small_net: nn.Module, tmp_path: Path, norms: str
) -> None:
    settings = replace(SETTINGS, model="small:SmallNet", clients=3, norms=norms)
    with local_grid(settings, tmp_path / norms) as grid:
        engine = federated_engine(grid, settings, load_run_data(settings))
    engine.send_model(small_net, ledger=False)
    forgot = unlearn(small_net, engine, REQUEST, CFk(k=1, epochs=1, crop=0, flip=0.0)).model
    kept, trained = (
        next(exchange for exchange in engine.transport.log if exchange.kind == kind)
        for kind in ("train.keep", "train.local")
    )
    assert trained.bytes_up[0] < 0.2 * kept.bytes_down[0]
    assert trained.bytes_down[0] < 0.2 * kept.bytes_down[0]
    changed = {
        name for name, value in forgot.state_dict().items() if not torch.equal(value, small_net.state_dict()[name])
    }
    assert changed == {"fc.weight", "fc.bias"}
