"""The commands train and import."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedortho.cli.console import bar, bars, print_run, training_bar
from fedortho.cli.flags import Config, OutPath, TensorBoard, takes_settings
from fedortho.cli.tensorboard import tensorboard_watch
from fedortho.runs.settings import ImportSettings, TrainSettings
from fedortho.runs.training import import_run, train_run
from fedortho.storage.settings import make_settings, read_toml


@takes_settings(TrainSettings)
def train_command(
    out_path: OutPath,
    config: Config = None,
    tensorboard: TensorBoard = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a model with orthogonal kernels; an interrupted training continues where it stopped."""
    settings = make_settings(TrainSettings, read_toml(config) if config else {}, given)
    with bars() as shown, tensorboard_watch(tensorboard, out_path, settings, training_bar(shown)) as watch:
        observing = bar(shown, "writing the ledger")
        decoding = bar(shown, "decoding images")
        run = train_run(out_path, settings, watch=watch, progress=decoding, observing=observing)
    print_run(run)


@takes_settings(ImportSettings)
def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a safetensors file, or a .pt file with a state dict")],
    out_path: OutPath,
    *,
    given: dict[str, Any],
) -> None:
    """Make a run directory from weights that were trained elsewhere, and evaluate them."""
    settings = make_settings(ImportSettings, given)
    with bars() as shown:
        decoding, observing = bar(shown, "decoding images"), bar(shown, "writing the ledger")
        run = import_run(out_path, file, settings, progress=decoding, observing=observing)
    print_run(run)
