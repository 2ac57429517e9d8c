"""The planner's benchmarks of messages, products and paces: from rows to pages, on rows whose answer is known."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.planner.shapes.gemm_time import Product, Products

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"

DEVICE = Products(1e14, 5e-6, 0.25, 132)


def put(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Messages that take 10 µs and 1 s a gigabyte, one of them 10 % longer; products by three constants."""
    sizes = [2**power for power in range(20, 31)]
    times = {size: round((1e-5 + size * 1e-9) * 1e9 * (1.1 if size == 2**24 else 1)) for size in sizes}
    put(
        tmp_path / "comm_allreduce_vtrain_pow2.csv",
        [
            {"gpu": gpu, "n_gpus": n, "size_bytes": size, "time_ns_out": took}
            for gpu, n in (("A100", 2), ("A100", 4), ("V100", 4), ("V100", 8))
            for size, took in times.items()
        ],
    )
    there = {"nodes": 1, "payload_bytes": 2e9, "duration_s": 4.0}
    put(tmp_path / "comm_measured_jeanzay.csv", [there])
    products = [Product(1, 128 * i, 256, 512 * (1 + i % 3)) for i in range(1, 40)]
    rows = [{**each._asdict(), "bf16_tflops_measured": each.flops / DEVICE.seconds(each) / 1e12} for each in products]
    put(tmp_path / "gemm_h100_bf16_xla.csv", rows)
    return tmp_path


def test_messages_and_products(load: Callable[[str], Any], published: Path) -> None:
    words = ["--data", str(published), "--out", str(published / "out")]
    assert load("messages").main(words) == 0
    text = (published / "out" / "messages.md").read_text(encoding="utf-8")
    assert "| A100 | 6 best knots, all sizes | 2 | 0.0% | 0.0% | 0.0% |" in text
    assert "| V100 | 2 knots, all sizes | 2 | 0.8% | 0.8% | 9.1% |" in text  # one of 11 sizes, 1 / 1.1 of what it took
    assert "| V100 | from another kind of host | 1 | 50% | 50% | 50% |" in text
    assert "| 3 constants, all products | 39 | 100 | 5.00 | 0.25 | 0.0% | 0.0% |" in text


def test_rows_that_are_not_there_are_asked_for(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("messages").main(["--data", str(tmp_path), "--out", str(tmp_path)]) != 0
    assert "write --data" in capsys.readouterr().err


def test_paces(load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("pace")
    monkeypatch.setattr(module, "KINDS", module.KINDS[:1])
    words = ["--updates", "400", "--out", str(tmp_path)]
    assert module.main(words) == 0
    sheet = tmp_path / "results" / "pace.csv"
    before = sheet.read_text(encoding="utf-8")
    assert len(before.splitlines()) == 1 + 14
    assert module.main(words) == 0
    assert sheet.read_text(encoding="utf-8") == before  # nothing was simulated again
    assert module.main(["--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "pace.md").read_text(encoding="utf-8")
    assert "8 replicas, 400 updates" in text
    assert "| `buffered:k=2` | exponential:mean=1 | 0.2679 |" in text


def test_no_page_of_nothing(load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("pace").main(["--page", "--out", str(tmp_path)]) != 0
    assert "leave out --page" in capsys.readouterr().err
