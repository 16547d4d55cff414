"""A client with images of its own, and what it keeps on its disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from small import SETTINGS

from fedortho.engine import Ask, Group
from fedortho.errors import BadData, FedOrthoError
from fedortho.federated.client import federate_settings, holder_of
from fedortho.federated.holder import Holder
from fedortho.federated.wire import pack_asks, pack_group, prefixed, unpack_observations
from fedortho.models import build_model
from fedortho.probe import Probe
from fedortho.recipe import Recipe
from fedortho.request import ForgetRequest
from fedortho.settings import as_mapping

ABOUT = {"names": ["ant", "bee", "cat", "dog"], "mean": [0.5], "std": [0.25]}


def write_images(folder: Path, classes: dict[str, int]) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name, number in classes.items():
        (folder / "train" / name).mkdir(parents=True)
        for place in range(number):
            pixels = torch.randint(0, 256, (8, 8), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / "train" / name / f"{place:03}.png")
    return folder


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    own = write_images(tmp_path / "mine", {"bee": 30, "dog": 20})
    return Holder(1, replace(SETTINGS, valid=0.2), tmp_path / "store", str(own))


def model() -> torch.nn.Module:
    return build_model("small:TinyNet", classes=4, channels=1)


def test_own_images_get_the_federations_labels_by_name_and_its_normalisation(holder: Holder) -> None:
    train, valid, rows = holder.images(ABOUT)
    assert sorted(set(train.labels.tolist())) == [1, 3], "bee and dog, not 0 and 1"
    assert (train.names, train.mean, train.std) == (("ant", "bee", "cat", "dog"), (0.5,), (0.25,))
    assert len(train) + len(valid) == 40 == len(rows[1]), "a folder without test images sets some aside"
    _, note = holder.hello({}, {"about": ABOUT})
    assert note == {"client": 1, "images": len(train), "own": True, "model": "", "left": False}
    with pytest.raises(BadData, match="class 'bee' is unknown to the federation"):
        holder.images(ABOUT | {"names": ["ant", "dog"]})


def test_it_trains_answers_and_drops_its_own_samples(holder: Holder) -> None:
    recipe = as_mapping(Recipe(epochs=1, batch=16, crop=0, ortho=0.0))
    order = {"about": ABOUT, "group": pack_group(Group()), "recipe": recipe, "align": False, "norms": "fedavg"}
    order |= {"round": 0, "still": [], "classes": 4, "channels": 1}
    sent = prefixed("model.", model().state_dict())
    tensors, note = holder.local(sent, order)
    assert note["images"] == 32
    assert tensors.keys() == sent.keys()
    assert any(not torch.equal(tensors[name], value) for name, value in sent.items())

    holder.keep(sent, {"about": ABOUT, "ledger": True})
    place = int((~torch.isin(holder.images(ABOUT)[2][1], holder.images(ABOUT)[1].rows)).nonzero()[0])
    asked = ForgetRequest(samples=(f"1/{place}", "2/5"))
    asks = [Ask((Group("train", asked), Group("train", None, asked)), Probe("peaks", "all"))]
    packed, notes = pack_asks(asks)
    order = {"model": holder.state["model"], "asks": notes, "share": 1, "least-group": 1, "about": ABOUT}
    answer, told = holder.observe(packed, order)
    ((gone, kept),) = unpack_observations(answer, asks)
    assert (gone.images, kept.images, told["withheld"]) == (1, 31, 0), "the sample of client 2 is not its business"
    assert holder.observe(packed, order | {"model": "another"})[1]["status"] == "other-model"


def test_what_it_needs_to_know_is_asked_for_by_name() -> None:
    config = as_mapping(SETTINGS) | {"do": "train", "store": ""}
    assert federate_settings(config) == SETTINGS
    with pytest.raises(FedOrthoError, match="lacks partition-id"):
        holder_of({}, config)
    with pytest.raises(FedOrthoError, match="no store is named"):
        holder_of({"partition-id": 0}, config)
    assert holder_of({"partition-id": 0, "store": "here", "data": "mine"}, config).own == "mine"
