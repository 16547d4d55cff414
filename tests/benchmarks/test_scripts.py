"""The benchmark scripts start, and the networks that they use are those of the manifest."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fedortho.audits.judge import judge_case
from fedortho.data.images import Images
from fedortho.errors import BadCheckpoint, UnknownName
from fedortho.models.zoo import build_model
from fedortho.reports.figures.style import caption_of
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.storage.files import locked
from fedortho.storage.settings import make_settings

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]
MANIFEST = json.loads((ROOT / "benchmarks" / "manifest.json").read_text(encoding="utf-8"))
SMALL = TrainSettings(data="digits", model="small:TinyNet", epochs=1, batch_size=64, threads=1, crop=0, flip=0.0)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module, under a name that no module of the tests has."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS])
def test_every_script_shows_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(name, monkeypatch).main(["--help"])
    assert ended.value.code == 0
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out


def test_the_manifest_has_valid_settings_and_one_name_per_digest() -> None:
    digests = [entry["digest"] for entry in MANIFEST.values()]
    assert len(set(digests)) == len(digests) >= 25
    for name, entry in MANIFEST.items():
        settings = make_settings(TrainSettings, entry["settings"])
        assert name.startswith(f"{settings.data}-{settings.model}-")
        assert ("-without-" in name) == bool(settings.without)


def test_a_network_that_is_missing_is_trained_and_one_with_other_weights_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = script("manifest", monkeypatch)
    monkeypatch.setattr(manifest, "MANIFEST", tmp_path / "manifest.json")
    networks = tmp_path / "networks"
    train_run(networks / "tiny", SMALL)
    manifest.main(["--networks", str(networks), "--update"])
    listed = json.loads((tmp_path / "manifest.json").read_text())
    assert listed["tiny"]["settings"]["model"] == "small:TinyNet"

    elsewhere = tmp_path / "elsewhere"
    manifest.main(["--networks", str(elsewhere), "--data-dir", ""])
    assert manifest.open_network(elsewhere, "tiny", "").path == elsewhere / "tiny"

    listed["tiny"]["digest"] = "0" * 64
    (tmp_path / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(BadCheckpoint, match=r"elsewhere/tiny .*0000"):
        manifest.open_network(elsewhere, "tiny", "")
    listed["tiny"]["processor"] = "abacus"  # it rounds differently
    (tmp_path / "manifest.json").write_text(json.dumps(listed))
    assert manifest.open_network(elsewhere, "tiny", "").path == elsewhere / "tiny"
    assert "abacus" in capsys.readouterr().err
    with pytest.raises(UnknownName, match="no network 'tinny'; did you mean 'tiny'"):
        manifest.open_network(elsewhere, "tinny", "")


class FewImages:
    """What figures read, from untrained networks: `FigureData` with a small network of any name, no run and no edit."""

    def __init__(self, figures: ModuleType, images: Images, models: dict[str, nn.Module]) -> None:
        self.data, self.test_sample, self.models = SimpleNamespace(test=images, name="toy"), images, tuple(models)
        self.run = lambda name, *_: SimpleNamespace(load_model=lambda: next(iter(models.values())))
        self.pair = lambda name, *_, **__: (models.get(name, next(iter(models.values()))),) * 2
        self.forget_labels = lambda request=figures.REQUEST: request.labels(images.names)
        self.named = lambda *words, **request: figures.FigureData.named(self, *words, **request)


def test_figures_name_network_data_seed_class_and_layers(
    tiny: nn.Module, toy: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = script("figures", monkeypatch)
    resnet = build_model("resnet18", num_classes=4, channels=1).eval()
    shared = FewImages(figures, toy.subset(range(40)), {"tiny": tiny.eval(), "resnet18": resnet})
    told = {name: caption_of(figures.FIGURES[name](shared)) for name in ("gram-layers", "answers")}
    assert told["gram-layers"] == (
        "vgg-mini on toy, seed 0; kernels of shallow: features.0; mid: features.3; deep: features.6"
    )
    about = "forgotten by hide: class 0 (0); layer features.6; 40 test images"
    assert told["answers"] == f"resnet-mini on toy, seed 0; {about}", "the paper's class"
    assert figures.PAPER_KERNELS == (2, 7), "the 3rd and the 8th"
    pytest.importorskip("captum")
    monkeypatch.setattr(figures.attention, "recognised_examples", lambda _, images: images.subset(range(4)))
    drawn = figures.grad_cam(shared)
    assert caption_of(drawn).endswith("tiny; layer layer4.1.conv2 of resnet18; one test image of each class")
    assert len(drawn.axes) == 5 * 4, "an image, and two rows for each network"


def test_a_figure_that_there_is_not_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script("figures", monkeypatch).main(["--only", "gramm"])
    assert ended.value.code == 2
    assert "no figure 'gramm'; did you mean 'gram'" in capsys.readouterr().err


def test_no_weights_and_no_verdicts_are_in_the_repository() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/benchmarks/networks/", "/runs/"} <= set(ignored)
    kept = {path.suffix for path in (ROOT / "benchmarks").rglob("*") if "networks" not in path.parts and path.is_file()}
    assert kept <= {".py", ".json", ".png", ".txt", ".pyc"}
    assert not list((ROOT / "src").rglob("*.trials.json"))


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark on one small network, tuned on class 6 and reported on classes 1 and 0."""
    train_run(tmp_path / "networks" / "small", SMALL)
    module = script("comparison", monkeypatch)
    monkeypatch.setattr(module, "original_name", lambda *_: "small")
    monkeypatch.setattr(module, "DRAWN", ("class:0",))
    monkeypatch.setattr(module, "SEEDS", {"vgg-mini": (0,)})
    monkeypatch.setattr(module.Bench, "jobs", lambda bench: only_classes(module, bench))
    return module


def only_classes(module: ModuleType, bench: Any) -> list[Any]:
    run = bench.network("vgg-mini")
    tuning = list(bench._tuning(run, module.REPORTED))
    compared = [job for request in ("class:1", "class:0") for job in bench._comparing(run, request)]
    return [*tuning, *compared, *(job for job in bench._comparing(run, "class:1", "published") if job.epochs > 1)]


def words(place: Path) -> list[str]:
    flags = {"networks": place / "networks", "out": place / "out", "edited": place / "edited", "data-dir": ""}
    budget = {"candidates": 2, "images": 300, "trials": 1, "widening": 0, "methods": "retrain,finetune,logit-mask"}
    return ["all", *(word for key, value in (flags | budget).items() for word in (f"--{key}", str(value)))]


def test_the_comparison_goes_on_after_a_kill_and_leaves_what_another_process_does(
    comparison: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "print_trial", kill)
    with pytest.raises(KeyboardInterrupt):
        comparison.main(words(tmp_path))
    tried: list[int] = []
    monkeypatch.setattr(comparison, "print_trial", lambda name, number, trial: tried.append(number))
    comparison.main(words(tmp_path))
    assert tried == [1, 2], "the attempt before the kill was not made again"

    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    known = [(row["request"], row["label"], row["tuned-on"]) for row in rows]
    assert known == [
        *(("class:0", name, on) for name, on in (("retrain", ""), ("finetune", "class:6"), ("logit-mask", ""))),
        *(("class:1", name, on) for name, on in (("retrain", ""), ("finetune", "class:6"), ("finetune ×5", "class:6"))),
        ("class:1", "logit-mask", ""),
    ]
    assert all(row["accuracies"] and "kept-flops" in row["cost"] for row in rows)
    (chosen,) = json.loads((tmp_path / "out" / "searches.json").read_text())["rows"]
    assert (chosen["method"], chosen["setting"], chosen["attempts"]) == ("finetune", "lr", 3)
    assert isinstance(chosen["inside"], bool)

    monkeypatch.setattr(comparison, "compare", lambda *_, **__: pytest.fail("it was done"))
    comparison.main(words(tmp_path))
    (tmp_path / "out" / "comparison.json").unlink()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison.time, "sleep", sleep)
    names = [f"compare-one-small-class-{label}-logit-mask" for label in (0, 1)]
    with locked(tmp_path / "out" / names[0]), locked(tmp_path / "out" / names[1]), pytest.raises(KeyboardInterrupt):
        comparison.main([*words(tmp_path)[:-1], "logit-mask"])
    assert slept, "another process has both jobs"


@pytest.mark.slow
def test_a_cell_of_the_final_protocol_is_made_and_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks, out, module = tmp_path / "networks", tmp_path / "erasing.json", script("erasing", monkeypatch)
    train_run(networks / "small", SMALL)
    train_run(networks / "without", replace(SMALL, without="class:1"))
    judged: list[str] = []

    def judge(case: Any, audit: str, **given: Any) -> Any:
        assert audit == "full"
        judged.append(given["method"])
        return judge_case(case, audit, **given, only=("C1",))

    methods = {name: module.METHODS[name] for name in ("retrain", "regrow", "regrow-all")}
    small = {"original_name": lambda *_, **__: "small", "reference_names": lambda *_: ["without"], "judge_case": judge}
    small |= {"REQUESTS": {"cifar10": ("class:1",)}, "ORIGINALS": {"cifar10": {"vgg-mini": (0,)}}}
    small |= {"METHODS": methods, "MODELS": tmp_path / "models"}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    flags = ["--networks", str(networks), "--out", str(out), "--data-dir", "", "--models", "vgg-mini"]
    module.main(flags)
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["retrain", "regrow", "regrow-all"]
    assert judged == ["regrow", "regrow", "regrow-all"], "the only reference cannot be judged by itself"
    assert rows[1]["audits"]["C1"]["reference"] == rows[1]["alike"]["details"]["C1"]["as_retrained"]["reference"]["fc"]
    assert rows[0]["share"] == 1.0
    assert rows[2]["settings"]["stages"] == 99
    assert rows[1]["audits"]["C1"]["reference"] is not None
    monkeypatch.setattr(module, "compare", lambda *_, **__: pytest.fail("it was done"))
    module.main(flags)
