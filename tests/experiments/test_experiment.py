"""The paper's tables as files: each can be run, and states only what the paper's own numbers say."""

import itertools
import re
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from fedortho.data.request import KINDS
from fedortho.data.sources import DATASETS
from fedortho.errors import BadSetting, FedOrthoError, UnknownName
from fedortho.experiments.experiment import (
    EXPERIMENTS,
    HERE,
    SCALES,
    Experiment,
    ExperimentResults,
    check_claims,
    load_experiment,
    make_experiment,
    network_key,
    printed_beside,
    printed_rows,
    read_seeds,
    request_for,
    request_kind,
    row_verdict,
    select_rows,
)
from fedortho.experiments.relations import (
    COLUMNS,
    HOLDS,
    Membership,
    SeedRow,
    TableRow,
    differences,
    judge_differences,
    noise_of_images,
    over_seeds,
    parse_relation,
)
from fedortho.experiments.results_table import attack_words, results_table
from fedortho.methods import make_method
from fedortho.methods.finetune import FineTune
from fedortho.models.zoo import MODELS
from fedortho.runs.record import Accuracies
from fedortho.runs.run import load_run_data
from fedortho.runs.settings import FederateSettings
from fedortho.storage.provenance import environment
from fedortho.storage.settings import read_toml
from fedortho.unlearning.rank import Ranking
from fedortho.unlearning.select import choose_kernels

PARTS = [f" at request={kind}" for kind in ("class", "client", "samples")]
CENTRAL = ("continuous_unlearning_comparison", "class_unlearning_performance")
TABLES = [
    (name, scale)
    for name in EXPERIMENTS
    for scale in SCALES
    if scale != "wide" or name in ("pruning", "strength", "layer_ortho", "lambda_search", *CENTRAL)
]


def line(values: list[float], **key: Any) -> TableRow:
    return TableRow(key, {seed: {"forget": value, "retain": value} for seed, value in enumerate(values)})


@pytest.mark.parametrize(("name", "scale"), TABLES)
def test_every_table_can_be_loaded_at_every_scale(name: str, scale: str) -> None:
    experiment = load_experiment(name, scale)
    assert experiment.seeds
    assert experiment.variants
    assert bool(experiment.relations) == bool(experiment.printed)
    for network in experiment.networks:
        assert network.model in MODELS
        assert network.data in DATASETS
        assert (network.data == "fashion-mini") == (scale == "demo"), "the demo needs no data, the others are real"
        assert scale == "paper" or (network.threads == 1 and network.device == "cpu"), "the same bytes everywhere"
        kinds = {request_kind(words) for words in experiment.requests}
        assert isinstance(network, FederateSettings) or kinds == {"class"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_claim_is_one_that_the_printed_numbers_support(name: str) -> None:
    for claim in check_claims(load_experiment(name), []):
        assert claim.paper, f"{claim.relation} is about no printed row"
        assert set(claim.paper) == {HOLDS}, claim.relation


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_difference_to_another_method_that_the_printed_numbers_support_is_a_claim(name: str) -> None:
    printed, claims = printed_rows(name), {re.sub(r"^\d+ ", "", one.text) for one in load_experiment(name).relations}
    for method in {row.key["method"] for row in printed} - {"paper"}:
        for metric, sign in itertools.product(COLUMNS, "<>"):
            words = f"paper{'[step=min]' if name.startswith('cont') else ''} {metric} {sign} {method} {metric}"
            for where in ("", *PARTS):
                claim = parse_relation(words + where)
                found = [value for pair in claim.pairs(printed) for value in differences(claim, pair)]
                is_claimed = words in claims or words + where in claims
                in_parts = {words + part for part in PARTS} <= claims
                assert not found or min(found) <= 0 or is_claimed or in_parts, words + where


def rows_of(experiment: Experiment) -> list[SeedRow]:
    """A row without values for everything that the table would run."""
    rows = []
    for network in experiment.networks:
        for words in experiment.requests:
            for step, variant in [(1, None), *((s, t) for t in experiment.variants for s in range(1, 6))]:
                key: dict[str, Any] = {**network_key(network), "request": request_kind(words)}
                key |= {"method": "original"} if variant is None else {"method": variant.method, **variant.varied}
                rows.append(SeedRow(0, key | ({"step": step if variant else 0} if experiment.is_sequence else {})))
    return rows


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_printed_row_of_the_paper_is_a_row_of_the_full_scale(name: str) -> None:
    experiment = load_experiment(name, "paper")
    shown = {str(printed_beside(experiment, TableRow(row.key, {}))) for row in rows_of(experiment)} - {"{}"}
    assert shown == {str(one.values[0]) for one in printed_rows(name)}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_printed_value_has_a_place_beside_ours(name: str) -> None:
    experiment = load_experiment(name, "paper")
    results = ExperimentResults("", "", "paper", tuple(rows_of(experiment)), (), environment())
    header, *lines = results_table(experiment, results)
    shown = {(name, cell) for line in lines for name, cell in zip(header[:-1], line[1:], strict=True)}  # cell beside
    titles = {"forget": "forget", "retain": "retain", "mia": "MIA confidence", "seconds": "seconds"}
    for row in printed_rows(name):
        for metric, title in titles.items():
            if metric in (values := row.values[0]):
                spread = f"±{values[f'{metric}-sd']:.2f}" if f"{metric}-sd" in values else ""
                number = f"{values[metric]:.2f}" if metric != "seconds" else str(values[metric]).removesuffix(".0")
                assert (title, number + spread) in shown, (row.key, metric)


@pytest.mark.parametrize(("name", "scale"), TABLES)
def test_rows_of_the_paper_have_its_ratio_and_strength_whatever_was_tuned(name: str, scale: str) -> None:
    rows = [
        make_method("paper", one.settings) for one in load_experiment(name, scale).variants if one.method == "paper"
    ]
    assert any(getattr(row, "ratio", 0) == 0.01 and getattr(row, "alpha", 0) == 0.5 for row in rows)
    assert name == "strength" or {getattr(row, "alpha", 0) for row in rows} == {0.5}


def test_both_weights_of_the_papers_search_are_rows_of_a_table() -> None:
    whole = [0.01, 0.05, 0.1, 0.2, 0.5]  # the appendix
    for scale in SCALES:
        networks = [network_key(one) for one in load_experiment("lambda_search", scale).networks]
        assert [one["lambda"] for one in networks if one["split"] == "central"] == whole
    federated = [one for one in networks if one["split"] != "central"]
    assert sorted(one["lambda"] for one in federated if one["align"] == 0.1) == whole
    assert sorted(one["align"] for one in federated if one["lambda"] == 0.1) == whole
    some = load_experiment("lambda_search", rows="lambda=0.05,split=central")
    assert [one.ortho for one in some.networks] == [0.05]
    assert "the paper prints no numbers" in some.printed_words


def test_layers_that_were_made_orthogonal_are_pruned_and_deep_layers_beside_them() -> None:
    experiment = load_experiment("layer_ortho", "paper")
    pruned = {
        network_key(one)["ortho"]: [v.on(one)["layers"] for v in experiment.variants] for one in experiment.networks
    }
    assert pruned == {
        "none": ["deep", "deep"],
        **{layers: [layers, "deep"] for layers in ("shallow", "mid", "deep", "all")},
    }
    rows = [{"ortho": "mid", "layers": layers, "method": "paper"} for layers in ("ortho", "deep")]
    shared = {"data": "cifar100", "model": "resnet50"}
    assert {printed_beside(experiment, TableRow(row | shared, {}))["forget"] for row in rows} == {67.0}


def test_the_papers_ratios_are_three_to_six_kernels_of_a_wide_layer() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "reproduction.md").read_text().split())
    ranking = Ranking({"layer": torch.arange(512.0)})
    ratios = [one.varied["ratio"] for one in load_experiment("pruning", "wide").variants]
    numbers = [len(choose_kernels(ranking, ratio)["layer"]) for ratio in (min(ratios), max(ratios))]
    assert numbers == [3, 6]
    assert "the paper's ratios mean three to six of them" in page


def test_an_edit_that_two_rows_name_differently_is_counted_once_in_a_claim() -> None:
    experiment = load_experiment("layer_ortho")
    zero = Accuracies(0.0, 0.0, 0.0)
    rows = [replace(row, accuracies=zero) for row in rows_of(experiment)]
    number = {claim.relation: len(claim.here) for claim in check_claims(experiment, rows)}
    ratios = 2
    assert number["paper[ortho=deep] forget < paper[ortho=none] forget"] == ratios, "both prune the deep layers"
    assert number["paper[ortho=deep] forget < paper[ortho=mid] forget"] == 2 * ratios, "mid prunes its own, or the deep"


@pytest.mark.parametrize("name", ["unlearning_iid_non_iid", "resnet18_unlearning_iid_non_iid"])
def test_fine_tuning_is_by_the_papers_recipe(name: str) -> None:
    experiment = load_experiment(name, "paper")
    (variant,) = [one for one in experiment.variants if one.method == "finetune"]
    assert variant.fraction == 1.0, "all clients that are not forgotten"
    method = make_method("finetune", variant.settings)
    assert isinstance(method, FineTune)
    for network in experiment.networks:
        trained = (network.batch_size, network.weight_decay, network.momentum)
        assert (method.batch_size, method.weight_decay, method.momentum) == trained
    assert method.lr == 0.001


def test_every_file_of_an_experiment_is_installed_with_the_package() -> None:
    declared = read_toml(Path(__file__).parents[2] / "pyproject.toml")["tool"]["setuptools"]["package-data"]["fedortho"]
    for file in (path for path in HERE.iterdir() if path.suffix in (".toml", ".json")):
        assert any(PurePath("experiments", file.name).match(pattern) for pattern in declared), file.name


def test_printed_numbers_are_the_papers() -> None:
    (found,) = [one for one in printed_rows("strength") if one.key.get("alpha") == 0.5]
    assert found.values[0] == {"forget": 0.0, "retain": 79.7}
    key = {"split": "iid", "data": "cifar100", "model": "resnet50", "method": "not", "request": "client"}
    (found,) = [one for one in printed_rows("unlearning_iid_non_iid") if one.key == key]
    assert (found.values[0]["forget"], found.values[0]["retain"]) == (36.67, 50.64)


def test_labels_of_the_sequence_count_from_1_because_its_first_row_is_that_of_the_first_class() -> None:
    sequence = [one for one in printed_rows("continuous_unlearning_comparison") if one.key["method"] == "paper"]
    elsewhere = [one for name in ("unlearning_res50", "unlearning_iid_non_iid") for one in printed_rows(name)]
    for row in (one for one in sequence if one.key["step"] == 1):
        wanted = {"data": "cifar100", "model": "resnet50", "method": "paper", "request": "class", **row.key}
        same = [
            one for one in elsewhere if all(wanted[key] == value for key, value in one.key.items() if key in wanted)
        ]
        (first,) = [one for one in same if one.key.get("split", "central") == row.key["split"]]
        assert [first.values[0][name] for name in ("forget", "retain", "mia")] == [
            row.values[0][name] for name in ("forget", "retain", "mia")
        ]
        assert row.values[0]["label"] == 1
    labels = dict.fromkeys(int(one.values[0]["label"]) for one in sequence)
    asked = load_experiment("continuous_unlearning_comparison", "paper").requests
    assert asked == tuple(f"class:{label - 1}" for label in labels)


def beside_paper(table: str, other: str, metric: str, **where: str) -> list[tuple[float, float]]:
    """Printed values of the paper's method and of another one in the same setting."""
    rows = [one for one in printed_rows(table) if all(one.key[key] == value for key, value in where.items())]
    mine, theirs = ([one for one in rows if one.key["method"] == method] for method in ("paper", other))
    pairs = [(a, b) for a in mine for b in theirs if {**a.key, "method": ""} == {**b.key, "method": ""}]
    return [(a.values[0][metric], b.values[0][metric]) for a, b in pairs]


def test_the_page_counts_contradictions_as_the_printed_tables_have_them() -> None:
    main, small = "unlearning_iid_non_iid", "resnet18_unlearning_iid_non_iid"
    central = ("unlearning_res50", "class_unlearning_performance")
    page = " ".join((Path(__file__).parents[2] / "docs" / "reproduction.md").read_text().split())

    def lower(pairs: list[tuple[float, float]]) -> str:
        return f"{sum(mine < theirs for mine, theirs in pairs)} of {len(pairs)}"

    clients, samples = (lower(beside_paper(main, "retrain", "forget", request=kind)) for kind in ("client", "samples"))
    assert f"in {clients} cells for clients and {samples} for samples" in page
    kept = [beside_paper(table, "retrain", "retain", request=kind) for table in (main, small) for kind in KINDS]
    kept += [beside_paper(table, "retrain", "retain") for table in central]
    shares = [100 * mine / theirs for pairs in kept for mine, theirs in pairs]
    assert sorted(f"{share:.1f}" for share in shares if share < 97) == ["94.7", "96.1", "96.7"]
    assert all(theirs - mine < 3 for pairs in kept for mine, theirs in pairs)
    assert "96.1 and 94.7 %" in page
    tuned = beside_paper(main, "finetune", "retain") + beside_paper(small, "finetune", "retain")
    assert f"below FT's in {lower(tuned)} cells" in page
    gaps = [theirs - mine for mine, theirs in tuned]
    assert f"by {min(gaps):.1f} to {max(gaps):.1f} points" in page
    retrained = beside_paper(main, "retrain", "mia", request="class")
    retrained += [pair for table in central for pair in beside_paper(table, "retrain", "mia")]
    assert f"in {lower([(theirs, mine) for mine, theirs in retrained])} cells of the ResNet-50" in page
    salun = [(theirs, mine) for table in central for mine, theirs in beside_paper(table, "salun", "mia")]
    fused = beside_paper(main, "fused", "mia", request="class")
    assert f"above SalUn's in {lower(salun)}, and below FUSED's in {lower(fused)}" in page
    cells = [one.values[0] for table in (main, small) for one in printed_rows(table) if one.key["request"] == "samples"]
    between = sum(0 < cell["forget-sd"] < 0.47 for cell in cells)
    uneven = sum(abs(3 * cell["forget"] - round(3 * cell["forget"])) > 0.02 for cell in cells)
    assert f"in {between} of {len(cells)} cells for samples. {uneven} of {len(cells)} means" in page
    values = [one.values[0]["mia"] for one in printed_rows(small) if one.key["request"] == "class"]
    uneven = sum(abs(3 * value - round(3 * value)) > 0.02 for value in values)
    assert f"of the ResNet-18 table {uneven} of {len(values)} are no such multiples" in page
    for pair in [(35.73, 36.87), (34.0, 37.0), (69.47, 69.8), (59.2, 63.33), (29.33, 30.0)]:  # another's, and bold
        assert f"{pair[0]:.2f}, not {pair[1]:.2f}" in page
        metric = "mia" if pair[0] > 50 else "forget"
        assert any(
            pair == (theirs, mine)
            for table in (main, small)
            for other in ("fused", "finetune")
            for mine, theirs in beside_paper(table, other, metric)
        )


def test_a_relation_pairs_rows_that_agree_in_all_it_does_not_name() -> None:
    rows = [line([1.0], method="a", ratio=r, ortho=o) for r in (0.1, 0.2) for o in ("deep", "none")]
    pairs = parse_relation("a[ortho=deep] forget < a[ortho=none] forget").pairs(rows)
    assert [(x.key["ratio"], y.key["ratio"]) for x, y in pairs] == [(0.1, 0.1), (0.2, 0.2)]
    pairs = parse_relation("a[ratio=max] forget < a[ratio=min] retain at ortho=none").pairs(rows)
    assert [(x.key["ratio"], y.key["ratio"], x.key["ortho"]) for x, y in pairs] == [(0.2, 0.1, "none")]
    assert not parse_relation("a forget < b forget").pairs(rows)
    alone = parse_relation("a[ratio=max] forget < a[ratio=min] forget").pairs(rows[:1])
    assert len(parse_relation("a forget < b forget").pairs([*rows, line([2.0], method="b", ortho="deep")])) == 2
    assert not alone, "a row is not compared with itself"


def test_a_difference_within_its_noise_is_no_finding_in_either_direction() -> None:
    relation = parse_relation("a forget < b forget")
    pair = (line([10.0, 12.0, 11.0], method="a"), line([20.0, 23.0, 21.0], method="b"))
    assert differences(relation, pair) == [10.0, 11.0, 10.0]
    assert judge_differences([10.0, 11.0, 10.0]) == "holds"
    assert judge_differences([1.0, 12.0, -4.0]) == "within noise"
    assert judge_differences([-10.0, -11.0]) == "does not hold"
    assert judge_differences([0.0, 0.0]) == judge_differences([0.0]) == "equal"


def test_with_one_seed_the_noise_is_that_of_the_number_of_images() -> None:
    relation = parse_relation("a retain > b retain")
    error = (2 * 0.5 * 0.5 / 102) ** 0.5 * 100  # two shares of a half, of 100 images and two more

    def row(name: str, share: float, number: int) -> TableRow:
        return TableRow({"method": name}, {0: {"retain": share, "retain-images": number}})

    for number, verdict in ((100, "within noise"), (10_000, "holds")):
        pair = (row("b", 50.0, number), row("a", 56.0, number))
        assert judge_differences(differences(relation, pair), noise_of_images(relation, pair)) == verdict
    same = (row("b", 50.0, 100), row("a", 50.0, 100))
    assert noise_of_images(relation, same) == pytest.approx(error)
    certain = (row("b", 0.0, 10), row("a", 0.0, 10))
    assert noise_of_images(relation, certain) > 0, "no image of ten is not none of all"
    assert noise_of_images(relation, (line([1.0]), line([2.0]))) == 0.0, "printed rows do not tell how many images"


def test_seeds_that_agree_by_chance_do_not_outweigh_the_number_of_images() -> None:
    assert judge_differences([0.5, 0.5, 0.5]) == "holds"
    assert judge_differences([0.5, 0.5, 0.5], error=1.0) == "within noise"
    assert judge_differences([3.0, 3.0, 3.1], error=1.0) == "holds"


def test_a_relation_may_multiply_one_side_and_allow_a_margin() -> None:
    slow, fast = TableRow({}, {0: {"seconds": 250.0}}), TableRow({}, {0: {"seconds": 2.0}})
    assert differences(parse_relation("100 a seconds < b seconds"), (fast, slow)) == [50.0]
    near, goal = TableRow({}, {0: {"retain": 78.0}}), TableRow({}, {0: {"retain": 80.0}})
    assert differences(parse_relation("a retain > b retain - 3"), (goal, near)) == [1.0]
    assert parse_relation("b retain > a retain").less.where == {"method": "a"}


def test_seeds_that_only_one_side_has_are_not_compared() -> None:
    pair = (
        TableRow({}, {0: {"forget": 1.0}, 1: {"forget": 2.0}}),
        TableRow({}, {1: {"forget": 5.0}, 2: {"forget": 9.0}}),
    )
    assert differences(parse_relation("a forget < b forget"), pair) == [3.0]


def test_only_at_the_papers_scale_is_a_number_judge_differences() -> None:
    key = {"split": "iid", "data": "cifar100", "model": "resnet50", "method": "retrain", "request": "client"}
    full, demo = (load_experiment("unlearning_iid_non_iid", scale) for scale in ("paper", "demo"))
    printed = printed_beside(full, TableRow(key, {}))
    near = TableRow(key, {0: {metric: printed[metric] + printed[f"{metric}-sd"] for metric in ("forget", "retain")}})
    far = TableRow(key, {0: {"forget": printed["forget"] + 3 * printed["forget-sd"], "retain": printed["retain"]}})
    assert row_verdict(full, near) == "within 2 sd"
    assert row_verdict(full, far) == "outside 2 sd: forget"
    assert row_verdict(demo, TableRow({**key, "split": "dirichlet:0.6"}, near.values)) == "other setting"
    assert row_verdict(full, TableRow({**key, "method": "hide"}, near.values)) == "not printed"
    assert row_verdict(full, TableRow(key, {0: {}})) == "refused"
    central = {"data": "cifar10", "model": "resnet50", "method": "ssd"}
    verdict = row_verdict(load_experiment("unlearning_res50", "paper"), line([1.76], **central))
    assert verdict.endswith("no sd printed")


def test_seeds_become_one_line() -> None:
    key = {"method": "ssd"}
    rows = [SeedRow(seed, key, Accuracies(seed / 10, 0.5, 0.4)) for seed in (0, 1)]
    (found,) = over_seeds([*rows, SeedRow(2, key, refused="why")])
    assert found.of("forget") == [0.0, 10.0]
    assert found.key == {"method": "ssd"}


def test_a_row_whose_model_is_as_it_was_is_called_so() -> None:
    shares, known = Accuracies(0.8, 0.8, 0.8), load_experiment("class_unlearning_performance")
    rows = [SeedRow(0, {"method": "ssd"}, shares, is_unchanged=True), SeedRow(0, {"method": "salun"}, shares)]
    _, *lines = results_table(known, ExperimentResults("", "", "demo", tuple(rows), (), environment()))
    assert [line[-1] for line in lines] == ["model unchanged", "other setting"]


def test_an_attack_without_power_is_told() -> None:
    def told(*accuracies: float) -> str:
        known = [Membership("confidence", 0.0, accuracy, 0.5, 100) for accuracy in accuracies]
        rows = [SeedRow(0, {}, membership=each) for each in known]
        return attack_words(ExperimentResults("", "", "demo", (*rows, SeedRow(0, {})), (), environment()))

    assert told(0.503, 0.514).startswith(
        "on images of known membership it is right for 50.3% to 51.4% (a coin: 50 %): "
    )
    assert told(0.503, 0.514).endswith("MIA and claims about it say nothing of membership here")
    assert told(0.52, 0.7).endswith("52.0% to 70.0% (a coin: 50 %)")
    assert told() == "no model was attacked"


def test_a_table_can_be_narrowed_to_methods_and_rows() -> None:
    whole = load_experiment("pruning")
    some = select_rows(whole, rows="ratio=0.2,ortho=none")
    assert load_experiment("pruning", rows="ratio=0.2,ortho=none") == some
    assert load_experiment("pruning", seeds="3,4").seeds == (3, 4)
    assert [one.varied for one in some.variants] == [{"ratio": 0.2}]
    assert [network.ortho for network in some.networks] == [0.0]
    federated = load_experiment("unlearning_iid_non_iid", "paper")
    assert select_rows(federated, rows="request=client").requests == ("client:0",)
    assert len(select_rows(federated, rows="split=iid").networks) == 1
    assert {one.method for one in select_rows(federated, "not,retrain").variants} == {"not", "retrain"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": "sdd"}, r"no method in unlearning_res50 'sdd'; did you mean 'ssd'\?"),
        ({"methods": ","}, "no method in unlearning_res50 ','; choose from"),
        (
            {"rows": "colour=red"},
            "no key of --rows 'colour'; choose from data, lambda, model, ortho, ratio, request, split",
        ),
        ({"rows": "model=vgg"}, "no model in unlearning_res50 at scale demo 'vgg'; choose from resnet-mini"),
        ({"rows": "iid"}, "'iid' is no key=value; write such as"),
        ({"rows": "ratio=0.01,ratio=0.2"}, "'ratio=0.01,ratio=0.2' names a key twice; a row has one value of each"),
    ],
)
def test_what_a_table_does_not_have_is_refused_by_name(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(FedOrthoError, match=message):
        select_rows(load_experiment("unlearning_res50"), **arguments)


def test_an_early_stem_and_parts_of_batches_change_networks_and_the_name_of_the_result() -> None:
    name, small = "unlearning_iid_non_iid", {"early_stem": True, "accumulate": 4}
    plain, changed = load_experiment(name, "paper"), load_experiment(name, "paper", **small)
    models = {(one.data, one.model) for one in changed.networks}
    assert ("tiny-imagenet", "resnet50-early") in models
    assert ("cifar100", "resnet50") in models, "32x32 images keep their stem"
    assert {one.accumulate for one in changed.networks} == {4}
    assert list(map(network_key, changed.networks)) == list(map(network_key, plain.networks)), "rows of one table"
    assert changed.file_name == f"{name}-paper-early-stem-accumulate-4.json"
    assert changed.command.endswith("--early-stem --accumulate 4")
    with pytest.raises(BadSetting, match="--early-stem is for ResNets on tiny-imagenet"):
        load_experiment("pruning", "paper", early_stem=True)


def test_a_table_without_a_scale_names_those_that_it_has() -> None:
    with pytest.raises(BadSetting, match="has no scale wide; choose from demo, small, paper"):
        load_experiment("unlearning_iid_non_iid", "wide")


def test_names_scales_and_seeds_are_checked() -> None:
    with pytest.raises(UnknownName, match="no experiment 'prunning'; did you mean 'pruning'"):
        load_experiment("prunning")
    with pytest.raises(UnknownName, match="no scale 'full'; choose from demo, paper, small, wide"):
        load_experiment("pruning", "full")
    for text in ("one", "0,,1", "-1", "1.5"):
        with pytest.raises(FedOrthoError, match="is no seed; write whole numbers"):
            read_seeds(text)
    with pytest.raises(FedOrthoError, match="is no relation; write"):
        parse_relation("a is better than b")


def test_the_first_samples_of_a_class_are_training_images_of_that_class() -> None:
    (network,) = load_experiment("class_unlearning_performance").networks
    data = load_run_data(replace(network, data="digits", image_size=0))
    request = request_for("first 20 of class:3", data)
    forget, _ = request.split(data.train)
    assert forget.labels.tolist() == [3] * 20


def test_keys_of_a_scale_win_and_lists_are_crossed() -> None:
    told = {
        "what": "a test",
        "requests": ["class:0"],
        "methods": ["ssd"],
        "relations": [],
        "demo": {"seeds": [0], "networks": [{"like": "demo", "ortho": [0.1, 0.0], "epochs": [1, 2]}]},
    }
    made = make_experiment("pruning", "demo", told | {"demo": told["demo"] | {"methods": [{"name": "salun"}]}})  # type: ignore[operator]
    assert [(network.ortho, network.epochs) for network in made.networks] == [(0.1, 1), (0.1, 2), (0.0, 1), (0.0, 2)]
    assert [one.method for one in made.variants] == ["salun"]
