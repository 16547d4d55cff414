"""A federation in this process, which a client leaves exactly: python examples/own_federation.py DIRECTORY."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import fedortho as fo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the three runs are written")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()

    settings = fo.FederateSettings(
        data="digits",  # or a folder of images, of which each client gets a share
        model="vgg-mini",  # or package.module:function
        clients=given.clients,
        rounds=given.rounds,
        fraction=0.5,  # share of the clients that train in a round
        keep_rounds="all",  # a round before a client's first contact is where forgetting it begins
        split="dirichlet:0.5",
        batch_size=32,
        crop=0,
        flip=0.0,
        valid=0.2,
        threads=1,
    )
    run = fo.federate_run(given.directory / "federation", settings)
    assert run is not None, "its clients run in this process"
    log = json.loads((run.path / "rounds.json").read_text())["rounds"]
    for number, entry in enumerate(log, start=1):
        print(f"round {number} of {given.rounds}: clients {', '.join(map(str, entry['drawn']))}")

    leaver = log[-1]["drawn"][-1]
    left = fo.rewind_run(run, f"client:{leaver}", given.directory / "left")
    print("\n".join(left.plan.lines()))
    never = fo.federate_run(given.directory / "never", replace(settings, without=f"client:{leaver}"))
    assert left.run is not None
    assert never is not None
    print(f"left  {left.run.record.model.digest}\nnever {never.record.model.digest}")


if __name__ == "__main__":
    main()
