"""Rows that can't be used, each with its reason, so that one of them does not end a whole file.

A row is refused for a cell that has another kind of value than its column (``zero = hsdp``), a device without a data
sheet or ``peak_tflops``, a precision that has no name here, and for what no prediction follows from without guessing:
how many devices there are, how large the model is, how many words a sample of it has.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from paceline.core.errors import InputError
from paceline.planner.calibration import row_shapes, rows
from paceline.planner.calibration.rows import MOST, PublishedRow

# Columns with a number; outcomes too, as a calibration reads them.
NUMBERS = (*MOST, "n_params", "zero", "intra_bw_GBps", "inter_bw_GBps_per_dev", "step_time_s", "samples_per_s",
           "tflops_per_dev", "mem_gib")  # fmt: skip


def refuse_unreadable(row: PublishedRow) -> None:
    """Raise InputError if a row says something that is not understood: a number, its device, or its precision."""
    for column in NUMBERS:
        row.number(column)
    if not row.number("peak_tflops") and row_shapes.sheet_of(row) is None:
        said = f"hw = {row.text('hw')!r} has no data sheet here" if row.text("hw") else "hw is blank"
        raise InputError(f"row {row.name}: {said}, and peak_tflops is blank; write one of them.")
    text = row.text("precision")
    if text and not row_shapes.known_precision(row):
        raise InputError(f"row {row.name}: precision = {text!r} is not known; write fp32, tf32, bf16, fp16 or fp8.")


def refuse_unpredictable(row: PublishedRow, models: Collection[str]) -> None:
    """Raise InputError if a row can't be predicted without guessing its model or its devices.

    Args:
        row: the row.
        models: names in lower case of the models of which rows were measured: of these no size is needed.
    """
    refuse_unreadable(row)
    if not any(map(row.number, ("n_devices", "dp", "tp", "pp"))):
        raise InputError(f"row {row.name}: n_devices, dp, tp and pp are blank; write at least n_devices.")
    if row.model.lower() in models:
        return
    if not rows.sized(row) and row_shapes.shape(row) is None:
        raise InputError(
            f"row {row.name}: nothing says how large model {row.model!r} is; write n_params, or layers and hidden."
        )
    words = row.number("seq") or rows.of_images(row) or "bert" in row.model.lower()
    if not words:
        raise InputError(f"row {row.name}: seq is blank; write how many words a sample has.")


def usable(
    published: Iterable[PublishedRow], refuse: Callable[[PublishedRow], None] = refuse_unreadable
) -> tuple[Sequence[PublishedRow], Sequence[str]]:
    """Return the rows that are not refused, and the reasons why others are.

    >>> cells = {"hw": "A100", "n_devices": "8"}
    >>> found, reasons = usable([PublishedRow(cells | {"row_id": "a", "zero": zero}) for zero in ("3", "hsdp")])
    >>> [row.text("zero") for row in found], reasons
    (['3'], ["row a: zero = 'hsdp' is no number; write a number or leave it blank."])
    """
    found, reasons = list[PublishedRow](), list[str]()
    for row in published:
        try:
            refuse(row)
        except InputError as error:
            reasons.append(str(error))
        else:
            found.append(row)
    return found, reasons
