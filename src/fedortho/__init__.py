"""FedOrtho: make trained convolutional networks forget a class, a client or samples, and prove it."""

from importlib.metadata import version

from fedortho.accuracies import Accuracies, accuracies_of
from fedortho.data import Dataset, Images, images_from_tensors, make_dataset
from fedortho.errors import FedOrthoError
from fedortho.methods import forget, preset
from fedortho.models import build_model
from fedortho.partition import partition
from fedortho.plan import ForgetSettings, plan_forgetting
from fedortho.recipe import Recipe
from fedortho.request import ForgetRequest
from fedortho.runs import Run, TrainSettings, open_run, train_run
from fedortho.scores import accuracy, evaluate
from fedortho.sources import load_images
from fedortho.train import fit
from fedortho.verify import Verdict, judge

__version__ = version("fedortho")

__all__ = [
    "Accuracies",
    "Dataset",
    "FedOrthoError",
    "ForgetRequest",
    "ForgetSettings",
    "Images",
    "Recipe",
    "Run",
    "TrainSettings",
    "Verdict",
    "accuracies_of",
    "accuracy",
    "build_model",
    "evaluate",
    "fit",
    "forget",
    "images_from_tensors",
    "judge",
    "load_images",
    "make_dataset",
    "open_run",
    "partition",
    "plan_forgetting",
    "preset",
    "train_run",
]
