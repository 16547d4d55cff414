"""A federation in this process, which a client leaves: python examples/own_federation.py DIRECTORY."""

import argparse
import json
from pathlib import Path

import fedortho as fo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the two runs are written")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()

    settings = fo.FederateSettings(
        data="digits",  # or a folder of images, of which each client gets a share
        model="vgg-mini",  # or package.module:function
        clients=given.clients,
        rounds=given.rounds,
        fraction=1.0,  # share of the clients that train in a round
        split="dirichlet:0.5",
        batch_size=32,
        crop=0,
        flip=0.0,
        valid=0.2,
        threads=1,
    )
    run = fo.federate_run(given.directory / "federation", settings)
    assert run is not None, "its clients run in this process"
    for entry in run.history():
        print(f"round {entry.epoch + 1} of {given.rounds}: accuracy while training {entry.accuracy:.1%}")

    method = fo.make_method("hide", {"max_retain_drop": 0.05})
    served = fo.forget_run(run, f"client:{given.clients - 1}", method, out=given.directory / "left")
    for name, found in (("before", served.record.before), ("after", served.record.after)):
        print(f"{name:7} forget {found.forget:.1%}  retain {found.retain:.1%}")
    log = json.loads((given.directory / "left" / "wire.json").read_text())  # bytes per client
    for exchange in log["exchanges"]:
        down, up = (sum(exchange[way].values()) / 1000 for way in ("bytes-down", "bytes-up"))
        print(f"{exchange['kind']:14} {down:9,.1f} kB down  {up:7,.1f} kB up")


if __name__ == "__main__":
    main()
