"""What the fork server of the tests imports beside what its engine asks for, so that no worker has to in every run.

Models are made here too, since transformers imports most of itself with the first.
"""

import importlib.util

from tests import combinations, zoo
from tests.engine import (
    distributed_cases,
    distributed_sharded_cases,
    hybrid_cases,
    pipeline_cases,
    replicated_cases,
    streamed_cases,
    tensor_cases,
)

MODULES = (
    combinations,
    distributed_cases,
    distributed_sharded_cases,
    hybrid_cases,
    pipeline_cases,
    replicated_cases,
    streamed_cases,
    tensor_cases,
)

if importlib.util.find_spec("transformers") is not None:
    for make in (zoo.gpt2, zoo.bert, zoo.vit, zoo.resnet):
        make().model()
