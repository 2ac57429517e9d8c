"""Callbacks: what the process that you started does while a run lasts, at each record, departure, checkpoint, figure.

>>> import paceline, paceline.datasets
>>> class Print(paceline.callbacks.Callback):
...     def on_record(self, record, run):
...         print(record.updates, "updates")
...         if record.updates == 4:
...             run.stop("four are enough")
>>> program = paceline.datasets.load_program("synthetic")
>>> run = paceline.train(program, engine="virtual", steps=100, evaluate_every=2, callbacks=[Print()])
0 updates
2 updates
4 updates
>>> run.summary["stopped"]
'four are enough'
"""

from paceline.callbacks.base import Callback, RunHandle
from paceline.callbacks.early_stopping import EarlyStopping
from paceline.callbacks.json_lines import JsonLines
from paceline.callbacks.mlflow import MLflow
from paceline.callbacks.tensorboard import TensorBoard
from paceline.callbacks.wandb import WandB

__all__ = ["Callback", "EarlyStopping", "JsonLines", "MLflow", "RunHandle", "TensorBoard", "WandB"]
