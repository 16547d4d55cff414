"""Exact forgetting in a federation of 100 clients on CIFAR-10: rewind, retrain, compare digests and rounds saved.

    python benchmarks/rewind.py --data-dir ../shared/data [--only early,late,samples,together,never]

Trainings go into --runs and are resumable. Of the clients that were drawn, in order of their first round, `early` is
the one at a tenth, `late` the last; `samples` are 100 images of the one in the middle (the next that has so many), and
`together` are that client and the late one in one rewind. `never` was not drawn. Images are 16×16 pixels, and
clients write no ledgers, which no weight depends on. Seconds are of a busy machine: compare rounds.
"""

import argparse
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from federation import SETTINGS as FEDERATION
from federation import train
from result_files import add_row

from fedortho.federated.engine import FederatedEngine, RoundProgress
from fedortho.requests.rewind import plan_rewind, rewind_run
from fedortho.runs.rounds import kept_rounds, read_log
from fedortho.runs.run import Run, load_run_data
from fedortho.runs.settings import FederateSettings, held_rows

HERE = Path(__file__).parent
SETTINGS = replace(
    FEDERATION, rounds=8, image_size=16, split="dirichlet:0.3", epochs=1, evaluate_every=0, keep_rounds="all"
)
PARTS = ("early", "late", "samples", "together", "never")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--runs", type=Path, default=Path("runs/rewind"))
    parser.add_argument("--only", default=",".join(PARTS), help="requests, separated by commas")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rewind.json")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    send = partialmethod(FederatedEngine.send_model, ledger=False)  # ledgers would take a third of the time
    setattr(FederatedEngine, "send_model", send)  # noqa: B010  # a method is replaced
    settings = replace(SETTINGS, data_dir=arguments.data_dir, timeout=36000.0)
    run = train(arguments.runs / "original", settings)
    for part, request in requests_of(run, settings).items():
        if part in arguments.only.split(","):
            row = {"part": part} | measured(run, part, request, settings, arguments.runs)
            print(row, flush=True)
            what = "100 clients, CIFAR-10 at 16×16 pixels, vgg-mini: rewound and retrained federations, by digest"
            command = f"python benchmarks/rewind.py --data-dir {arguments.data_dir}"
            add_row(arguments.out, row, ("part",), lambda each: PARTS.index(each["part"]), what, command)


def requests_of(run: Run, settings: FederateSettings) -> dict[str, list[str]]:
    """The requests of each part."""
    log, data = read_log(run.path), load_run_data(settings)
    assert log is not None, "it was trained just now"
    drawn = list(dict.fromkeys(client for each in log.rounds for client in each.drawn))
    rows = held_rows(data, settings, settings.partition_seed)
    trained_on = {client: rows[client][torch.isin(rows[client], data.train.rows)].tolist() for client in drawn}
    middle = next(client for client in drawn[len(drawn) // 2 :] if len(trained_on[client]) >= 100)
    never = next(client for client in range(settings.clients) if client not in drawn)
    return {
        "early": [f"client:{drawn[len(drawn) // 10]}"],
        "late": [f"client:{drawn[-1]}"],
        "samples": [f"samples:{','.join(map(str, trained_on[middle][:100]))}"],
        "together": [f"client:{middle}", f"client:{drawn[-1]}"],
        "never": [f"client:{never}"],
    }


def measured(run: Run, part: str, request: list[str], settings: FederateSettings, runs: Path) -> dict[str, Any]:
    """A rewind and a retraining, and whether they end with the same bytes."""
    started = time.time()
    plan = plan_rewind(run, " ".join(request))
    planned, started = time.time() - started, time.time()
    rewound = rewind_run(run, " ".join(request), runs / f"{part}-rewound", watch=tell).run
    assert rewound is not None, "it has an `out`"
    rewinding, started = time.time() - started, time.time()
    alone = replace(settings, without=" ".join(request), keep_rounds="")
    retrained = train(runs / f"{part}-retrained", alone)
    return {
        "request": [text if len(text) < 40 else f"100 {text[:40]}…" for text in request],
        "first_contact": [plan.contacts[text] for text in plan.contacts],
        "rounds": settings.rounds,
        "rounds_saved": plan.begin,
        "expected_saved": plan.expected,
        "digest": rewound.record.model.digest,
        "is_equal": rewound.record.model.digest == retrained.record.model.digest,
        "rounds_are_equal": read_log(rewound.path) == read_log(retrained.path),
        "is_unchanged": rewound.record.model.digest == run.record.model.digest,
        "test_accuracy": rewound.record.result.test_accuracy,
        "kept_bytes": sum(kept_rounds(run.path).values()),
        "seconds": {"plan": planned, "rewind": rewinding, "retrain": time.time() - started},
    }


def tell(news: RoundProgress) -> None:
    if not news.asked:
        print(f"round {news.round} of {news.rounds}", flush=True)


if __name__ == "__main__":
    main()
