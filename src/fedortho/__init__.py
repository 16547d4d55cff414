"""FedOrtho: make trained convolutional networks forget a class, a client or samples, and measure how far they did.

Models and data in memory: `load_images`, `build_model`, `fit`, `forget`, `judge`. Run directories, as the command line
writes them: `train_run`, `federate_run`, `import_run`, `forget_run`, `rewind_run`, `judge_run`, `audit_run`, `compare`,
`tune`, `write_report`, `make_bundle`, `undo_run`; each takes a `Run` or its path, and a `ForgetRequest` or its text.
A Flower app of your own: `unlearning_app` and `retained` on a client, `Unlearner` on the server.
"""

from importlib.metadata import version

from fedortho.audits.judge import judge
from fedortho.audits.verdict import Verdict
from fedortho.data.images import Dataset, Images, images_from_tensors, make_dataset
from fedortho.data.listing import list_images
from fedortho.data.partition import partition
from fedortho.data.request import ForgetRequest
from fedortho.data.sources import load_images
from fedortho.errors import FedOrthoError
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.evidence.bundle import make_bundle
from fedortho.evidence.recheck import check_bundle
from fedortho.federated.own_app import Unlearner, retained, unlearning_app
from fedortho.methods import forget, make_method, plan
from fedortho.methods.method import ForgetResult
from fedortho.models.predictions import evaluate
from fedortho.models.zoo import build_model
from fedortho.reports.page import write_report
from fedortho.requests.checking import check
from fedortho.requests.comparing import compare
from fedortho.requests.federated_jobs import federate_run
from fedortho.requests.forgetting import forget_run
from fedortho.requests.judging import JudgeOptions, audit_run, judge_run
from fedortho.requests.qualifying import QualifyOptions, qualify_run
from fedortho.requests.rewind import rewind_run
from fedortho.requests.tuning import tune
from fedortho.requests.undoing import undo_run
from fedortho.runs.purge import purge_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.settings import FederateSettings, ImportSettings, TrainSettings
from fedortho.runs.training import import_run, train_run
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

__version__ = version("fedortho")

__all__ = [
    "Dataset",
    "FedOrthoError",
    "FederateSettings",
    "ForgetRequest",
    "ForgetResult",
    "Images",
    "ImportSettings",
    "JudgeOptions",
    "QualifyOptions",
    "Recipe",
    "Run",
    "TrainSettings",
    "Unlearner",
    "Verdict",
    "accuracies_of",
    "audit_run",
    "build_model",
    "check",
    "check_bundle",
    "compare",
    "evaluate",
    "federate_run",
    "fit",
    "forget",
    "forget_run",
    "images_from_tensors",
    "import_run",
    "judge",
    "judge_run",
    "list_images",
    "load_images",
    "make_bundle",
    "make_dataset",
    "make_method",
    "open_run",
    "partition",
    "plan",
    "purge_run",
    "qualify_run",
    "retained",
    "rewind_run",
    "train_run",
    "tune",
    "undo_run",
    "unlearning_app",
    "write_report",
]
