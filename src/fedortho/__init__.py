"""FedOrtho: make trained convolutional networks forget a class, a client or samples, and prove it."""

from importlib.metadata import version

from fedortho.audits.judge import judge
from fedortho.audits.verdict import Verdict
from fedortho.data.images import Dataset, Images, images_from_tensors, make_dataset
from fedortho.data.partition import partition
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.methods import ForgetResult, Method, find_method, forget, known_methods, make_method, plan, unlearn
from fedortho.models.predictions import accuracy, evaluate
from fedortho.models.zoo import build_model
from fedortho.runs.record import Accuracies
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import TrainSettings
from fedortho.runs.training import train_run
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe
from fedortho.unlearning.plan import ForgetPlan

__version__ = version("fedortho")

__all__ = [
    "Accuracies",
    "Dataset",
    "FedOrthoError",
    "ForgetPlan",
    "ForgetRequest",
    "ForgetResult",
    "Images",
    "Method",
    "Recipe",
    "Run",
    "TrainSettings",
    "Verdict",
    "accuracies_of",
    "accuracy",
    "build_model",
    "evaluate",
    "find_method",
    "fit",
    "forget",
    "images_from_tensors",
    "judge",
    "known_methods",
    "load_images",
    "make_dataset",
    "make_method",
    "open_run",
    "partition",
    "plan",
    "train_run",
    "unlearn",
]
