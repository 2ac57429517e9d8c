"""How many bytes a step moves: the formulas of the sources, to lay beside what was measured."""


def step_payload_bytes(parameters: int, replicas: int, bytes_per_parameter: int = 4) -> int:
    """2·|A|·P·b, in all: each of P replicas sends its Δ to a parameter server and receives A once a step.

    Args:
        parameters: |A|, how many there are.
        replicas: P.
        bytes_per_parameter: b; 2 where gradients and parameters travel in 16 bits.

    The sources' example, ResNet-50 with about 23M float32 parameters on 8 workers, about 1.47 GB a step:

    >>> step_payload_bytes(23_000_000, 8, 4)
    1472000000
    """
    return 2 * parameters * replicas * bytes_per_parameter


def ring_payload_bytes(parameters: int, replicas: int, bytes_per_parameter: int = 4) -> int:
    """2·(P−1)/P·|A|·b, per rank: what each of P ranks sends in a ring all-reduce of its Δ; rounded up.

    Each slice of 1/P leaves a rank P-1 times on the way to its sum and P-1 times on the way of that to all. It stays
    below 2·|A|·b however many ranks there are, where a parameter server's one host carries P times that. With the
    ResNet-50 of the sources' example:

    >>> ring_payload_bytes(23_000_000, 8, 4), ring_payload_bytes(23_000_000, 8, 2)
    (161000000, 80500000)
    """
    return -(-2 * (replicas - 1) * parameters * bytes_per_parameter // replicas)
