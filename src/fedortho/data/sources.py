"""Load datasets from Parquet files, image folders or the hub; decoded once, then memory-mapped from a cache."""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedortho.data.cache import cache_dir, cached, without_forgotten
from fedortho.data.decoding import (
    DECODER,
    SUFFIXES,
    TEST_SEED,
    TEST_SHARE,
    THREADS,
    DecodedImages,
    Report,
    SplitFiles,
    decode_files,
    decode_rows,
    split_of,
)
from fedortho.data.images import Dataset, Images, RowIds, channel_statistics, split_stratified
from fedortho.data.preprocessing import Preprocessing
from fedortho.errors import BadData, BadSetting, FedOrthoError, UnknownName, first_line, unknown
from fedortho.storage.files import file_digest, replacing, tensors_digest

logger = logging.getLogger(__name__)
LARGEST = 4096  # pixels of a side that images are resized to
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # how Python spells the bytes of such names


@dataclass(frozen=True)
class Source:
    """A dataset known by name: part of the package (`asset`, `build`), or read from `folders` or the `hub`."""

    licence: str
    image: str = ""  # names of the columns; empty: the usual names are tried
    label: str = ""
    hub: str = ""
    folders: tuple[str, ...] = ()
    asset: str = ""
    build: Callable[[int], DecodedImages] | None = None


def load_images(
    name: Path | str,
    data_dir: Path | str | None = None,
    *,
    valid: float | Path | str = 0.1,
    valid_from_test: float = 0.0,
    seed: int = 0,
    size: int = 0,
    preprocessing: Preprocessing | None = None,
    names: Sequence[str] = (),
    new_images: Sequence[str] = (),
    forgotten: bool = False,
    progress: Report | None = None,
) -> Dataset:
    """A dataset of `DATASETS`, or the Parquet file, directory of Parquet files or image folder at the path `name`.

    The validation set is a share `valid` of the training split, the images at the path `valid`, or a share
    `valid_from_test` of the test split, which loses it. A row id is the row in the source's file; rows of several files
    are numbered on. Channel statistics of the training split normalise all three sets, unless `preprocessing` says
    otherwise. `size` resizes every image to a square. Classes are numbered in the order of `names`, whether they have
    images or not, then as in the source. `new_images` are paths of further training images of these classes: their rows
    follow those of the source, whose statistics and validation set stay. Training and validation images that were
    forgotten and purged are left out, unless `forgotten`.
    """
    if not 0 <= size <= LARGEST:
        raise BadSetting(f"image-size must be 0 (unchanged) or at most {LARGEST} pixels, not {size}")
    name = str(name)
    source = DATASETS.get(name)
    if source and source.build:
        store, test = source.build(size), None
    else:
        try:
            splits = _locate(name, source, None if data_dir is None else Path(data_dir).expanduser())
        except OSError as error:  # such as a device, or a directory without permission
            raise BadData(f"{error.filename} cannot be read: {error.strerror}") from error
        store = _load_decoded(splits[0], size, progress)
        test = _load_decoded(splits[1], size, progress) if len(splits) > 1 else None
    if store.test_from_train:
        logger.info("%s has no test split: %.0f %% of each class is used as one", name, 100 * TEST_SHARE)
    if not len(store.train):
        raise BadData(f"{name}: the training split is empty")
    found = store.names or tuple(map(str, range(int(store.labels[store.train].max()) + 1)))
    classes = (*names, *(each for each in found if each not in names)) if names else found
    labels = _renumbered(store.labels, found, classes)
    whole = Images(store.pixels, labels, store.train, classes, store.mean, store.std, store.ids)
    whole = whole.preprocessed(preprocessing or Preprocessing())
    tested = _test_images(name, whole, store, test or store)
    digest = store.digest if test is None else _joined([store.digest, test.digest])
    if valid_from_test:
        kept, aside = split_stratified(tested.labels, valid_from_test, seed)
        data = Dataset(name, whole, tested.subset(aside).apart_from(whole), tested.subset(kept), digest)
    elif not isinstance(valid, float | int):
        own = _load_whole(str(valid), size, progress)
        held_out = _test_images(str(valid), whole, store, own).apart_from(whole)
        data = Dataset(name, whole, held_out, tested, digest, valid_digest=own.digest)
    else:
        train_rows, valid_rows = split_stratified(whole.labels, valid, seed)
        data = Dataset(name, whole.subset(train_rows), whole.subset(valid_rows), tested, digest)
    for path in new_images:
        own = _load_whole(path, size, progress)
        data = _extended(data, _test_images(path, whole, store, own, "new images"), own.digest)
    return data if forgotten else without_forgotten(data)


def _load_whole(path: str, size: int, progress: Report | None) -> DecodedImages:
    """All images of a folder or file without splits, as its test split."""
    splits = _locate(str(Path(path).expanduser()), None, None)
    if len(splits) > 1:
        raise BadData(f"{path} has splits of its own; give the folder or file of one of them")
    own = _load_decoded(splits[0], size, progress)
    return replace(own, test=torch.arange(len(own.labels)))


def _extended(data: Dataset, new: Images, digest: str) -> Dataset:
    """The dataset with further training images, whose rows follow those of its store; names are as seen from it."""
    train, ids, more = data.train, data.train.ids, new.ids
    assert ids is not None, "data that is loaded by name has digests"
    assert more is not None, "data that is loaded by name has digests"
    before, root = len(train.store_labels), os.path.abspath(ids.root)
    named = [os.path.relpath(os.path.join(os.path.abspath(more.root), file), root) for file in more.files]
    known = ids.files or ("",) * before
    files = (*known, *(named or [""] * len(new))) if ids.files or named else ()
    train = replace(
        train,
        pixels=torch.cat([train.pixels, new.pixels]),
        store_labels=torch.cat([train.store_labels, new.store_labels]),
        rows=torch.cat([train.rows, new.rows + before]),
        ids=replace(ids, digests=torch.cat([ids.digests, more.digests]), files=files),
    )
    valid = replace(train, rows=data.valid.rows) if data.is_one_store else data.valid
    return replace(data, train=train, valid=valid, digest=_joined([data.digest, digest]))


def _test_images(
    name: str, whole: Images, train: DecodedImages, test: DecodedImages, what: str = "test split"
) -> Images:
    """Images beside the training split, with its class numbers, channels and statistics."""
    if not len(test.test):
        raise BadData(f"{name}: the {what} is empty")
    pixels, labels, ids = test.pixels, test.labels, test.ids
    if train.names and test.names:  # the same classes may have other numbers
        labels = _renumbered(labels, test.names, whole.names)
    foreign = test.labels[test.test][labels[test.test] >= whole.classes].tolist()
    if foreign:
        word = repr(test.names[foreign[0]]) if test.names else foreign[0]
        known = f"the {whole.classes} classes of the training split"
        raise BadData(f"{name}: class {word} of the {what} is not among {known}")
    if test.pixels.shape[1] == 1:
        pixels = pixels.expand(-1, whole.pixels.shape[1], -1, -1)  # a view: grey images among coloured ones
    if pixels.shape[1:] != whole.pixels.shape[1:]:
        of_train, of_test = ("x".join(map(str, each.shape[1:])) for each in (whole.pixels, pixels))
        advice = "save both alike, or pass --image-size N if only the size differs"
        raise BadData(f"{name}: training images are {of_train}, test images {of_test}; {advice}")
    if test is train:  # one source: training rows keep their numbers, the test set gets its own tensors
        pixels, labels, ids = pixels[test.test], labels[test.test], ids.subset(test.test)
    return replace(whole, pixels=pixels, store_labels=labels, rows=torch.arange(len(labels)), ids=ids)


def _renumbered(labels: Tensor, names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Labels by the place of their names among `classes`; one more than there are for other names."""
    if tuple(classes[: len(names)]) == tuple(names):
        return labels
    number = {known: label for label, known in enumerate(classes)}
    return torch.tensor([number.get(name, len(classes)) for name in names])[labels]


def _locate(name: str, source: Source | None, data_dir: Path | None) -> tuple[SplitFiles, ...]:
    if source is None:
        path = Path(name).expanduser()
        if not path.exists():
            is_path = "/" in name or os.sep in name or name.startswith((".", "~")) or name.endswith(".parquet")
            hint = f", or give a path: there is no file or directory {path}" if is_path else ""
            raise UnknownName(f"{unknown('dataset', name, DATASETS)}{hint}")
        return (SplitFiles((path,)),) if path.is_file() else _split_files(path)
    if source.asset:
        return (SplitFiles((Path(__file__).parent / source.asset,), image=source.image, label=source.label),)
    directory = _from_hub(name, source) if data_dir is None else _within(name, source, data_dir)
    return tuple(replace(split, image=source.image, label=source.label) for split in _split_files(directory))


def _within(name: str, source: Source, data_dir: Path) -> Path:
    """The dataset's folder in `data_dir`, or `data_dir` itself if that has the dataset's name."""
    choices = [data_dir / folder for folder in source.folders]
    choices += [data_dir] * (data_dir.resolve().name in source.folders)
    if found := next((directory for directory in choices if directory.is_dir()), None):
        return found
    wanted = f"{source.folders[0]}/train*.parquet (or leave it out to fetch {source.hub} from the hub)"
    raise BadData(f"{name}: there is no directory {' or '.join(map(str, choices))}; --data-dir must hold {wanted}")


def _split_files(directory: Path) -> tuple[SplitFiles, ...]:
    """The files of the training and the test split of a directory, or all files if it has no splits."""
    found = _parquet_splits(directory) or _folder_splits(directory)
    if not found:
        what = f"{directory} holds neither Parquet files nor images in CLASS/*.png or train/CLASS/*.png"
        raise BadData(f"{what}; put the images of each class into a folder of its own ({', '.join(sorted(SUFFIXES))})")
    if set(found) == {""}:
        return (found[""],)
    if "train" not in found:
        names = ", ".join(file.name for split in found.values() for file in split.files)
        raise BadData(f"{directory} has no training split: looked for train*.parquet, found {names}")
    test = found.get("test") or found.get("valid")
    unused = [role or "unnamed" for role in found if found[role] not in (found["train"], test)]
    if unused:
        logger.info("%s: these splits are not used: %s", directory, ", ".join(unused))
    return (replace(found["train"], role="train"), replace(test, role="test")) if test else (found["train"],)


def _parquet_splits(directory: Path) -> dict[str, SplitFiles]:
    splits: dict[str, list[Path]] = {}
    for file in sorted(directory.glob("*.parquet")) or sorted(directory.glob("*/*.parquet")):
        parts = reversed(file.relative_to(directory).parts)  # the file's own name first, then its folder's
        splits.setdefault(next(filter(None, map(split_of, parts)), ""), []).append(file)
    return {role: SplitFiles(tuple(files)) for role, files in splits.items()}


def _folder_splits(directory: Path) -> dict[str, SplitFiles]:
    """The splits of an image folder; a split contains class folders, so a class may be named `train`."""
    named = [(split_of(child.name), child) for child in _subfolders(directory) if _subfolders(child)]
    folders = dict(named) if "train" in dict(named) else {"": directory}
    for role in ("train", "test" if "test" in folders else "valid"):
        if len(same := [child.name for split, child in named if split == role and role in folders]) > 1:
            raise BadData(f"{directory}: {' and '.join(same)} are both the {role} split; rename or move one of them")
    splits = {}
    for role, folder in folders.items():
        found = [(file, child.name) for child in _subfolders(folder) for file in sorted(child.rglob("*"))]
        files = [(f, name) for f, name in found if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")]
        if odd := [file for file, _ in files if NOT_UTF8.search(str(file))]:
            raise BadData(f"{str(odd[0])!a} is a name that is not UTF-8; rename it")
        if files and (role or folder is directory):  # beside train and test, folders with other names are ignored
            names = tuple(name for _, name in files)
            splits[role] = SplitFiles(tuple(file for file, _ in files), folders=names, root=directory)
    return splits


def _subfolders(directory: Path) -> list[Path]:
    return [child for child in sorted(directory.iterdir()) if child.is_dir() and not child.name.startswith(".")]


def _from_hub(name: str, source: Source) -> Path:
    """Download a dataset once as Parquet files into the cache."""
    directory = cache_dir() / "hub" / name
    if (directory / "train.parquet").is_file():
        return directory
    try:
        import datasets
    except ImportError as error:
        ways = f"{source.folders[0]}/train*.parquet, or fetch it from the hub after: pip install 'fedortho[hub]'"
        raise BadData(f"{name} is not part of the package: pass --data-dir DIR with {ways}") from error
    try:
        splits = dict(datasets.load_dataset(source.hub))
    except Exception as error:  # the hub's errors come from four libraries and share no base class
        why = f"({first_line(error)}); check the network or pass --data-dir DIR"
        raise BadData(f"{source.hub} could not be fetched from the hub {why}") from error
    try:
        for split in sorted(splits, key="train".__eq__):  # train last: its file marks a complete download
            with replacing(directory / f"{split}.parquet") as temporary:
                splits[split].to_parquet(temporary)
    except FedOrthoError as error:
        raise BadData(f"{directory} cannot be written ({error}); set FEDORTHO_CACHE to a writable directory") from error
    return directory


def _load_decoded(files: SplitFiles, size: int, progress: Report | None) -> DecodedImages:
    """The decoded images of these files, with those that were forgotten and purged from the cache."""
    with ThreadPoolExecutor(THREADS) as pool:
        digest = _joined([*pool.map(partial(file_digest, kind=BadData), files.files), *files.folders])
    key = _joined([digest, str(DECODER), str(size), files.role, files.image, files.label])
    store = cached(key, lambda: decode_files(files, size, digest, progress))
    purged = (store.labels < 0).nonzero().flatten()
    if len(purged):
        store.pixels[purged], store.labels[purged] = decode_rows(files, size, purged)
    root = str(files.root)  # names are not part of the digest: the same images may have others now
    names = tuple(str(file)[len(root) + 1 :] for file in files.files) if files.folders else store.ids.files
    return replace(store, ids=replace(store.ids, files=names, root=root))


def _joined(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _digits_table() -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The 64 pixels and the label of each digit, of scikit-learn's file: importing scikit-learn takes a second."""
    spec = find_spec("sklearn")
    for place in (spec and spec.submodule_search_locations) or ():
        if (file := Path(place, "datasets", "data", "digits.csv.gz")).is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))


@cache  # they are read-only, as memory-mapped images are
def _digits(size: int) -> DecodedImages:
    """Scikit-learn's 1,797 digits of 8x8 pixels in 17 shades; a fifth is the test split."""
    table = torch.from_numpy(_digits_table())
    pixels, labels = table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16), table[:, -1].to(torch.int64)
    if size:
        pixels = torch.nn.functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    pixels = pixels.round().to(torch.uint8)
    train, test = split_stratified(labels, TEST_SHARE, TEST_SEED)
    mean, std = channel_statistics(pixels[train])
    digest = tensors_digest({"pixels": pixels, "labels": labels})
    rows = [list(hashlib.sha256(image.numpy().tobytes()).digest()) for image in pixels]
    names, ids = tuple("0123456789"), RowIds(torch.tensor(rows, dtype=torch.uint8))
    return DecodedImages(pixels, labels, train, test, False, names, mean, std, digest, ids)


_TINY = "ImageNet's terms: non-commercial research and education"
_CIFAR = "no licence stated; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"

DATASETS: dict[str, Source] = {
    "fashion-mini": Source("MIT, Zalando SE", "image", "label", asset="fashion-mini/fashion-mini.parquet"),
    "digits": Source("CC BY 4.0, UCI Optical Recognition of Handwritten Digits", build=_digits),
    "cifar10": Source(_CIFAR, "img", "label", "uoft-cs/cifar10", ("cifar10",)),
    "cifar100": Source(_CIFAR, "img", "fine_label", "uoft-cs/cifar100", ("cifar100",)),
    "tiny-imagenet": Source(_TINY, "image", "label", "zh-plus/tiny-imagenet", ("tiny-imagenet", "tinyimagenet20")),
    "fashion-mnist": Source("MIT, Zalando SE", "image", "label", "zalando-datasets/fashion_mnist", ("fashion-mnist",)),
}
