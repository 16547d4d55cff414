"""Exact forgetting: whatever was asked for, going back and on gives the bytes of a federation that never had it."""

import json
import os
import random
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import SETTINGS, write_images

from fedortho.cli import app as cli
from fedortho.data.request import ForgetRequest
from fedortho.errors import FedOrthoError
from fedortho.federated.client import federate_settings
from fedortho.federated.engine import RoundProgress
from fedortho.federated.server import local_grid, train_federation
from fedortho.federated.transport import read_wire_log
from fedortho.methods.paper import Paper
from fedortho.requests import climbing, federated_jobs
from fedortho.requests.climbing import NotPassed, forget_until_passed
from fedortho.requests.federated_jobs import do_job
from fedortho.requests.forgetting import forget_federated_run, forget_run
from fedortho.requests.rewind import CannotRewind, expected_saved, plan_rewind, rewind_run
from fedortho.runs.rounds import kept_rounds, read_log
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import FederateSettings, Federation, held_rows, sample_clients
from fedortho.storage.journal import read_journal

KINDS = ("client", "clients", "samples", "class", "together")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", {"ant": 30, "bee": 30, "cow": 6})


def drawn_settings(images: Path, seed: int, split: str, fraction: float) -> FederateSettings:
    """A small federation; what is not given is drawn by the seed."""
    some = random.Random(seed)
    return replace(
        SETTINGS,
        data=str(images),
        clients=some.choice((5, 8)),
        rounds=4 if fraction < 1 else 2,  # whoever meets all clients at once goes back to the beginning
        fraction=fraction,
        split=split,
        least_images=3,
        batch_size=8,
        seed=seed,
        flip=some.choice((0.0, 0.5)),
        norms=some.choice(("fedavg", "fedavg", "local", "recalibrate")),
        keep_rounds=some.choice(("all", "powers", "2")),
        evaluate_every=0,
        timeout=60.0,
    )


def drawn_request(settings: FederateSettings, kind: str) -> str:
    some, data = random.Random(settings.seed), load_run_data(settings)
    one, two = some.sample(range(settings.clients), 2)
    mine = [row for row in held_rows(data, settings, settings.seed)[one].tolist() if row in data.train.rows.tolist()]
    samples = f"samples:{mine[0]},{mine[-1]}"
    return {
        "client": f"client:{one}",
        "clients": f"client:{one},{two}",
        "samples": samples,
        "class": "class:cow",
        "together": f"{samples} client:{two}",
    }[kind]


def retrained(path: Path, settings: FederateSettings, without: str) -> Run:
    return train_federation(path, replace(settings, without=without, keep_rounds=""))


def trainings(run: Run) -> int:
    """How often clients were asked to train."""
    return sum(exchange.kind == "train.local" for exchange in read_wire_log(run.path / "wire.json"))


def check_equal(place: Path, settings: FederateSettings, kind: str) -> None:
    request = drawn_request(settings, kind)
    run = train_federation(place / "run", settings)
    rewound = rewind_run(run, request, place / "rewound")
    wanted = retrained(place / "retrained", settings, request)
    assert rewound.run.record.model.digest == wanted.record.model.digest, (request, str(rewound.plan))
    assert read_log(rewound.run.path) == read_log(wanted.path), "every round has the same clients and ends alike"
    plan, trained, wanted_trained = rewound.plan, trainings(rewound.run), trainings(wanted)
    assert settings.rounds - plan.begin <= trained <= wanted_trained - plan.begin, "no round before it is repeated"
    assert kept_rounds(rewound.run.path).keys() >= {n for n in kept_rounds(run.path) if n <= plan.begin}
    assert plan.is_untouched <= (wanted.record.model.digest == run.record.model.digest)


@pytest.mark.parametrize(
    ("seed", "split", "fraction", "kind"),
    [
        pytest.param(0, "iid", 0.1, "client", marks=pytest.mark.slow),
        pytest.param(1, "dirichlet:0.5", 0.1, "clients", marks=pytest.mark.slow),
        pytest.param(2, "dirichlet:0.5", 0.1, "samples", marks=pytest.mark.slow),
        pytest.param(3, "dirichlet:0.1", 0.5, "class", marks=pytest.mark.slow),
        (4, "iid", 0.5, "together"),
        pytest.param(5, "iid", 1.0, "client", marks=pytest.mark.slow),
    ],
)
def test_going_back_gives_the_bytes_of_a_federation_that_never_had_the_data(
    images: Path, tmp_path: Path, seed: int, split: str, fraction: float, kind: str
) -> None:
    check_equal(tmp_path, drawn_settings(images, seed, split, fraction), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["iid", "dirichlet:0.3"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(10, 14))
def test_going_back_gives_these_bytes_in_many_federations(
    images: Path, tmp_path: Path, seed: int, split: str, fraction: float, kind: str
) -> None:
    check_equal(tmp_path, drawn_settings(images, seed, split, fraction), kind)


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six clients, one a round, four rounds, all kept: at least two clients are never drawn."""
    settings = replace(drawn_settings(images, 1, "iid", 0.2), clients=6, norms="fedavg", keep_rounds="all")
    return train_federation(tmp_path_factory.mktemp("runs") / "run", settings)


def order_of(run: Run) -> list[int]:
    """The clients in the order in which they were drawn, then those that never were."""
    met = [client for each in read_log(run.path).rounds for client in each.drawn]
    return list(dict.fromkeys([*met, *range(6)]))


def test_the_log_of_rounds_is_what_seed_and_round_give(run: Run) -> None:
    log, settings = read_log(run.path), run.settings
    assert [each.drawn for each in log.rounds] == [
        tuple(sample_clients(range(6), settings, settings.seed, turn)) for turn in range(4)
    ]
    assert all(each.drawn == each.answered == each.averaged for each in log.rounds)
    assert log.rounds[-1].model == run.record.model.digest
    assert sorted(kept_rounds(run.path)) == [1, 2, 3], "the last one is the model"


def test_a_client_that_was_never_drawn_costs_nothing_and_the_log_proves_it(run: Run, tmp_path: Path) -> None:
    request = f"client:{order_of(run)[-1]}"
    plan = rewind_run(run, request).plan
    assert plan.is_untouched
    assert "never drawn" in " ".join(plan.lines())
    assert "rounds.json" in " ".join(plan.lines())
    rewound = rewind_run(run, request, tmp_path / "left")
    assert rewound.run.record.model.digest == run.record.model.digest
    assert not (rewound.run.path / "clients" / f"client-{order_of(run)[-1]}").exists()
    assert (rewound.run.path / "clients" / f"client-{order_of(run)[0]}").exists()
    assert read_log(rewound.run.path) == read_log(run.path)


@pytest.mark.slow
def test_statistics_pooled_over_all_clients_are_pooled_anew_without_one_that_was_never_drawn(
    images: Path, tmp_path: Path
) -> None:
    settings = replace(drawn_settings(images, 1, "iid", 0.2), clients=6, norms="recalibrate", keep_rounds="all")
    before = train_federation(tmp_path / "run", settings)
    request = f"client:{order_of(before)[-1]}"
    plan = plan_rewind(before, request)
    assert plan.begin == 4
    assert not plan.is_untouched
    rewound = rewind_run(before, request, tmp_path / "rewound").run.record.model.digest
    assert rewound == retrained(tmp_path / "retrained", settings, request).record.model.digest
    assert rewound != before.record.model.digest


def test_requests_in_a_row_go_back_before_the_earliest_and_what_was_edited_is_gone(run: Run, tmp_path: Path) -> None:
    first, second, last = order_of(run)[1], order_of(run)[3], order_of(run)[-1]
    shutil.copytree(run.path, tmp_path / "run")
    served = forget_federated_run(
        open_run(tmp_path / "run"), ForgetRequest.parse(f"client:{second}"), Paper(), out=tmp_path / "hidden"
    )
    assert served.run is not None
    rewound = rewind_run(served.run, f"client:{first}", tmp_path / "rewound", purge=True)
    assert rewound.plan.contacts == {f"client:{second}": 4, f"client:{first}": 2}
    assert rewound.plan.begin == 1
    wanted = retrained(tmp_path / "retrained", run.settings, f"client:{first},{second}")
    assert rewound.run.record.model.digest == wanted.record.model.digest
    gone = {str(path.relative_to(tmp_path)) for path in rewound.deleted}
    assert gone == {
        *(f"{name}/{file}" for name in ("run", "hidden") for file in ("model.safetensors", "clients")),
        "hidden/patches",
        "run/rounds/00002.safetensors",
        "run/rounds/00003.safetensors",
    }
    assert not any((tmp_path / name).exists() for name in gone)
    assert open_run(tmp_path / "run").record == run.record, "records stay"
    again = plan_rewind(rewound.run, f"client:{last}")
    assert again.source == rewound.run, "the new run has a log and kept rounds of its own"
    assert again.begin == again.first == read_log(rewound.run.path).before_contact([last])
    assert again.settings.without == f"client:{','.join(map(str, sorted((first, second, last))))}"


def test_no_later_request_on_a_deleted_run_trains_on_what_it_was_deleted_for(run: Run, tmp_path: Path) -> None:
    first, last = order_of(run)[1], order_of(run)[-1]
    never = next(client for client in order_of(run) if read_log(run.path).first_contact([client]) is None)
    for place, gone in (("met", first), ("never-drawn", never)):
        old = Path(shutil.copytree(run.path, tmp_path / place / "run"))
        new = rewind_run(old, f"client:{gone}", tmp_path / place / "new", purge=True).run
        assert rewind_run(old, f"client:{gone}", tmp_path / place / "new", purge=True).run == new, "repeated"
        for forget in (plan_rewind, forget_run):
            with pytest.raises(FedOrthoError, match=rf"deleted for client:{gone} .* give it to {tmp_path / place}/new"):
                forget(old, f"client:{last}")
        with pytest.raises(FedOrthoError, match="would use that data again"):
            forget_run(old, f"client:{last}", "finetune", out=tmp_path / place / "tuned")
        both = plan_rewind(old, f"client:{gone},{last}").settings.without
        assert both == plan_rewind(new, f"client:{last}").settings.without, "a request that names both is served"


@pytest.mark.slow
def test_forgetting_exactly_in_python_goes_back_too(run: Run, tmp_path: Path) -> None:
    request = f"client:{order_of(run)[1]}"
    served = forget_run(run, request, level="exact", out=tmp_path / "left")
    assert served.rewind is not None
    assert served.rewind.begin == 1
    assert served.run is not None
    assert served.run.record.model.digest == rewind_run(run, request, tmp_path / "rewound").run.record.model.digest
    assert (served.record.method, served.record.request) == ("rewind", request)
    assert served.record.after.test == served.run.record.result.test_accuracy
    assert served.record.cost is not None
    assert served.record.cost.exchanges == 3, "one round of four is saved"


def test_climbing_ends_with_a_rewind_where_rounds_were_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise NotPassed("no audit passes")

    monkeypatch.setattr(climbing, "_validation", lambda *_: SimpleNamespace(check=refuse))
    request = f"client:{order_of(run)[1]}"
    served, attempts = forget_until_passed(run, request, out=tmp_path / "left")
    assert [attempt.level for attempt in attempts] == ["hide", "exact"]
    assert served.rewind is not None
    monkeypatch.setattr(climbing, "_validation", None)
    again, attempts = forget_until_passed(run, request, out=tmp_path / "left")
    assert [attempt.level for attempt in attempts] == ["exact"], "the same call again judges nothing"
    assert again.record.model_after == served.record.model_after


def test_an_undo_file_means_to_retrain(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    request = f"client:{order_of(run)[1]}"
    served = forget_run(run, request, level="exact", out=tmp_path / "left", undo=tmp_path / "undo")
    assert served.rewind is None
    assert served.record.method == "retrain"
    assert "a rewind has no undo" in caplog.text
    assert (tmp_path / "undo").exists()


def test_a_killed_rewind_goes_on_to_the_same_bytes(run: Run, tmp_path: Path) -> None:
    request = f"client:{order_of(run)[1]}"

    def kill(news: RoundProgress) -> None:
        assert news.round >= 1, "it goes on after the first round"
        if news.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewind_run(run, request, tmp_path / "out", watch=kill)
    rounds: list[int] = []
    resumed = rewind_run(run, request, tmp_path / "out", watch=lambda news: rounds.append(news.round))
    assert min(rounds) == 3
    assert resumed.run.record.model.digest == rewind_run(run, request, tmp_path / "whole").run.record.model.digest
    assert [entry.event for entry in read_journal(run.path.parent).entries[-5:]] == ["received"] * 2 + [
        "executed",
        "received",
        "executed",
    ]


def test_a_killed_rewind_of_until_passed_goes_on_and_a_finished_one_is_told_once(run: Run, tmp_path: Path) -> None:
    def kill(news: RoundProgress) -> None:
        raise KeyboardInterrupt

    request, out = f"client:{order_of(run)[3]}", tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        rewind_run(run, request, out, watch=kill)
    for _ in range(2):
        assert [attempt.level for attempt in forget_until_passed(run, request, out=out)[1]] == ["exact"]
    entries = [(e.event, e.details["out"]) for e in read_journal(run.path.parent).entries if e.request == request]
    place = os.path.relpath(out, run.path.parent)
    assert entries[-3:] == [("received", place), ("received", place), ("executed", place)]


def test_a_rewind_that_fails_has_an_end_in_the_journal(run: Run, tmp_path: Path) -> None:
    def fail(news: RoundProgress) -> None:
        raise FedOrthoError("too few clients are there")

    with pytest.raises(FedOrthoError, match="too few"):
        rewind_run(run, f"client:{order_of(run)[1]}", tmp_path / "out", watch=fail)
    last = read_journal(run.path.parent).entries[-1]
    assert (last.event, last.details["reason"]) == ("refused", "too few clients are there")


@pytest.mark.slow
def test_workers_come_to_the_same_bytes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    request = f"client:{order_of(run)[2]}"
    here, there = (rewind_run(run, request, tmp_path / str(n), workers=n).run.record.model.digest for n in (1, 2))
    assert here == there


def test_what_cannot_be_exact_is_refused_and_says_what_it_would_need(run: Run, tmp_path: Path) -> None:
    third = f"client:{order_of(run)[2]}"
    unkept = replace(run, settings=replace(run.settings, keep_rounds=""))
    with pytest.raises(CannotRewind, match=r"kept no rounds.* end of round 2.* --keep-rounds all"):
        plan_rewind(unkept, third)
    assert plan_rewind(unkept, f"client:{order_of(run)[0]}").begin == 0, "the start needs no kept round"
    assert plan_rewind(unkept, f"client:{order_of(run)[-1]}").is_untouched, "nor does a client that was never drawn"
    for change, message in (({"draw": 1}, "draw 1"), ({"start": "before"}, "began with before")):
        with pytest.raises(CannotRewind, match=message):
            plan_rewind(replace(run, settings=replace(run.settings, **change)), third)
    with pytest.raises(CannotRewind, match=r"has no rounds\.json"):
        plan_rewind(replace(run, path=tmp_path), third)
    with pytest.raises(FedOrthoError, match="no client 9"):
        plan_rewind(run, "client:9")


def test_a_kept_round_that_was_changed_is_refused(run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    shutil.copyfile(path / "rounds" / "00003.safetensors", path / "rounds" / "00002.safetensors")
    with pytest.raises(FedOrthoError, match=r"00002.* is not the model"):
        rewind_run(open_run(path), f"client:{order_of(run)[2]}", tmp_path / "out")


@pytest.mark.parametrize(("clients", "fraction", "holders"), [(20, 0.1, 1), (20, 0.1, 3), (10, 0.5, 1)])
def test_the_expected_rounds_are_the_mean_over_draws(clients: int, fraction: float, holders: int) -> None:
    federation, saved = Federation(clients=clients, fraction=fraction, rounds=8), []
    for seed in range(400):
        draws = [sample_clients(range(clients), federation, seed, turn) for turn in range(8)]
        saved.append(next((turn for turn, drawn in enumerate(draws) if min(drawn) < holders), 8))
    assert expected_saved(federation, holders, 8) == pytest.approx(sum(saved) / len(saved), rel=0.15)


@pytest.mark.slow
def test_the_server_app_goes_back_by_the_same_code(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, out = f"client:{order_of(run)[3]}", tmp_path / "out"
    told: list[str] = []

    def serve(config: dict[str, Any], *, clients: int, store: Path, threads: int) -> None:
        """In place of Ray: the same server app, with the configuration that Ray would hand to the clients."""
        with local_grid(federate_settings(config), store) as grid:
            do_job(grid, config)

    monkeypatch.setattr(federated_jobs, "run_ray", serve)
    asked = ForgetRequest.parse(request)
    assert federated_jobs.rewind_elsewhere(run, asked, out=out, deployment=None, log=told.append) == open_run(out)
    assert "back to the end of round 3" in " ".join(told)
    wanted = rewind_run(run, request, tmp_path / "here").run
    assert open_run(out).record.model.digest == wanted.record.model.digest
    assert not (out / "clients" / f"client-{order_of(run)[3]}").exists(), "who left is sent nothing"
    later = forget_federated_run(wanted, ForgetRequest.parse("class:ant"), Paper(), out=None)
    assert later.result.plan is not None, "the new run serves requests like any other"
    with pytest.raises(FedOrthoError, match=r"has left already|selects no"):
        forget_federated_run(wanted, ForgetRequest.parse(request), Paper(), out=None)


def test_the_command_prints_the_plan_and_goes_back(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["forget", str(run.path), f"client:{order_of(run)[3]}", "--level", "exact", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["fedortho", *words, "--dry-run"])
    with suppress(SystemExit):
        cli.main()
    assert "back to the end of round 3: 1 of 4 rounds" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", ["fedortho", *words, "--json"])
    with suppress(SystemExit):
        cli.main()
    told = json.loads(capsys.readouterr().out)
    assert told["rounds-saved"] == 3
    assert told["model"] == open_run(tmp_path / "out").record.model.digest
    for what in ("judge", "report"):
        monkeypatch.setattr(sys, "argv", ["fedortho", what, str(tmp_path / "out")])
        with suppress(SystemExit):
            cli.main()
        assert f"out was trained without {words[2]}, and not edited since; it is checked" in capsys.readouterr().err
