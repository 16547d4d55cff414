"""Checkpoints as people save them: wrappers, prefixes, precisions; what does not fit is named with its likely cause."""

from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from torch import Tensor, nn

from fedortho.errors import BadCheckpoint
from fedortho.models.zoo import build_model
from fedortho.storage.checkpoints import fitted_weights, load_weights, read_weights
from fedortho.storage.files import tensors_digest, write_tensors

State = dict[str, Tensor]


def network(seed: int = 0, num_classes: int = 4) -> nn.Module:
    return build_model("resnet-mini", num_classes=num_classes, channels=1, seed=seed)


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def loaded(file: Path) -> str:
    """The digest of a network after loading a file into it."""
    model = network()
    load_weights(model, fitted_weights(model, read_weights(file), file), file)
    return tensors_digest(model.state_dict())


FORMS: dict[str, Callable[[State], object]] = {
    "plain": lambda state: state,
    "state_dict of DataParallel": lambda state: {"state_dict": prefixed("module.", state), "epoch": 3, "best": 0.9},
    "model_state_dict": lambda state: {"model_state_dict": state, "optimizer": {"state": {}, "param_groups": []}},
    "net": lambda state: {"net": prefixed("_orig_mod.", state), "acc": 91.7},
    "model": lambda state: {"model": {"state_dict": prefixed("module._orig_mod.model.", state)}},
    "a compiled part": lambda state: {name.replace("layer1.", "layer1._orig_mod."): t for name, t in state.items()},
    "no counters": lambda state: {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_read_as_people_save_it(form: str, tmp_path: Path) -> None:
    state = network(seed=5).state_dict()
    torch.save(FORMS[form](state), tmp_path / "a.pt")
    assert loaded(tmp_path / "a.pt") == tensors_digest(state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_that_of_the_model(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in network(seed=5).state_dict().items()}
    write_tensors(tmp_path / "a.safetensors", state)
    expected = {n: t.float() if t.is_floating_point() else t for n, t in state.items()}
    assert loaded(tmp_path / "a.safetensors") == tensors_digest(expected)
    assert f"become float32 (were {dtype})" in caplog.text


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 3)


def test_a_network_whose_own_names_look_like_a_prefix_keeps_them(tmp_path: Path) -> None:
    torch.save(Wrapped().state_dict(), tmp_path / "a.pt")
    model = Wrapped()
    load_weights(model, fitted_weights(model, read_weights(tmp_path / "a.pt"), tmp_path / "a.pt"), tmp_path / "a.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_the_name_of_their_tensor(value: float, tmp_path: Path) -> None:
    state = network().state_dict()
    state["layer2.0.conv1.weight"][0, 0, 0, 0] = value
    torch.save(prefixed("module.", state), tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match=r"module\.layer2\.0\.conv1\.weight has values that are NaN or infinite"):
        loaded(tmp_path / "a.pt")


CAUSES: dict[str, tuple[Callable[[], State], str]] = {
    "classes": (
        lambda: network(num_classes=7).state_dict(),
        r"other shapes for fc.weight \(7x128, not 4x128\).*another classifier: the file's has 7 classes, the model 4",
    ),
    "a replaced classifier": (
        lambda: {name.replace("fc.", "head."): t for name, t in network().state_dict().items()},
        r"lacks fc.weight, fc.bias; has unknown head.weight, head.bias; .*another classifier: .*another name",
    ),
    "a foreign prefix": (
        lambda: prefixed("backbone.", network().state_dict()),
        r"and \d+ more; .*the file's names begin with 'backbone.'",
    ),
    "an architecture": (
        lambda: build_model("vgg-mini", num_classes=4, channels=1).state_dict(),
        "another architecture; --model must",
    ),
    "channels": (
        lambda: build_model("resnet-mini", num_classes=4, channels=3).state_dict(),
        r"conv1.weight \(32x3x3x3, not 32x1x3x3\); likely cause: the same architecture .*another number of channels",
    ),
    "a shortcut": (
        lambda: {name: t for name, t in network().state_dict().items() if "downsample" not in name},
        "lacks layer1.0.downsample.*a variant of this architecture",
    ),
    "the same name twice": (
        lambda: {**network().state_dict(), "module.fc.bias": torch.zeros(4)},
        r"has fc.bias twice",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_weights_that_do_not_fit_are_named_with_the_likely_cause(cause: str, tmp_path: Path) -> None:
    make, told = CAUSES[cause]
    torch.save(make(), tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match=told) as refused:
        loaded(tmp_path / "a.pt")
    assert "\n" not in str(refused.value)


def test_a_checkpoint_without_weights_tells_what_it_has(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "weights_of_mine": [1]}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match="a dict under the keys epoch, weights_of_mine; expected names and tensors"):
        read_weights(tmp_path / "a.pt")


def test_a_directory_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="is a directory; give a file of weights"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex64), "complex"),
        (torch.zeros(1).expand(10**12), "larger than its data"),
    ],
    ids=["sparse", "meta", "complex", "huge"],
)
def test_tensors_without_plain_values_are_refused_before_anything_is_allocated(
    tmp_path: Path, tensor: torch.Tensor, word: str
) -> None:
    torch.save({"fc.weight": tensor}, tmp_path / "x.pt")
    with pytest.raises(BadCheckpoint, match=f"fc.weight is {word}; expected a dense tensor"):
        read_weights(tmp_path / "x.pt")


def test_an_archive_that_would_grow_when_it_is_read_is_refused(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.zeros(10**6)}, tmp_path / "plain.pt")
    with ZipFile(tmp_path / "plain.pt") as plain, ZipFile(tmp_path / "packed.pt", "w", ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert read_weights(tmp_path / "plain.pt")["fc.weight"].shape == (10**6,)
    with pytest.raises(BadCheckpoint, match="is packed and would grow"):
        read_weights(tmp_path / "packed.pt")


def test_a_classifier_without_rows_is_refused_by_its_shape() -> None:
    weights = network().state_dict()
    last = [name for name, tensor in weights.items() if tensor.dim() == 1][-1]
    with pytest.raises(BadCheckpoint, match=r"does not fit the model: it has other shapes for .*one value"):
        load_weights(network(), weights | {last: torch.tensor(1.0)}, Path("x"))
