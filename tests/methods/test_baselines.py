"""What is peculiar to single methods."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import SETTINGS
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.engines.engine import fresh_model
from fedortho.errors import BadData, BadSetting, FedOrthoError
from fedortho.federated.server import federated_engine, local_grid
from fedortho.methods.bad_teacher import BadTeacher
from fedortho.methods.class_pruning import ClassPruning, highest_channels, tf_idf
from fedortho.methods.fused import FUSED
from fedortho.methods.logit_mask import LogitMask
from fedortho.methods.method import CannotServe
from fedortho.methods.not_ import NoT, negated
from fedortho.methods.retrain import Retrain
from fedortho.methods.salun import SalUn, salient
from fedortho.methods.unsir import UNSIR
from fedortho.storage.files import tensors_digest
from fedortho.training.adapters import take_off

REQUEST = ForgetRequest.parse("class:3")
SHAPE = (1, 8, 8)


def test_salun_leaves_the_coordinates_outside_its_mask_exactly_where_they_were(
    digits: Dataset, small_net: nn.Module, engine: CentralEngine
) -> None:
    method = SalUn(epochs=2, lr=0.1, batch_size=32, weight_decay=0.01, crop=0, flip=0.0, ratio=0.3)
    forgot = method(small_net, engine, REQUEST)
    deltas = [p - q for p, q in zip(forgot.parameters(), small_net.parameters(), strict=True)]
    moved, whole = sum(int((d != 0).sum()) for d in deltas), sum(d.numel() for d in deltas)
    assert 0.2 * whole < moved <= int(0.3 * whole)


def test_salun_ranks_all_coordinates_at_once_by_the_size_of_summed_gradients() -> None:
    weights = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    gradients = {"a": torch.tensor([[5.0, -6.0, 0.1, 0.0]]), "b": torch.tensor([[-0.2, 0.1, 7.0]])}
    mask = salient(weights, gradients, 0.5)
    assert mask["a"].tolist() == [[True, True], [False, False]], "int(0.5 * 7) = 3 of them, whatever their sign"
    assert mask["b"].tolist() == [False, False, True]


def test_negating_twice_is_the_identity_and_leaves_the_norm_alone(small_net: nn.Module) -> None:
    once = negated(small_net, ["features.0"], SHAPE)
    changed = [n for n, value in once.state_dict().items() if not torch.equal(value, small_net.state_dict()[n])]
    assert changed == ["features.0.weight"]
    assert tensors_digest(negated(once, ["features.0"], SHAPE).state_dict()) == tensors_digest(small_net.state_dict())


class Backwards(nn.Module):
    """Its layers are written down in another order than they are used; a square makes the sign of the first moot."""

    def __init__(self, square: bool) -> None:
        super().__init__()
        self.last = nn.Linear(4, 10)
        self.second, self.first = nn.Conv2d(3, 4, 3), nn.Conv2d(1, 3, 3)
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        answer: Tensor = self.last(self.second(hidden.square() if self.square else hidden.relu()).mean((2, 3)))
        return answer


def test_the_first_layer_is_the_first_in_use_and_a_negation_without_effect_is_refused(engine: CentralEngine) -> None:
    model = Backwards(square=False)
    forgot = NoT(epochs=0)(model, engine, REQUEST)
    assert torch.equal(forgot.get_parameter("first.weight"), -model.first.weight)
    assert torch.equal(forgot.get_parameter("first.bias"), -model.first.bias)  # type: ignore[operator]  # it has one
    assert torch.equal(forgot.get_parameter("second.weight"), model.second.weight)
    with pytest.raises(BadSetting, match="negating first"):
        NoT(epochs=0)(Backwards(square=True), engine, REQUEST)


@pytest.mark.parametrize(
    ("class_mode", "adapter"),
    [
        ("exclude", "sparse"),
        ("relabel", "low-rank"),
        pytest.param("exclude", "low-rank", marks=pytest.mark.slow),
        pytest.param("relabel", "sparse", marks=pytest.mark.slow),
    ],
)
def test_fused_is_reversed_bit_for_bit(
    small_net: nn.Module, engine: CentralEngine, adapter: str, class_mode: str
) -> None:
    method = FUSED(epochs=1, lr=0.05, adapter=adapter, class_mode=class_mode, number=2)
    adapted, adapters = method.adapt(small_net, engine, REQUEST)
    assert len(adapters.layers) == 2
    assert tensors_digest(take_off(small_net, adapted).state_dict()) == tensors_digest(small_net.state_dict())
    forgot = method(small_net, engine, REQUEST).state_dict()
    changed = {name for name, value in small_net.state_dict().items() if not torch.equal(forgot[name], value)}
    assert changed == {f"{layer}.weight" for layer in adapters.layers}


def test_fused_counts_a_big_layer_for_its_size_unless_told_otherwise(
    small_net: nn.Module, engine: CentralEngine
) -> None:
    by_sum = FUSED(number=4).critical_layers(small_net, engine)
    assert by_sum[0] == "features.6", "the largest layer moves most in all"
    assert FUSED(number=4, size="mean").critical_layers(small_net, engine) != by_sum
    assert set(by_sum) == {"features.0", "features.3", "features.6", "fc"}


def test_unsirs_noise_is_all_distinct_errs_and_leaves_running_statistics_alone(small_net: nn.Module) -> None:
    before = tensors_digest(small_net.state_dict())
    method = UNSIR(noise_images=32, noise_steps=60)
    noise = method.make_noise(small_net, 3, SHAPE)
    assert noise.shape == (32, *SHAPE)
    assert len(noise.flatten(1).unique(dim=0)) == 32
    assert tensors_digest(small_net.state_dict()) == before
    plain = replace(method, noise_steps=0).make_noise(small_net, 3, SHAPE)
    labels = torch.full((32,), 3)

    def error(images: Tensor) -> Tensor:
        with torch.no_grad():
            return functional.cross_entropy(small_net(images), labels) - 0.1 * images.square().sum((1, 2, 3)).mean()

    assert error(noise) > error(plain) + 1


def test_unsir_labels_noise_with_the_class_it_was_made_for(small_net: nn.Module, engine: CentralEngine) -> None:
    method = UNSIR(noise_images=4, noise_copies=3)
    shown = method._noise_images(torch.randn(8, *SHAPE), [2, 7], engine.info.class_names)
    assert len(shown) == 24
    assert shown.store_labels.tolist() == [2] * 4 + [7] * 4


def test_a_bad_teacher_needs_new_weights_and_makes_answers_vague(
    digits: Dataset, small_net: nn.Module, engine: CentralEngine
) -> None:
    with pytest.raises(FedOrthoError, match="give the engine build="):
        BadTeacher()(small_net, CentralEngine(digits), REQUEST)
    forgot = BadTeacher(epochs=4, lr=0.01, batch_size=32, crop=0, flip=0.0)(small_net, engine, REQUEST)
    gone = digits.train.subset(digits.train.labels == 3)
    with torch.no_grad():
        sure = [m(gone.normalise(gone.pixels[gone.rows])).softmax(1).amax(1).mean() for m in (small_net, forgot)]
    assert sure[0] > 0.9
    assert sure[1] < 0.6


def test_retraining_starts_from_new_weights_everywhere(small_net: nn.Module, engine: CentralEngine) -> None:
    blank = Retrain(epochs=1, lr=0.0, seed=5)(small_net, engine, REQUEST)
    fresh = fresh_model(engine, 5)
    assert all(torch.equal(weight, fresh.get_parameter(name)) for name, weight in blank.named_parameters())
    with pytest.raises(CannotServe, match="0 epochs give an untrained network, no reference"):
        Retrain(epochs=0)(small_net, engine, REQUEST)
    for name, weight in small_net.named_parameters():
        if weight.dim() > 1:
            assert not torch.equal(blank.get_parameter(name), weight), name


def test_tf_idf_prefers_what_fires_for_the_class_alone() -> None:
    means = {"layer": torch.tensor([[4.0, 1.0, 0.0], [0.0, 1.0, 3.0], [0.0, 1.0, 3.0]]).double()}
    scores = tf_idf(means, [0])["layer"]
    expected = [0.8 * torch.tensor(1.5).log(), 0.2 * torch.tensor(0.75).log(), 0.0]  # log(3 / (1 + number above mean))
    assert torch.allclose(scores, torch.tensor(expected).double())
    assert highest_channels({"layer": scores}, 0.3)["layer"].tolist() == [0], "the most telling goes, not the least"


def test_a_class_that_clients_withhold_is_not_said_to_be_missing(
    digits: Dataset, small_net: nn.Module, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, model="small:SmallNet", least_group=200)
    with local_grid(settings, tmp_path / "clients") as grid:
        federated = federated_engine(grid, settings, digits)
    federated.send_model(small_net, ledger=False)
    with pytest.raises(BadData, match=r"class 0 has no training images.*least-group"):
        ClassPruning()(small_net, federated, REQUEST)
    some = CentralEngine(replace(digits, train=digits.train.subset(digits.train.labels != 0)))
    with pytest.raises(BadData, match="class 0 has no training images; TF-IDF"):
        ClassPruning()(small_net, some, REQUEST)


def test_pruned_channels_stay_silent_through_the_fine_tuning(small_net: nn.Module, engine: CentralEngine) -> None:
    forgot = ClassPruning(epochs=2, lr=0.05, ratio=0.2, crop=0, flip=0.0)(small_net, engine, REQUEST)
    silent = sum(int((forgot.get_parameter(f"features.{n}.weight") == 0).sum()) for n in (1, 4, 7))
    assert silent == 21, "⌈0.2 · 104⌉"


def test_the_logit_mask_changes_one_row_and_forgets_nothing(small_net: nn.Module, engine: CentralEngine) -> None:
    forgot = LogitMask()(small_net, engine, REQUEST)
    for name, value in small_net.state_dict().items():
        differs = forgot.state_dict()[name] != value
        assert bool(differs.any()) == name.startswith("fc.")
        if name.startswith("fc."):
            assert differs.flatten(1).any(1).nonzero().flatten().tolist() == [3] if differs.dim() > 1 else [3]
    restored = forgot.get_parameter("fc.weight").detach().clone()
    restored[3] = small_net.get_parameter("fc.weight")[3]
    assert torch.equal(restored, small_net.get_parameter("fc.weight")), "the features are all still there"
