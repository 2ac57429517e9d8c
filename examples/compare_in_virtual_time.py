"""Twenty-five unequal workers on one core: three policies compared in virtual time.

Change ``TIMES`` to see when Smooth Switch pays and when it does not: here an update occupies the server for 8 ms
however many gradients it combines.
"""

from paceline import compare
from paceline.datasets import load_program

STRATEGIES = (
    "replicas=25",
    "replicas=25 aggregation=asynchronous",
    "replicas=25 aggregation=smooth-switch:every=200",
)
TIMES = "compute=0.01 apply=0.008"

program = load_program("synthetic", data=None, seed=0, batch_size=32)
comparison = compare(
    program,
    STRATEGIES,
    engine="virtual",
    seconds=5,
    times=TIMES,
    delay="fraction=0.5 normal:mean=0,std=0.25",
    progress=False,
)
print(comparison.table(baseline=STRATEGIES[1]))
