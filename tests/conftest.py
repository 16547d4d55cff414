"""Toy images and small trained networks that tests share; decoded images are cached per session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from once import session_directory, trained_once
from small import TinyNet
from torch import nn

from fedortho.data.images import Dataset, Images, images_from_tensors
from fedortho.data.sources import load_images
from fedortho.models.zoo import build_model
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of decoded images of this session; the user's own cache and list of trusted code are not touched."""
    place = session_directory(tmp_path_factory) / "cache"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDORTHO_CACHE", str(place))
        patched.setenv("FEDORTHO_STATE", str(place.with_name("state")))
        patched.setenv("FEDORTHO_TRUST_CODE", "all")  # networks of the tests; tests of trust remove it
        yield place


@pytest.fixture(autouse=True, scope="session")
def no_power_loss() -> Iterator[None]:
    """Files are not forced to disk: killed processes lose nothing that the system has, and nobody pulls the plug."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield


# Files with the most seconds, longest first, and then the others: so the workers of `make test` end together.
LONG = (
    *("methods/test_contract", "federated/test_engine", "audits/test_audits", "federated/test_server", "cli/test_app"),
    *("requests/test_judging", "evidence/test_claims", "methods/test_federated", "requests/test_rewind"),
    *("federated/test_strategies", "reports/test_page", "evidence/test_bundle", "requests/test_checking"),
    *("federated/test_corruption", "federated/test_faults", "audits/test_membership", "test_examples"),
    *("requests/test_deleting", "unlearning/test_plan", "requests/test_levels", "storage/test_journal"),
    *("cli/test_forget", "runs/test_training", "training/test_loop", "evaluation/test_metric_suite"),
    *("experiments/test_runner", "requests/test_epochs", "evidence/test_recheck", "federated/test_workers"),
    *("requests/test_shadowed", "requests/test_forgetting", "test_extending", "test_readme", "federated/test_own_app"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONG)))


torch.set_num_threads(1)  # the nets are tiny: a second thread only waits for the first


@pytest.fixture
def toy() -> Images:
    """240 images of 8x8 in 4 classes: a bright quarter, one per class, on noise."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(240) % 4
    pixels = torch.randint(0, 120, (240, 1, 8, 8), dtype=torch.uint8, generator=generator)
    for label in range(4):
        top, left = 4 * (label // 2), 4 * (label % 2)
        pixels[labels == label, :, top : top + 4, left : left + 4] += 100
    return images_from_tensors(pixels, labels)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_images("digits", valid=0.2)


@pytest.fixture(scope="session")
def digit_nets(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    """Both small networks, trained on digits with orthogonal kernels to over 95 %."""
    recipe = Recipe(epochs=5, batch_size=64, lr=0.05, flip=0.0, crop=1)

    def trained(name: str) -> nn.Module:
        model = build_model(name, num_classes=10, channels=1)
        return trained_once(tmp_path_factory, f"digits-{name}", model, lambda model: fit(model, digits.train, recipe))

    return {name: trained(name) for name in ("vgg-mini", "resnet-mini")}


@pytest.fixture
def tiny() -> TinyNet:
    torch.manual_seed(3)
    return TinyNet()
