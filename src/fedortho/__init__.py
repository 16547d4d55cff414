"""FedOrtho: make trained convolutional networks forget a class, a client or samples, and prove it."""

from importlib.metadata import version

from fedortho.data import Dataset, Images, images_from_tensors
from fedortho.errors import FedOrthoError
from fedortho.models import build_model
from fedortho.partition import partition
from fedortho.recipe import Recipe
from fedortho.runs import Run, TrainSettings, open_run, train_run
from fedortho.sources import load_images
from fedortho.train import accuracy, evaluate, fit

__version__ = version("fedortho")

__all__ = [
    "Dataset",
    "FedOrthoError",
    "Images",
    "Recipe",
    "Run",
    "TrainSettings",
    "accuracy",
    "build_model",
    "evaluate",
    "fit",
    "images_from_tensors",
    "load_images",
    "open_run",
    "partition",
    "train_run",
]
