"""A client with images of its own, and what it keeps on its disk."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from small import SETTINGS, write_images

from fedortho.data.request import ForgetRequest
from fedortho.errors import BadData, FedOrthoError
from fedortho.federated.client import client_state_of, federate_settings
from fedortho.federated.client_state import ClientState
from fedortho.federated.wire import pack_queries, pack_training_plan, prefixed, unpack_observations
from fedortho.models.patch import Patch, bind_patch
from fedortho.models.sites import find_sites
from fedortho.models.zoo import build_model
from fedortho.statistics.query import Query, Selection, Statistic
from fedortho.statistics.training_plan import as_training_plan
from fedortho.storage.files import read_tensors, write_tensors
from fedortho.storage.settings import as_mapping
from fedortho.training.recipe import Recipe
from fedortho.unlearning.select import plan_edit

ABOUT = {"names": ["ant", "bee", "cat", "dog"], "mean": [0.5], "std": [0.25]}


@pytest.fixture
def holder(tmp_path: Path) -> ClientState:
    own = write_images(tmp_path / "mine", {"bee": 30, "dog": 20})
    return ClientState(1, replace(SETTINGS, valid=0.2), tmp_path / "store", str(own))


def model() -> torch.nn.Module:
    return build_model("small:TinyNet", num_classes=4, channels=1)


def test_own_images_get_the_federations_labels_by_name_and_its_normalisation(holder: ClientState) -> None:
    train, valid, rows = holder.images(ABOUT)
    assert sorted(set(train.labels.tolist())) == [1, 3], "bee and dog, not 0 and 1"
    assert (train.names, train.mean, train.std) == (("ant", "bee", "cat", "dog"), (0.5,), (0.25,))
    assert len(train) + len(valid) == 40 == len(rows[1]), "a folder without test images sets some aside"
    _, note = holder.hello({}, {"about": ABOUT})
    assert note == {"client": 1, "images": len(train), "own": True, "model": "", "left": False}
    with pytest.raises(BadData, match="class 'bee' is unknown to the federation"):
        holder.images(ABOUT | {"names": ["ant", "dog"]})


def test_it_trains_answers_and_drops_its_own_samples(holder: ClientState) -> None:
    recipe = as_mapping(Recipe(epochs=1, batch_size=16, crop=0, ortho=0.0))
    order = {"about": ABOUT, "recipe": recipe, "align": False, "norms": "fedavg", "base": "", "share": 1}
    order |= {
        "round": 0,
        "still": [],
        "classes": 4,
        "channels": 1,
        "course": pack_training_plan(as_training_plan(Selection()))[1],
    }
    sent = prefixed("model.", model().state_dict())
    tensors, note = holder.local(sent, order)
    assert note["images"] == 32
    assert tensors.keys() == sent.keys()
    assert any(not torch.equal(tensors[name], value) for name, value in sent.items())

    holder.keep(sent, {"about": ABOUT, "ledger": True})
    place = int((~torch.isin(holder.images(ABOUT)[2][1], holder.images(ABOUT)[1].rows)).nonzero()[0])
    asked = ForgetRequest(samples=(f"1/{place}", "2/5"))
    queries = [Query((Selection("train", asked), Selection("train", None, asked)), Statistic("peaks", "all"))]
    packed, notes = pack_queries(queries)
    order = {"model": holder.state["model"], "asks": notes, "share": 1, "least-group": 1, "about": ABOUT}
    answer, told = holder.observe(packed, order)
    ((gone, kept),) = unpack_observations(answer, queries)
    assert (gone.images, kept.images, told["withheld"]) == (1, 31, 0), "the sample of client 2 is not its business"
    assert holder.observe(packed, order | {"model": "another"})[1]["status"] == "other-model"


def test_sums_by_label_never_leave_it_whoever_asks(holder: ClientState) -> None:
    holder.keep(prefixed("model.", model().state_dict()), {"about": ABOUT, "ledger": True})
    packed, notes = pack_queries([Query((Selection(),), Statistic("peaks", "all", by_label=True))])
    order = {"model": holder.state["model"], "asks": notes, "share": 1, "least-group": 5, "about": ABOUT}
    with pytest.raises(FedOrthoError, match="by label"):
        holder.observe(packed, order)


def test_counts_by_label_leave_out_labels_of_few_images_and_totals_do_not(holder: ClientState) -> None:
    holder.keep(prefixed("model.", model().state_dict()), {"about": ABOUT, "ledger": True})
    train, _, rows = holder.images(ABOUT)
    bees, dogs = (
        [p for p, row in enumerate(rows[1].tolist()) if row in train.rows[train.labels == label].tolist()]
        for label in (1, 3)
    )
    asked = ForgetRequest(samples=tuple(f"1/{place}" for place in (*bees[:6], *dogs[:2])))
    groups = (Selection("train", asked),)
    queries = [Query(groups, Statistic("right", "all", by_label=by_label)) for by_label in (False, True)]
    packed, notes = pack_queries(queries)
    order = {"model": holder.state["model"], "asks": notes, "share": 1, "least-group": 5, "about": ABOUT}
    (whole,), (by_label,) = unpack_observations(holder.observe(packed, order)[0], queries)
    assert whole.counts.tolist() == [8]
    assert by_label.counts.tolist() == [0, 6, 0, 0], "two dogs would tell their labels and how each is answered"
    assert float(by_label.sums["0"][3]) == 0


class Killed(Exception):
    pass


def killed(*_: object) -> None:
    raise Killed


def again(holder: ClientState) -> ClientState:
    return ClientState(holder.client, holder.settings, holder.store, holder.own)


def kept(holder: ClientState, net: torch.nn.Module) -> None:
    holder.keep(prefixed("model.", net.state_dict()), {"about": ABOUT, "ledger": True})


def patched(holder: ClientState, net: torch.nn.Module, text: str) -> Patch:
    sites = find_sites(net, (1, 8, 8), "all", "channel", "stream")
    chosen = {sites[-1].name: (torch.tensor([1]), torch.ones(1, dtype=torch.float64))}
    patch = bind_patch(plan_edit(net, sites, chosen, "channel"), net)
    tensors, note = patch.packed()
    holder.patch(tensors, {"patch": note, "request": asdict(ForgetRequest.parse(text))})
    return patch


def test_killed_while_it_takes_a_model_it_still_answers(holder: ClientState, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(holder, model())
    monkeypatch.setattr(ClientState, "_forget_model", killed)
    with pytest.raises(Killed):
        kept(holder, build_model("small:TinyNet", num_classes=4, channels=1, seed=9))
    monkeypatch.undo()
    packed, notes = pack_queries([Query((Selection(),), Statistic("peaks", "all"))])
    order = {"model": again(holder).state["model"], "asks": notes, "share": 1, "least-group": 1, "about": ABOUT}
    assert again(holder).observe(packed, order)[1]["withheld"] == 0, "no ledger of another model is in the way"


@pytest.mark.parametrize(("text", "step"), [("class:dog", "_forget_model"), ("client:1", "_leave")])
def test_killed_while_it_forgets_it_keeps_nothing_that_it_must_not(
    holder: ClientState, monkeypatch: pytest.MonkeyPatch, text: str, step: str
) -> None:
    net = model()
    kept(holder, net)
    monkeypatch.setattr(ClientState, step, killed)
    with pytest.raises(Killed):
        patched(holder, net, text)
    monkeypatch.undo()
    _, note = again(holder).hello({}, {"about": ABOUT})
    there = [path.stem for path in (holder.store / "models").iterdir()]
    assert there == ([note["model"]] if text == "class:dog" else [])


def test_its_ledger_holds_no_line_of_what_it_has_forgotten(holder: ClientState) -> None:
    net = model()
    kept(holder, net)
    patched(holder, net, "class:dog")
    tensors, _ = read_tensors(holder.place / "ledger.safetensors")
    assert tensors["counts"].tolist() == [0, len(holder.images()[0]), 0, 0]
    assert not any(bool(value[3].any()) for name, value in tensors.items() if name != "counts")


def test_another_model_under_the_name_of_its_own_is_refused_and_a_lost_one_is_missed(holder: ClientState) -> None:
    kept(holder, model())
    path = holder.store / "models" / f"{holder.state['model']}.safetensors"
    (holder.place / "ledger.safetensors").unlink()
    write_tensors(path, build_model("small:TinyNet", num_classes=4, channels=1, seed=9).state_dict())
    packed, notes = pack_queries([Query((Selection(),), Statistic("peaks", "all"))])
    order = {"model": holder.state["model"], "asks": notes, "share": 1, "least-group": 1, "about": ABOUT}
    with pytest.raises(FedOrthoError, match="not the model that its name says"):
        holder.observe(packed, order)
    path.unlink()
    assert holder.hello({}, {"about": ABOUT})[1]["model"] == "", "so it is sent again"


def test_a_damaged_state_is_named_and_does_not_harm_others_in_the_same_store(holder: ClientState) -> None:
    damaged = holder.store / "client-0" / "state.json"
    damaged.parent.mkdir(parents=True)
    for text in ("[]", '{"model": ""}', "{"):
        damaged.write_text(text)
        with pytest.raises(FedOrthoError, match=r"client-0/state\.json is (damaged|not JSON)"):
            ClientState(0, holder.settings, holder.store, holder.own)
        kept(holder, build_model("small:TinyNet", num_classes=4, channels=1, seed=len(text)))
    assert len(list((holder.store / "models").iterdir())) == 1


def test_what_it_needs_to_know_is_asked_for_by_name() -> None:
    config = as_mapping(SETTINGS) | {"do": "train", "store": ""}
    assert federate_settings(config) == SETTINGS
    with pytest.raises(FedOrthoError, match="lacks partition-id"):
        client_state_of({}, config)
    with pytest.raises(FedOrthoError, match="no store is named"):
        client_state_of({"partition-id": 0}, config)
    assert client_state_of({"partition-id": 0, "store": "here", "data": "mine"}, config).own == "mine"
