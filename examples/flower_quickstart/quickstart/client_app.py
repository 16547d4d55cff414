"""The client app of Flower's quickstart; the lines marked (+) make it forget."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

import fedortho as fo  # (+)
from quickstart import task

app = ClientApp()


def node_datasets(context: Context):
    """The training and the test images of this node."""
    return task.load_datasets(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = task.Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    trainset, _ = node_datasets(context)
    trainset = fo.retained(trainset, context)  # (+) without what this node has forgotten
    shuffle = torch.Generator().manual_seed(message.content["config"]["server-round"])
    loader = DataLoader(trainset, batch_size=context.run_config["batch-size"], shuffle=True, generator=shuffle)
    loss = task.train(model, loader, context.run_config["local-epochs"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    model = task.Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, testset = node_datasets(context)
    loss, accuracy = task.test(model, DataLoader(testset, batch_size=context.run_config["batch-size"]))
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


app = fo.unlearning_app(app, images=node_datasets, model=task.Net)  # (+)
