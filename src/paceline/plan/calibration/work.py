"""Operations of models that have no shape: mixtures of experts by name, convolutions, or what other rows tell.

A model's operations for a sample follow from the first of these that there is:

1. rows that tell operations and samples in a second of a model of this name;
2. 6 operations for each active parameter and word (2001.08361, section 2.1): "Qwen3_30B_a3B" has 3 · 10⁹ active ones;
3. what is published of it, below.
"""

import re
from collections.abc import Iterable, Mapping
from statistics import median

from paceline.plan.calibration.rows import Row

ACTIVE: Mapping[str, float] = {
    "deepseekv3": 37e9,
    "kimi_k2": 32e9,
    "gpt oss 120b": 5.1e9,
    "gpt oss 20b": 3.6e9,
    "nemotron_3_nano": 3.2e9,
    "nemotron_3_super": 12e9,
    "mixtral_8x7b": 12.9e9,
    "mixtral_8x22b": 39e9,
}
"""Active parameters, by the models' own reports: DeepSeek-V3 (2412.19437), Mixtral (2401.04088) and the cards of the
others, rounded; only where no row tells more."""

FORWARD: Mapping[str, float] = {"resnet50": 7.6e9, "resnet101": 15.2e9, "resnet152": 22.6e9}
"""Forward of an image of 224 × 224: table 1 of 1512.03385, a product and a sum each."""

UNKNOWN_PARAMETERS = 1e9


def rates(rows: Iterable[Row]) -> dict[str, float]:
    """Model -> operations of a word, or of a sample where samples have no words, as rows tell them.

    >>> told = {"model": "M", "n_devices": "8", "samples_per_s": "4", "tflops_per_dev": "100", "seq": "1000"}
    >>> rates([Row(told)])
    {'m': 200000000000.0}
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        operations, samples = row.number("tflops_per_dev"), row.number("samples_per_s")
        if operations and samples:
            words = samples * row.whole("seq", 1)
            found.setdefault(row.model.lower(), []).append(operations * 1e12 * row.whole("n_devices", 1) / words)
    return {model: median(many) for model, many in found.items()}


def flops(row: Row, told: Mapping[str, float]) -> float:
    """Of one sample, forward and backward; at worst as of a model of 10⁹ parameters."""
    words = row.whole("seq", 1)
    if row.model.lower() in told:
        return told[row.model.lower()] * words
    for name, forward in FORWARD.items():
        if name in row.model.lower():
            return 3 * forward
    return 6 * active(row) * words


def active(row: Row) -> float:
    """Parameters that a word goes through.

    >>> names = ("Qwen3_30B_a3B", "DeepSeekV3 (w/o MTP)", "Nemotron-340B", "gpt-350m")
    >>> [active(Row({"model": name})) for name in names]
    [3000000000.0, 37000000000.0, 340000000000.0, 350000000.0]
    """
    for name, many in ACTIVE.items():
        if name in row.model.lower():
            return many
    mixture = re.search(r"a(\d+(?:\.\d+)?)b", row.model.lower())
    return float(mixture.group(1)) * 1e9 if mixture else whole(row)


def sized(row: Row) -> bool:
    """Whether anything says how large a model is.

    >>> [sized(Row({"model": name})) for name in ("gpt-350m", "DeepSeekV3", "resnet50", "Abacus")]
    [True, True, True, False]
    """
    name = row.model.lower()
    named = any(each in name for each in (*ACTIVE, *FORWARD))
    return named or bool(row.number("n_params") or _written(name))


def hidden(row: Row) -> float:
    """As told, or of a transformer with a hundredth as many layers, 12 layers · hidden² parameters.

    >>> hidden(Row({"hidden": "4096"})), round(hidden(Row({"n_params": "8.05e9"})))
    (4096.0, 4063)
    """
    return float(row.whole("hidden", 0)) or (100 * active(row) / 12) ** (1 / 3)


def dense(row: Row) -> float | None:
    """Parameters that a name tells, all of which each word goes through; None: it has experts, or tells no size.

    >>> names = ("Nemotron-340B", "Qwen3_30B_a3B", "Mixtral 8x7B", "DeepSeekV3", "resnet50")
    >>> [dense(Row({"model": name})) for name in names]
    [340000000000.0, None, None, None, None]
    """
    name = row.model.lower()
    experts = row.whole("ep", 1) > 1 or re.search(_EXPERTS, name) or any(each in name for each in ACTIVE)
    return None if experts else _written(name)


_EXPERTS = r"a\d+(\.\d+)?b|\d+x\d+|\d+e(?![a-z0-9])|moe"


def whole(row: Row) -> float:
    """All parameters, as told or as the model's name says.

    >>> [whole(Row({"model": name})) for name in ("Qwen3_30B_a3B", "gpt-350m", "resnet")]
    [30000000000.0, 350000000.0, 1000000000.0]
    """
    return row.number("n_params") or _written(row.model.lower()) or UNKNOWN_PARAMETERS


def _written(name: str) -> float | None:
    found = re.search(r"(\d+(?:\.\d+)?)([bmt])(?![a-z0-9])", name)
    return float(found.group(1)) * {"m": 1e6, "b": 1e9, "t": 1e12}[found.group(2)] if found else None
