"""Every door of fedortho: what it reads, and how; and a small world of valid files behind the doors."""

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mutations import Mutation, by_name, mutated_json
from torch import Tensor

from fedortho.audits.qualification import Qualification, read_qualification
from fedortho.audits.verdict import read_verdict
from fedortho.cli.verdict import print_verdict
from fedortho.data.sources import load_images
from fedortho.evidence.bundle import make_bundle, open_bundle
from fedortho.evidence.signature import load_key, load_public, make_key
from fedortho.federated import client as federated_client
from fedortho.federated import messages
from fedortho.federated.client import handle
from fedortho.federated.client_state import open_client
from fedortho.federated.deploy import write_deployment
from fedortho.federated.launch import _read_deployment
from fedortho.federated.server import train_federation
from fedortho.federated.wire import unpack_json
from fedortho.methods.hide import Hide
from fedortho.methods.hyperparameters import read_settings
from fedortho.models.patch import load_patch, undo_patch
from fedortho.models.zoo import build_model
from fedortho.reports.run_table import list_runs
from fedortho.requests.comparing import compare
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, judge_run
from fedortho.runs.rounds import read_log
from fedortho.runs.rows import read_rows
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.runs.training import train_run
from fedortho.statistics.ledger import load_ledger
from fedortho.storage.checkpoints import fitted_weights, load_weights, read_weights
from fedortho.storage.files import tensors_digest, write_tensors
from fedortho.storage.journal import check_journal
from fedortho.storage.records import from_json, to_json, write_record
from fedortho.storage.settings import make_settings, read_toml
from fedortho.training.recipe import Recipe

REQUEST = "class:1"
SMALL: dict[str, Any] = {"model": "vgg-mini", "threads": 1, "crop": 0, "flip": 0.0, "device": "cpu", "batch_size": 16}
HOW = Hide(ratio=0.25, statistics_images=32, trial_images=32, repair_images=32)


@dataclass(frozen=True)
class Door:
    """A file that is read, and the code that reads it."""

    path: Path
    use: Callable[[], object]
    mutate: Mutation
    sealed: bool = False  # what `use` returns must be equal to what it returns for the valid file


@dataclass(frozen=True)
class World:
    """Valid files of every kind."""

    place: Path
    run: Run
    new: Run
    federation: Run
    orders: tuple[tuple[str, Mapping[str, Tensor], Any], ...]  # of a server, with their tensors
    replies: tuple[messages.Reply, ...]


def build_world(place: Path) -> World:
    """Train, forget, judge, bundle, compare and federate on a few images; all files are below `place`."""
    data = write_images(place / "data")
    settings = TrainSettings(data=str(data), epochs=1, valid=0.25, **SMALL)
    run = train_run(place / "runs" / "run", settings)
    out, undo = place / "runs" / "new", place / "undo.safetensors"
    served = forget_run(run, REQUEST, HOW, out=out, undo=undo, device="cpu", hide_first=False)
    assert served.run is not None
    judge_run(served.run, REQUEST, JudgeOptions("none", device="cpu"))
    make_key(place / "key.pem")
    make_bundle(served.run, REQUEST, place / "bundle.zip", sign=place / "key.pem")
    compare(run, REQUEST, "logit-mask", out=place / "compared", settings={})
    torch.save(run.load_model().state_dict(), place / "weights.pt")
    write_tensors(place / "weights.safetensors", run.load_model().state_dict())
    write_deployment(place / "deployment", nodes=1, address="localhost", insecure=True, config={"rounds": 1})
    _write_texts(place)
    with _overheard() as (orders, replies):
        shape = FederateSettings(
            data=str(data), clients=2, rounds=1, fraction=1.0, least_images=4, least_group=1, **SMALL
        )
        federation = train_federation(place / "federation" / "run", shape)
        forget_run(federation, REQUEST, HOW, out=place / "federation" / "new", device="cpu", hide_first=False)
    return World(place, run, open_run(out), federation, tuple(orders), tuple(replies))


def write_images(folder: Path) -> Path:
    """A folder of 64 random images in four classes, as Parquet files with class names and as image files."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    generator, names = torch.Generator().manual_seed(0), ("ankle boot", "dress", "[/x]", "sandal")
    blobs = []
    for row in range(64):
        pixels = torch.randint(0, 256, (8, 8), dtype=torch.uint8, generator=generator)
        stream = io.BytesIO()
        Image.fromarray(pixels.numpy()).save(stream, "PNG")
        blobs.append(stream.getvalue())
        file = folder.with_name("pictures") / names[row % 4].replace("/", "") / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(blobs[-1])
    note = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    folder.mkdir()
    for split, number in (("train", 64), ("test", 32)):
        cells = pa.array([{"bytes": blob, "path": f"{split}-{n}.png"} for n, blob in enumerate(blobs[:number])])
        table = pa.table({"image": cells, "label": pa.array([row % 4 for row in range(number)])})
        table = table.replace_schema_metadata({"huggingface": json.dumps(note)})
        pq.write_table(table, folder / f"{split}.parquet")
    return folder


def _write_texts(place: Path) -> None:
    texts = {
        "config.toml": 'data = "digits"\nepochs = 3\nlr = 0.05\northo-layers = "deep"\nthreads = 1\nvalid = 0.1',
        "recipe.toml": 'epochs = 3\nlr = 0.05\nmomentum = 0.9\nschedule = "steps"\nmilestones = "1,2"',
        "settings.json": json.dumps({"salun": {"lr": 0.01, "epochs": 1}, "hide": {"target": 0.1}}),
        "samples.txt": "0\n1 2\ntrain-3.png\n1/4\n",
        "samples.csv": "image,why\n0,blurred\ntrain-3.png,\n",
    }
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")


@contextmanager
def _overheard() -> Iterator[tuple[list[tuple[str, Mapping[str, Tensor], Any]], list[messages.Reply]]]:
    """What a server asks of clients inside the block, and what they reply."""
    orders: list[tuple[str, Mapping[str, Tensor], Any]] = []
    replies: list[messages.Reply] = []
    original = handle

    def listening(state: Any, action: str, tensors: Any, value: Any) -> Any:
        orders.append((action, dict(tensors), value))
        reply = original(state, action, tensors, value)
        replies.append(reply[1])
        return reply

    federated_client.handle = listening
    try:
        yield orders, replies
    finally:
        federated_client.handle = original


def file_doors(world: World) -> dict[str, Door]:
    """The doors that read a file; each is tried with damaged and hostile versions of it."""
    place, run, new = world.place, world.run, world.new
    model, edited = run.load_model(), new.load_model()

    def door(path: Path, use: Callable[[], object], *, sealed: bool = False) -> Door:
        return Door(path, use, by_name(path.name), sealed)

    def weights(name: str) -> object:
        fresh, path = build_model("vgg-mini", num_classes=4, channels=1), place / name
        load_weights(fresh, fitted_weights(fresh, read_weights(path), path), path)
        return fresh

    def verdict() -> object:
        if (found := read_verdict(new.path)) is not None:
            print_verdict(found)
        return found

    def bundle() -> object:
        return dict(open_bundle(place / "bundle.zip", public=place / "key.pub").files)

    journal = check_journal(place / "runs")
    client = sorted((world.federation.path / "clients").rglob("state.json"))[0]
    settings = world.federation.settings
    assert isinstance(settings, FederateSettings)
    return {
        "run.json": door(run.path / "run.json", lambda: (list_runs(place / "runs"), open_run(run.path).load_model())),
        "history.json": door(run.path / "history.json", run.history),
        "split.json": door(run.path / "split.json", run.load_data),
        "rows": door(new.path / "rows.safetensors", lambda: (read_rows(new.path, new.settings), new.load_data())),
        "model": door(
            run.path / "model.safetensors", lambda: tensors_digest(run.load_model().state_dict()), sealed=True
        ),
        "ledger": door(run.path / "ledger.safetensors", lambda: load_ledger(run.path / "ledger.safetensors", model)),
        "patch": door(
            new.path / "patches" / "0000.safetensors",
            lambda: tensors_digest(load_patch(new.path / "patches" / "0000.safetensors").apply(model).state_dict()),
            sealed=True,
        ),
        "undo": door(
            place / "undo.safetensors",
            lambda: tensors_digest(undo_patch(place / "undo.safetensors", edited).state_dict()),
            sealed=True,
        ),
        "verdict": door(new.path / "verdict.json", verdict),
        "qualification": door(_qualification(run), lambda: read_qualification(run.path)),
        "journal": door(
            place / "runs" / "journal.jsonl",
            lambda: check_journal(place / "runs", journal.last.hash).entries,
            sealed=True,
        ),
        "head": door(
            place / "runs" / "journal.head",
            lambda: check_journal(place / "runs", journal.last.hash).entries,
            sealed=True,
        ),
        "bundle": door(place / "bundle.zip", bundle, sealed=True),
        "private key": door(place / "key.pem", lambda: load_key(place / "key.pem")),
        "public key": door(place / "key.pub", lambda: load_public(place / "key.pub")),
        "config": door(place / "config.toml", lambda: make_settings(TrainSettings, read_toml(place / "config.toml"))),
        "recipe": door(place / "recipe.toml", lambda: make_settings(Recipe, read_toml(place / "recipe.toml"))),
        "settings": door(
            place / "settings.json", lambda: read_settings("digits", "vgg-mini", str(place / "settings.json"))
        ),
        "samples": door(place / "samples.txt", lambda: run.request(f"samples:{place / 'samples.txt'}")),
        "table": door(place / "samples.csv", lambda: run.request(f"samples:{place / 'samples.csv'}:image")),
        "checkpoint .pt": door(place / "weights.pt", lambda: weights("weights.pt")),
        "checkpoint": door(place / "weights.safetensors", lambda: weights("weights.safetensors")),
        "comparison": door(
            place / "compared" / "logit-mask.json",
            lambda: compare(run, REQUEST, "logit-mask", out=place / "compared", settings={}),
        ),
        "rounds": door(world.federation.path / "rounds.json", lambda: read_log(world.federation.path)),
        "client": door(client, lambda: open_client(0, settings, client.parents[1])),
        "deployment": door(
            place / "deployment" / "config.toml", lambda: _read_deployment(place / "deployment", {"rounds": 1})
        ),
        "Parquet": door(place / "data" / "train.parquet", lambda: load_images(str(place / "data"))),
        "picture": door(next((place / "pictures").rglob("*.png")), lambda: load_images(str(place / "pictures"))),
    }


def _qualification(run: Run) -> Path:
    """A qualification as `qualify` begins it, beside the run's record."""
    path = run.path / "qualification.json"
    write_record(path, Qualification(run.record.model.digest, run.record.data.digest, 0, (REQUEST,), ("class:2",)))
    return path


def mutated_message(tensors: Mapping[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    """The tensors of a message with one of them lost, renamed, of another shape or type, or not finite."""
    found = dict(tensors)
    if not found or draw.randrange(3) == 0:
        return found
    name = draw.choice(sorted(found))
    tensor = found.pop(name)
    kind = draw.randrange(6)
    changed: dict[int, Callable[[], Tensor]] = {
        0: tensor.double,
        1: lambda: tensor.flatten()[: max(tensor.numel() - 1, 0)],
        2: lambda: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor - 2**30,
        3: lambda: tensor.to(torch.int8),
        4: lambda: tensor[None],
    }
    if kind in changed:
        found[name] = changed[kind]()
    return found


def try_order(world: World, draw: random.Random) -> object:
    """A changed order of a server at a client; what would train is only read."""
    action, tensors, value = draw.choice(world.orders)
    text = mutated_json(json.dumps(value).encode(), draw)
    order = from_json(messages.ORDERS[action], _read(text), "the order")
    if isinstance(order, messages.TrainLocal):
        return order
    settings = world.federation.settings
    assert isinstance(settings, FederateSettings)
    state = open_client(0, settings, world.place / "federation" / "tried")
    return handle(state, action, mutated_message(tensors, draw), to_json(order))


def try_reply(world: World, draw: random.Random) -> object:
    """A changed reply of a client at the server."""
    reply = draw.choice(world.replies)
    return from_json(type(reply), _read(mutated_json(json.dumps(to_json(reply)).encode(), draw)), "the reply")


def _read(text: bytes) -> Any:
    """A message's JSON as it comes out of a Flower record."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    message = ConfigRecord({"json": text.decode(errors="replace")})
    return unpack_json(RecordDict({"tensors": ArrayRecord({}), "message": message}))[1]
