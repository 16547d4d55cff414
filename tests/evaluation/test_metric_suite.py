import math
from dataclasses import replace

import pytest
import torch
from small import TinyNet
from torch import nn

from fedortho.data.images import Dataset, Images, make_dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.evaluation.case import Case
from fedortho.evaluation.membership_attacks import ATTACKS
from fedortho.evaluation.metric_suite import REFERENCE_METRICS, MetricSuite, js_divergence
from fedortho.evaluation.metrics import METRICS, Metric
from fedortho.evaluation.model_outputs import EvaluationSets, ModelOutputs
from fedortho.models.predictions import accuracy, evaluate, logits_of
from fedortho.models.zoo import reinitialised

ALONE = {"forget-accuracy", "retain-accuracy", "test-accuracy", "loss-separation", "zrf"} | {
    f"mia-{a}" for a in ATTACKS
}
CLIENTS = {f"client-change-{word}" for word in ("min", "q1", "median", "q3")}


def net(seed: int) -> TinyNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyNet().eval()


@pytest.fixture
def data(toy: Images) -> Dataset:
    """Half of the images are tested on."""
    even = torch.arange(240) // 4 % 2 == 0
    return make_dataset(toy.subset(even), toy.subset(~even), valid=0.1)


def case_of(data: Dataset, request: str, *, clients: Clients | None = None, second: bool = False) -> Case:
    references = tuple(net(seed) for seed in ((3, 4) if second else (3,)))
    return Case(net(1), net(2), references, data, ForgetRequest.parse(request), clients=clients)


def measure_metrics(case: Case) -> list[Metric]:
    return MetricSuite(case).measure(case.unlearned)


def by_name(metrics: list[Metric]) -> dict[str, Metric]:
    found = {metric.name: metric for metric in metrics}
    assert len(found) == len(metrics)
    assert not [metric for metric in metrics if metric.error]
    return found


def rows_of(data: Dataset, number: int) -> str:
    return ",".join(map(str, data.train.rows[:number].tolist()))


@pytest.mark.slow
def test_accuracies_are_those_that_judge_measures(data: Dataset) -> None:
    clients = {0: data.train.rows[:40], 1: data.train.rows[40:]}
    for request in ("class:1", "class:0,3", f"samples:{rows_of(data, 12)}", "client:0"):
        case = case_of(data, request, clients=clients)
        found = by_name(measure_metrics(case))
        for model, part in ((case.unlearned, "value"), (case.references[0], "reference")):
            assert model is not None
            verdict = accuracies_of(model, data, request, clients=clients)
            assert getattr(found["forget-accuracy"], part) == pytest.approx(verdict.forget)
            assert getattr(found["retain-accuracy"], part) == pytest.approx(verdict.retain)
            assert getattr(found["test-accuracy"], part) == pytest.approx(verdict.test)


def test_each_request_gets_the_metrics_that_apply_and_every_known_metric_is_measured(data: Dataset) -> None:
    clients = {0: data.train.rows[:40], 1: data.train.rows[40:]}
    expected = ALONE | set(REFERENCE_METRICS)
    assert by_name(measure_metrics(case_of(data, "class:1"))).keys() == expected
    assert by_name(measure_metrics(case_of(data, "samples:" + rows_of(data, 12)))).keys() == expected | {
        "class-accuracy"
    }
    assert by_name(measure_metrics(case_of(data, "client:0", clients=clients))).keys() == expected | CLIENTS
    assert expected | {"class-accuracy"} | CLIENTS == METRICS.keys()


def test_classes_forgotten_before_are_neither_retained_nor_known(data: Dataset) -> None:
    case = Case(net(1), net(2), (net(3),), data, ForgetRequest.parse("class:1"), ForgetRequest.parse("class:3"))
    sets = EvaluationSets(case)
    assert set(sets.retain.labels.tolist()) == set(data.test.labels[sets.non_members].tolist()) == {0, 2}
    verdict = accuracies_of(case.unlearned, data, case.request, forgotten=case.forgotten)
    assert by_name(measure_metrics(case))["retain-accuracy"].value == pytest.approx(verdict.retain)


def test_the_class_of_the_samples_is_looked_at_on_its_own(data: Dataset) -> None:
    ones = data.train.rows[data.train.labels == 1][:11].tolist()
    case = case_of(data, f"samples:{','.join(map(str, ones))}")
    metric = by_name(measure_metrics(case))["class-accuracy"]
    assert metric.value == pytest.approx(evaluate(case.unlearned, data.test).per_class[1])
    assert metric.details["each"] == {"1": pytest.approx(metric.value)}
    assert metric.images == int((data.test.labels == 1).sum())


def test_unseen_images_of_the_kind_of_samples_have_their_labels_in_their_shares(data: Dataset) -> None:
    rows = {label: data.train.rows[data.train.labels == label].tolist() for label in range(4)}
    asked = ForgetRequest(samples=tuple(map(str, rows[1][:12] + rows[2][:3] + rows[3][:3])))
    nets = (net(1), net(2), (net(3),))
    case = Case(*nets, data, asked, ForgetRequest.parse("class:3"))
    sets = EvaluationSets(case)
    counts = torch.bincount(data.test.labels[sets.unseen], minlength=4).tolist()
    assert counts == [0, 30, 8, 0], "all 30 of class 1, a quarter as many of class 2, none of what is gone before"
    assert by_name(measure_metrics(case))["loss-separation"].value is not None
    few = case.unseen_like(case.forget_train.labels, 10).labels.tolist()
    assert (few.count(1), few.count(2)) == (8, 2)
    by_class = Case(*nets, data, ForgetRequest.parse("class:1"), ForgetRequest.parse("class:3"))
    assert set(data.test.labels[EvaluationSets(by_class).unseen].tolist()) == {1}
    nobody = replace(case, data=replace(data, test=data.test.subset(data.test.labels == 0)))
    with pytest.raises(BadData, match="no test image has a label"):
        nobody.unseen_like(case.forget_train.labels)


def test_loss_separation_does_not_take_a_label_for_membership(data: Dataset) -> None:
    sure = net(1)
    nn.init.zeros_(sure.fc.weight)
    sure.fc.bias.data.copy_(torch.tensor([0.0, 5.0, 0.0, 0.0]))  # class 1, whatever it sees
    ones = ",".join(map(str, data.train.rows[data.train.labels == 1].tolist()))
    case = Case(sure, sure, (), data, ForgetRequest.parse(f"samples:{ones}"))
    found = {metric.name: metric for metric in measure_metrics(case)}
    assert found["loss-separation"].value == 0.5


def test_changes_of_clients_are_those_of_their_own_retained_images(data: Dataset) -> None:
    parts = data.train.rows.split(20)
    clients = dict(enumerate(parts))
    case = case_of(data, "client:2", clients=clients)
    found = by_name(measure_metrics(case))
    changes = {"value": [], "reference": []}
    for model, part in ((case.unlearned, "value"), (case.references[0], "reference")):
        assert model is not None
        for client, rows in clients.items():
            if client != 2:
                own = data.train.subset(torch.isin(data.train.rows, rows))
                changes[part].append(accuracy(model, own) - accuracy(case.original, own))
        for word, place in (("min", 0.0), ("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
            expected = float(torch.tensor(changes[part], dtype=torch.float64).quantile(place))
            assert getattr(found[f"client-change-{word}"], part) == pytest.approx(expected)
    assert found["client-change-min"].details["clients"] == len(parts) - 1


def test_attacks_come_with_their_own_accuracy_and_false_positives(data: Dataset) -> None:
    metric = by_name(measure_metrics(case_of(data, "class:1")))["mia-confidence"]
    assert 0 <= metric.details["attack accuracy"] <= 1
    assert 0 <= metric.details["false positives"] <= 1
    assert metric.details["global threshold for"] == ["1"]
    assert metric.images == int((data.train.labels == 1).sum())


def slow_js(p: list[float], q: list[float]) -> float:
    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log2(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return kl(p, middle) / 2 + kl(q, middle) / 2


def test_js_divergence_is_a_loop_over_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 40, 5, dtype=torch.float64, generator=generator)
    p[:10, :3], q[5:15, 2:] = 0, 0
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    expected = [slow_js(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    assert js_divergence(p, q).tolist() == pytest.approx(expected, abs=1e-12)
    assert js_divergence(p, p).tolist() == pytest.approx([0.0] * 40, abs=1e-12)


def test_distances_to_retrain_are_what_single_images_give(data: Dataset) -> None:
    case = case_of(data, "class:2")
    found = by_name(measure_metrics(case))
    gone = case.forget_train
    p, q = (logits_of(model, gone).softmax(1).tolist() for model in (case.unlearned, case.references[0]))
    l2 = [math.dist(a, b) for a, b in zip(p, q, strict=True)]
    assert found["output-l2-forget"].value == pytest.approx(sum(l2) / len(l2))
    js = [slow_js(a, b) for a, b in zip(p, q, strict=True)]
    assert found["output-js-forget"].value == pytest.approx(sum(js) / len(js))
    means = [[sum(column) / len(gone) for column in zip(*side, strict=True)] for side in (p, q)]
    assert found["mean-output-tv"].value == pytest.approx(sum(abs(a - b) for a, b in zip(*means, strict=True)) / 2)
    inputs = gone.normalise(gone.pixels[gone.rows])
    with torch.no_grad():
        mine, theirs = (model.features(inputs).mean((2, 3)).tolist() for model in (case.unlearned, case.references[0]))
    apart = sum(math.dist(a, b) for a, b in zip(mine, theirs, strict=True))
    size = sum(math.hypot(*b) for b in theirs)
    assert found["activation-forget"].value == pytest.approx(apart / size, rel=1e-4)


def test_summaries_are_products_and_means_of_gaps(data: Dataset) -> None:
    case = case_of(data, "class:2")
    sets = EvaluationSets(case)
    found = by_name(measure_metrics(case))
    gaps = []
    for images in (case.forget_train, sets.retain, case.retain_test):
        gaps.append(abs(accuracy(case.unlearned, images) - accuracy(case.references[0], images)))
    attacked = found["mia-confidence"]
    mia = abs(attacked.value - attacked.reference)
    assert found["average-gap"].value == pytest.approx((sum(gaps) + mia) / 4)
    assert found["tug-of-war"].value == pytest.approx(math.prod(1 - gap for gap in gaps))
    assert found["tug-of-war-mia"].value == pytest.approx((1 - mia) * (1 - gaps[1]) * (1 - gaps[2]))


def test_a_retrained_model_is_at_no_distance_from_itself_and_a_second_one_is(data: Dataset) -> None:
    case = case_of(data, "class:1")
    same = by_name(measure_metrics(Case(case.references[0], case.original, case.references, data, case.request)))
    for name in REFERENCE_METRICS:
        assert same[name].value == pytest.approx(METRICS[name].ideal)
        assert same[name].reference is None, "that a model equals itself tells nothing"
    other = by_name(measure_metrics(case_of(data, "class:1", second=True)))
    assert other["output-l2-forget"].reference > 0


def test_without_a_retrained_model_gaps_are_listed_as_not_measured(data: Dataset) -> None:
    case = Case(net(1), net(2), (), data, ForgetRequest.parse("class:1"))
    found = by_name(measure_metrics(case))
    assert found.keys() == ALONE | set(REFERENCE_METRICS)
    for name, metric in found.items():
        assert metric.reference is None
        assert (metric.value is None) == (name in REFERENCE_METRICS)
        assert "no reference" in str(metric)


def test_a_model_with_broken_weights_gives_errors_that_name_it_and_drops_nothing(data: Dataset) -> None:
    broken = net(1)
    nn.init.constant_(broken.fc.bias, math.nan)
    case = Case(broken, net(2), (net(3),), data, ForgetRequest.parse("class:1"))
    metrics = measure_metrics(case)
    assert {metric.name for metric in metrics} == ALONE | set(REFERENCE_METRICS)
    assert all(metric.error for metric in metrics)
    assert "the unlearned model, test images: 120 of 120 answers are not finite" in str(metrics[0].error)
    swapped = measure_metrics(Case(net(3), net(2), (broken,), data, ForgetRequest.parse("class:1")))
    assert "the reference model" in str(swapped[0].error)


def test_each_set_is_passed_once_and_models_stay_as_they_were(data: Dataset) -> None:
    case = case_of(data, "class:1")
    outputs = ModelOutputs("a model", case.unlearned, EvaluationSets(case))
    calls = []
    outputs.model.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    for _ in range(3):
        outputs.predictions("test")
        outputs.predictions("forget")
        outputs.features("forget")
    assert sum(calls) <= len(data.test) + len(case.forget_train) + 2 * 2  # and two examples for each pass
    before = {name: value.clone() for name, value in case.unlearned.state_dict().items()}
    case.unlearned.train()
    measure_metrics(case)
    assert case.unlearned.training
    assert all(value.equal(before[name]) for name, value in case.unlearned.state_dict().items())
    assert not case.unlearned.fc._forward_pre_hooks


def test_a_suite_passes_the_retrained_model_once_for_several_others(data: Dataset) -> None:
    case = case_of(data, "class:1")
    suite = MetricSuite(case)
    first = suite.measure(case.unlearned)
    calls: list[int] = []
    suite.references[0].model.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    other = suite.measure(net(9))
    assert not calls
    assert first == measure_metrics(case)
    assert [metric.reference for metric in first] == [metric.reference for metric in other]
    assert [metric.value for metric in first] != [metric.value for metric in other]


def test_sets_are_capped_but_forget_accuracy_of_samples_is_exact(data: Dataset) -> None:
    by_sample, by_class = case_of(data, "samples:" + rows_of(data, 30)), case_of(data, "class:1")
    assert len(EvaluationSets(by_sample, 8).forget) == 30
    assert len(EvaluationSets(by_class, 8).forget) == 8
    assert len(ModelOutputs("a model", by_sample.unlearned, EvaluationSets(by_sample, 8)).attacked) == 8
    assert len(EvaluationSets(by_class, 9).retain) == len(EvaluationSets(by_class, 9).non_members) == 9


def test_an_untrained_copy_has_other_weights_and_zrf_of_it_is_1(data: Dataset) -> None:
    state = torch.random.get_rng_state()
    one, same, other = reinitialised(net(1), 5), reinitialised(net(2), 5), reinitialised(net(1), 6)
    assert torch.random.get_rng_state().equal(state)
    assert one.get_parameter("fc.weight").equal(same.get_parameter("fc.weight"))
    assert not one.get_parameter("fc.weight").equal(other.get_parameter("fc.weight"))
    case = Case(reinitialised(net(1), 0), net(2), (net(3),), data, ForgetRequest.parse("class:1"))
    zrf = by_name(measure_metrics(case))["zrf"]
    assert zrf.value == pytest.approx(1)
    assert zrf.reference < 1

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(BadSetting, match="Bare"):
        reinitialised(Bare(), 0)


def test_features_are_those_of_the_images_also_where_the_architecture_was_never_seen(data: Dataset) -> None:
    """Its memory format is tried on examples first; they were taken for images of the set."""
    channels, classes = data.train.shape[0], data.train.classes
    novel = nn.Sequential(
        nn.Conv2d(channels, 7, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, classes)
    )
    case = replace(case_of(data, "class:1"), unlearned=novel)
    outputs = ModelOutputs("a model", novel, EvaluationSets(case))
    assert outputs.features("forget").shape == (len(outputs.sets.images("forget")), 7)
