"""Observations of clients, added up so that no single client decides: bounded by the model and by the other clients.

Bounded: a client whose sums no image can give is refused, and a mean with a norm above `FACTOR` times the median
client's (more for the few images of a small client) is clipped to that; honest clients are not affected. Trimmed:
of every value the share `TRIM` of clients at each end is left out, and no client weighs more than three times the
median client; the mean of the rest counts.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedortho.data.images import made_images
from fedortho.engines.answer import answer
from fedortho.engines.query import STATISTICS, Query
from fedortho.federated.messages import TaskInfo
from fedortho.federated.wire import BadReply, Observations, places_of
from fedortho.statistics.observe import Observation

logger = logging.getLogger(__name__)
Found = Sequence[Sequence[Observation | None]]
FACTOR = 4.0  # of the median client's mean
SPREAD = 3.0  # of the mean of one image around that of many; it falls with the root of their number
SAMPLE = 256  # clients whose median is taken; those with higher numbers are held against it one by one
TRIM, HEAVIEST = 0.25, 3.0
PLAIN = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.ReLU, nn.ReLU6, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
HARMLESS = (nn.Dropout, nn.Dropout2d, nn.Flatten, nn.Identity, nn.Sequential, nn.ModuleList)


def blank_observations(model: nn.Module, task: TaskInfo, queries: Sequence[Query]) -> list[list[Observation]]:
    """The observations of a client without images: the layers, labels and shapes that every reply must have."""
    no_images = made_images(torch.zeros(0, *task.shape), torch.zeros(0, dtype=torch.int64), task.names)
    return [answer(model, no_images, [no_images] * len(q.selections), q.statistic) for q in queries]


def add_observations(total: Observations, added: Found) -> list[list[Observation]]:
    """The sums with those of one more client, None adding nothing."""
    rows = zip(total, added, strict=True)
    return [[a if b is None else a + b for a, b in zip(row, new, strict=True)] for row, new in rows]


class Pool:
    """The observations of one exchange."""

    def __init__(
        self, how: str, blank: Observations, queries: Sequence[Query], model: nn.Module, task: TaskInfo
    ) -> None:
        self._how, self._queries, self._blank = how, queries, blank
        self._total: Observations = blank
        self._held: dict[int, Found] = {}
        self._medians: dict[tuple[int, int, str], float] | None = None
        self._limits = {} if how == "sum" else model_limits(model, task, queries)
        self.clients = 0
        self.apart: dict[int, float] = {}  # client → how much further it is from the median than the median client

    def add(self, client: int, found: Found) -> None:
        """Add the observations of one client; other layers or shapes, and what no image gives, are refused."""
        for number, (row, expected) in enumerate(zip(found, self._blank, strict=True)):
            for place, (each, blank) in enumerate(zip(row, expected, strict=True)):
                if each is not None and _shapes(each) != _shapes(blank):
                    raise BadReply(f"{number}.{place} has other layers, labels or shapes")
        for (number, place), limits in self._limits.items():
            _check_limits(found[number][place], limits, f"{number}.{place}")
        if self._how != "sum":
            _check_squares(found, self._queries)
        self.clients += 1
        if self._how == "sum":
            self._total = add_observations(self._total, found)
        elif self._how == "trimmed" or len(self._held) < SAMPLE:
            self._held[client] = found
        else:
            self._add_bounded(client, found)

    def total(self) -> list[list[Observation]]:
        """The sums over all clients."""
        self._find_apart()
        if self._how == "trimmed":
            return [[self._trimmed(n, place) for place in range(len(row))] for n, row in enumerate(self._blank)]
        for client, found in self._held.items():
            self._add_bounded(client, found)
        self._held = {}
        return [list(row) for row in self._total]

    def _add_bounded(self, client: int, found: Found) -> None:
        if self._medians is None:
            self._medians = self._find_medians()
        bounded = [
            [each and self._bounded(client, (n, p), each) for p, each in enumerate(row)] for n, row in enumerate(found)
        ]
        self._total = add_observations(self._total, bounded)

    def _bounded(self, client: int, at: tuple[int, int], observed: Observation) -> Observation:
        """The observation, scaled down if a mean of it is too long."""
        assert self._medians is not None
        share, factor = 1.0, FACTOR * (1 + SPREAD / max(observed.images, 1) ** 0.5)
        for key, value in _means(observed, self._queries[at[0]].statistic.kind).items():
            median, length = self._medians.get((*at, key), 0.0), float(value.norm())
            if median and length > factor * median:
                share = min(share, factor * median / length)
        if share == 1.0:
            return observed
        logger.warning("client %d: its sums are %.0f times the median's and were bounded", client, factor / share)
        return replace(observed, sums={key: value * share for key, value in observed.sums.items()})

    def _find_medians(self) -> dict[tuple[int, int, str], float]:
        """The median length of the clients' means, of every key of at least three clients."""
        lengths: dict[tuple[int, int, str], list[float]] = {}
        for found in self._held.values():
            for number, row in enumerate(found):
                for place, observed in enumerate(row):
                    for key, value in _means(observed, self._queries[number].statistic.kind).items():
                        lengths.setdefault((number, place, key), []).append(float(value.norm()))
        return {at: float(torch.tensor(each).median()) for at, each in lengths.items() if len(each) >= 3}

    def _find_apart(self) -> None:
        """How far each held client is from the median of all, in units of the median client's distance.

        Of a query it is the median over its selections and layers, so that one odd layer does not decide.
        """
        for number, query in enumerate(self._queries):
            ratios: dict[int, list[float]] = {}
            for place in range(len(self._blank[number])):
                given = {client: found[number][place] for client, found in self._held.items()}
                means = {c: _means(each) for c, each in given.items()}
                means = {client: each for client, each in means.items() if each}
                for key in next(iter(means.values()), {}) if len(means) >= 3 else ():
                    stacked = torch.stack([each[key].flatten() for each in means.values()])
                    distances = (stacked - stacked.median(0).values).norm(dim=1)
                    least = 0.3 if query.statistic.kind == "right" else 1e-9  # shares of few images are far apart
                    for client, ratio in zip(means, distances / distances.median().clamp_min(least), strict=True):
                        ratios.setdefault(client, []).append(float(ratio))
            for client, each in ratios.items():
                self.apart[client] = max(self.apart.get(client, 0.0), float(torch.tensor(each).median()))

    def _trimmed(self, number: int, place: int) -> Observation:
        blank = self._blank[number][place]
        given = [each for found in self._held.values() if (each := found[number][place]) is not None]
        if not given:
            return blank
        counts = torch.stack([each.counts for each in given]).double()  # on the CPU; (clients, labels)
        counts = torch.minimum(counts, HEAVIEST * _positive_median(counts))
        sums = {}
        for key in blank.sums:
            means = torch.stack([each.sums[key] / each.counts.clamp_min(1).unsqueeze(1) for each in given])
            sums[key] = _trimmed_means(means, counts) * counts.sum(0).unsqueeze(1)
            if self._queries[number].statistic.kind == "right":
                sums[key] = sums[key].round()
        return replace(blank, sums=sums, counts=counts.sum(0).long())


def _shapes(observed: Observation) -> dict[str, torch.Size]:
    return {"counts": observed.counts.shape, **{f"sums.{key}": value.shape for key, value in observed.sums.items()}}


def _positive_median(counts: Tensor) -> Tensor:
    """Of each label the median count of clients that have any, (labels,)."""
    columns = [column[column > 0] for column in counts.T]
    return torch.stack([column.median() if len(column) else column.new_zeros(()) for column in columns])


def _trimmed_means(means: Tensor, counts: Tensor) -> Tensor:
    """Weighted means, (labels, values), without the lowest and the highest clients of each value.

    >>> means, counts = torch.tensor([[[1.0]], [[2.0]], [[3.0]], [[99.0]]]), torch.ones(4, 1)
    >>> float(_trimmed_means(means, counts))
    2.5
    """
    rows = []
    for label in range(means.shape[1]):
        has = counts[:, label] > 0
        values, order = means[has, label].sort(0)
        weights = counts[has, label][order]
        cut = min(max(int(TRIM * len(values)), 1), (len(values) - 1) // 2) if len(values) else 0
        values, weights = values[cut : len(values) - cut], weights[cut : len(weights) - cut]
        rows.append((values * weights).sum(0) / weights.sum(0).clamp_min(1))
    return torch.stack(rows)


def _means(observed: Observation | None, kind: str = "") -> dict[str, Tensor]:
    """The means that are compared between clients for a statistic of this kind; without one, all of them."""
    if observed is None or not observed.images:
        return {}
    compared = STATISTICS[kind].compared if kind else "means"
    endings = {"means": "", "squares": ":square"}
    chosen = [key for key in observed.sums if compared in endings and key.endswith(endings[compared])]
    return {key: observed.sums[key].sum(0) / observed.images for key in chosen}


def _check_limits(observed: Observation | None, limits: dict[str, Tensor], at: str) -> None:
    for key, value in _means(observed).items():
        if key in limits and bool((value.abs() > limits[key]).any()):
            raise BadReply(f"{at}.sums.{key} is beyond what the model can produce")


def _check_squares(found: Found, queries: Sequence[Query]) -> None:
    """Refuse moments that no values have: the square of a mean is at most the mean of the squares."""
    for number, query in enumerate(queries):
        is_checked = STATISTICS[query.statistic.kind].compared == "squares"
        for place, observed in enumerate(found[number] if is_checked else ()):
            means = _means(observed)
            for key, square in means.items():
                first = key.removesuffix("square") + ("sum" if query.statistic.kind == "inputs" else "mean")
                rounding = 1e-3 * square.abs() + 1e-3
                if key.endswith(":square") and bool((means[first].square() > square + rounding).any()):
                    raise BadReply(f"{number}.{place}.sums.{key} is below the square of its mean")


def model_limits(
    model: nn.Module, task: TaskInfo, queries: Sequence[Query]
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """The largest peak that any image can give each kernel, by query, place and key; none for other statistics.

    With absolute weights and the largest absolute inputs a network of convolutions, batch norms, rectifiers and
    pooling bounds its own responses: |f(x)| ≤ f_abs(|x|) holds layer by layer. Other layers have no such bound.
    """
    if any(not isinstance(m, (*PLAIN, *HARMLESS)) and not list(m.children()) for m in model.modules()):
        return {}
    absolute = copy.deepcopy(model).cpu().eval()
    for module in absolute.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name != "num_batches_tracked":
                tensor.data = -tensor.abs() if name == "running_mean" else tensor.abs()
    largest = torch.tensor([max(abs(m), abs(1 - m)) / s for m, s in zip(task.mean, task.std, strict=True)])
    inputs = largest.view(1, -1, 1, 1).expand(1, *task.shape)
    image = made_images(inputs, torch.zeros(1, dtype=torch.int64), task.names)
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for number, query in enumerate(queries):
        if (kind := query.statistic.kind) in ("peaks", "averages", "difference"):
            measured, times = ("peaks", 2) if kind == "difference" else (kind, 1)
            (most,) = answer(absolute, image, [image], replace(query.statistic, kind=measured, by_label=False))
            limits = {key: times * (value.sum(0) * (1 + 1e-4) + 2.0**-15) for key, value in most.sums.items()}
            found |= {(number, place): limits for place in range(len(places_of(query)))}
    return found
