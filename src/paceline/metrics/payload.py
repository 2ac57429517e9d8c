"""How many bytes a step moves: the sources' formula."""


def step_payload_bytes(parameters: int, replicas: int, bytes_per_parameter: int = 4) -> int:
    """2·|A|·P·b: each of P replicas sends its Δ and receives A once a step.

    The sources' example, ResNet-50 with about 23M float32 parameters on 8 workers, about 1.47 GB a step:

    >>> step_payload_bytes(23_000_000, 8, 4)
    1472000000
    """
    return 2 * parameters * replicas * bytes_per_parameter
