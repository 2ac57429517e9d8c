"""The command that predicts rows of a table."""

import csv
import io
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.plan.predict import OUTCOMES, Line, RowPredictor, blank, fits, main
from paceline.planner.calibration import rows
from paceline.planner.calibration.calibrate import MemoryPrediction
from paceline.planner.calibration.corrections import Case, Corrections
from paceline.planner.calibration.row_shapes import precision, shape
from paceline.planner.calibration.rows import GIB, PublishedRow, read
from tests.planner.published_rows import COLUMNS, grid, row, timed

ROOT = Path(__file__).parents[2] / "src"


def write(path: Path, rows: list[PublishedRow]) -> Path:
    """A CSV file with all columns of all rows."""
    columns = list(dict.fromkeys(column for each in rows for column in each.cells))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(each.cells for each in rows)
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Times and, of some, memory."""
    rows = timed(grid(), Corrections(host=1.3))
    told = [PublishedRow({**each.cells, "mem_gib": "12" if at % 4 == 0 else ""}) for at, each in enumerate(rows)]
    return write(tmp_path_factory.mktemp("rows") / "measured.csv", told)


STRANGE = [
    row("plain", model="gpt-12-1024", layers=12, hidden=1024, n_devices=8, dp=8, tp=1, pp=1, mbs=2, ga=4, gbs=64),
    PublishedRow({"row_id": "nothing"}),
    PublishedRow({"row_id": "parameters alone", "n_params": "7e9", "gbs": "64", "n_devices": "16"}),
    PublishedRow(
        {"row_id": "device of no family", "hw": "Abacus 2", "n_params": "7e9", "seq": "2048", "n_devices": "64"}
    ),
    PublishedRow(
        {"row_id": "mixture", "model": "Qwen9_30B_a3B", "hw": "DGX-B200", "n_devices": "8", "seq": "4096", "gbs": "512"}
    ),
    PublishedRow(
        {"row_id": "images", "model": "resnet50v1.5", "hw": "A100-80GB", "n_devices": "8", "precision": "tf32"}
    ),
    row("a new framework", framework="Later/9.9", layers=12, hidden=1024, n_devices=8, gbs=64, mbs="", zero=""),
    row("not divisible", layers=7, hidden=1000, heads=16, n_devices=8, tp=8, pp=3, gbs=3, mbs=2),
    row("experts", model="DeepSeekV3", n_devices=256, ep=32, tp=1, pp=2, vpp=8, gbs=4096, mbs=1, framework="NeMo"),
    row("context", layers=12, hidden=1024, n_devices=8, cp=8, dp=1, tp=1, pp=1, seq=262144, gbs=1, mbs=1, zero=3),
    row("strategy", layers=12, hidden=1024, n_devices=8, zero="hsdp"),
    row("precision", layers=12, hidden=1024, n_devices=8, precision="int4"),
    row("no devices", layers=12, hidden=1024),
    row("no words", layers=12, hidden=1024, n_devices=8, seq=""),
    row("no size", model="unet", n_devices=8),
    row("mixed up", hidden="1e300", layers=2, n_devices=8),
]
REASONS = {
    "nothing": "hw is blank, and peak_tflops is blank; write one of them",
    "parameters alone": "hw is blank",
    "device of no family": "hw = 'Abacus 2' has no data sheet here, and peak_tflops is blank; write one of them",
    "strategy": "zero = 'hsdp' is no number; write a number or leave it blank",
    "precision": "precision = 'int4' is not known; write fp32, tf32, bf16, fp16 or fp8",
    "no devices": "n_devices, dp, tp and pp are blank; write at least n_devices",
    "no words": "seq is blank; write how many words a sample has",
    "no size": "nothing says how large model 'unet' is; write n_params, or layers and hidden",
    "mixed up": "hidden = '1e300' is not from 0 to 1e+06",
}


@pytest.fixture(scope="module")
def written(measured: Path) -> dict[str, dict[str, str]]:
    """What the command writes of them."""
    asked = write(measured.parent / "asked.csv", STRANGE)
    command = [sys.executable, "-m", "paceline.plan.predict", str(asked), "--calibrate", str(measured)]
    found = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=100)
    assert (found.returncode, found.stderr) == (0, ""), found.stderr
    return {line["row_id"]: line for line in csv.DictReader(io.StringIO(found.stdout))}


def test_each_row_has_an_answer_in_its_order(written: dict[str, dict[str, str]]) -> None:
    assert list(written) == [each.name for each in STRANGE]
    assert set(written["plain"]) == {"row_id", "step_time_s", "mem_gib", "status", "reason"}


@pytest.mark.parametrize("name", [each.name for each in STRANGE])
def test_answers_are_numbers_above_0_or_a_reason(written: dict[str, dict[str, str]], name: str) -> None:
    line = written[name]
    reason = REASONS.get(name, "")
    assert line["reason"].startswith(f"row {name}: {reason}" if reason else "")
    if reason:
        assert (line["step_time_s"], line["mem_gib"], line["status"]) == ("", "", "")
        return
    assert line["reason"] == ""
    assert 0 < float(line["step_time_s"]) < 1e6
    assert 0 < float(line["mem_gib"]) < 1e6
    assert line["status"] in ("ok", "oom")


def test_outcomes_of_asked_rows_are_not_looked_at(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = PublishedRow({**STRANGE[0].cells, **dict.fromkeys(OUTCOMES, "1"), "status": "oom"})
    lines = []
    for table in ([STRANGE[0]], [told]):
        assert main([str(write(measured.parent / "one.csv", table)), "--calibrate", str(measured)]) == 0
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1]
    assert lines[0].endswith(",ok,\n")


def test_a_device_with_less_memory_than_is_needed_is_predicted(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [PublishedRow({**each.cells, "gpu_mem_gb": str(size)}) for size in (80, 2) for each in grid()[:4]]
    named = [PublishedRow({**each.cells, "row_id": str(at)}) for at, each in enumerate(rows)]
    assert main([str(write(measured.parent / "small.csv", named)), "--calibrate", str(measured)]) == 0
    status = [line.split(",")[3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert status == ["ok"] * 4 + ["oom"] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column row_id"),
        ("model\ngpt\n", "has no column row_id"),
        ("row_id,model\n,gpt\n", "has a row without row_id"),
        ("row_id\na\na\n", "has two rows a; write a name of its own"),
    ],
)
def test_files_that_are_refused(measured: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    path = measured.parent / "wrong.csv"
    path.write_text(text)
    assert main([str(path), "--calibrate", str(measured)]) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""


CELLS = ("", "0", "1", "3", "16", "0.5", "64", "4096", "fp8", "full", "A100", "?", "gpipe", "torchtitan (FSDP2)")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_cells_has_an_answer_or_a_reason(predicter: RowPredictor, data: st.DataObject) -> None:
    columns = data.draw(st.dictionaries(st.sampled_from(sorted(STRANGE[0].cells)), st.sampled_from(CELLS), max_size=4))
    asked = PublishedRow({**data.draw(st.sampled_from(STRANGE)).cells, **columns, "row_id": "a"})
    line = predicter.line(asked)
    if line.reason:
        assert line == Line("a", "", "", "", line.reason)
        assert line.reason.startswith("row a: ")
        return
    forecast = predicter.times.forecast(blank(asked))
    assert 0 < float(line.step_time_s) < inf
    assert 0 < float(line.mem_gib) < inf
    assert 0 < forecast.low_s < forecast.step_s < forecast.high_s


@pytest.fixture(scope="module")
def predicter(measured: Path) -> RowPredictor:
    return RowPredictor.of(read(measured))


def test_measured_rows_that_can_not_be_used_are_left_out(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = write(measured.parent / "asked-of-some.csv", [STRANGE[0]])
    odd = [
        PublishedRow({**each.cells, "row_id": f"odd {name}"}) for name, each in zip("ab", STRANGE[-6:-4], strict=True)
    ]
    mixed = write(measured.parent / "mixed.csv", [odd[0], *read(measured), odd[1]])
    lines = []
    for calibration in (measured, mixed):
        assert main([str(asked), "--calibrate", str(calibration)]) == 0
        lines.append(capsys.readouterr())
    assert lines[0].out == lines[1].out
    assert lines[0].err == ""
    assert [each[:20] for each in lines[1].err.splitlines()] == ["left out: row odd a:", "left out: row odd b:"]


def test_a_model_that_was_measured_needs_no_size() -> None:
    unet = [row(str(n), model="unet", layers="", hidden="", n_devices=n, dp=n, step_time_s=1 / n) for n in (1, 2, 4)]
    found = RowPredictor.of(unet)
    assert found.line(row("a", model="unet", layers="", hidden="", n_devices=8, dp=8)).reason == ""
    assert "how large" in found.line(row("b", model="resnest", layers="", hidden="", n_devices=8, dp=8)).reason


def test_a_calibration_without_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "empty.csv", grid()[:5])
    assert main([str(path), "--calibrate", str(path)]) == 2
    assert "0 rows have step_time_s" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.csv can't be read"):
        read(tmp_path / "none.csv")


def test_nothing_of_it_imports_torch() -> None:
    modules = "calibration.calibrate shapes.shape_file devices cluster_file cost"
    lines = ["import paceline.plan.predict", *(f"import paceline.planner.{name}" for name in modules.split())]
    lines += ["import sys", "sys.exit('torch' in sys.modules)"]
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert found.returncode == 0


# ---------------------------------------------------------------------------------------------- what columns leave open


def test_a_model_is_what_comes_nearest_to_its_parameters() -> None:
    columns = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 128256, "seq": 8192}
    found = shape(row("llama", n_params=8.03e9, **columns))
    assert found is not None
    assert (found.gated, found.tied, found.kv_heads, found.positions) == (True, False, 8, False)
    assert found.parameters == 8_030_261_248


def test_without_layers_it_has_megatrons_shape_of_so_many_parameters() -> None:
    found = shape(row("big", n_params=39e9, layers="", hidden="", heads=""))
    assert found is not None
    assert (found.layers, found.hidden, found.heads) == (48, 8192, 64)


@pytest.mark.parametrize("text", ["", " ", "nan", "NaN", "n/a"])
def test_what_tables_write_for_nothing_is_nothing(text: str) -> None:
    assert PublishedRow({"mbs": text}).number("mbs") is None
    assert PublishedRow({"recompute": text}).text("recompute") == ""


def test_replicas_count_devices_where_nobody_did() -> None:
    found = Case.of(row("a", layers=4, hidden=256, n_devices="", dp=4, tp=2, mbs=1, gbs=4))
    assert found is not None
    assert found.arrangement.workers == 8


def test_micro_batches_follow_from_the_batch() -> None:
    found = Case.of(row("a", layers=4, hidden=256, n_devices=4, dp=4, mbs=2, gbs=64))
    assert found is not None
    assert (found.arrangement.micro_batches, found.arrangement.samples) == (8, 64)


@pytest.mark.parametrize(
    ("gpu_mem_gb", "told", "recompute", "divided"),
    [
        # 1.3 · 10⁹ parameters: 20 GiB of states, and 15 GiB of activations if none are computed again.
        (80, {"zero": "0", "recompute": ""}, "none", 0),
        (30, {"zero": "0", "recompute": ""}, "full", 0),
        (80, {"zero": "", "recompute": "full"}, "full", 0),
        (20, {"zero": "", "recompute": "full"}, "full", 1),
        (20, {"zero": "0", "recompute": "full"}, "full", 0),
    ],
)
def test_what_is_open_is_the_least_that_fits(
    gpu_mem_gb: int, told: dict[str, str], recompute: str, divided: int
) -> None:
    sizes = {"mbs": 4, "n_devices": 8, "dp": 8, "gbs": 32, "layers": 24, "hidden": 2048}
    found = Case.of(row("a", gpu_mem_gb=gpu_mem_gb, **sizes, **told))
    assert found is not None
    assert (found.arrangement.recompute, found.arrangement.divided) == (recompute, divided)


def test_doubtful_rows_are_those_that_leave_a_pipeline_open() -> None:
    assert not row("a", pp=4, mbs=1).doubtful
    assert row("a", pp=4).doubtful
    assert row("a", n_devices=8).doubtful
    assert row("a", status="suspect").doubtful


def test_operations_of_a_model_are_what_other_rows_tell() -> None:
    told = PublishedRow({"model": "M", "n_devices": "2", "samples_per_s": "4", "tflops_per_dev": "1", "seq": "10"})
    assert rows.flops(PublishedRow({"model": "m", "seq": "20"}), rows.rates([told])) == 2e12 / 40 * 20


def test_a_device_of_80_gb_has_80_gib_and_one_that_is_not_told_all_that_it_may_have() -> None:
    assert fits(PublishedRow({"gpu_mem_gb": "80"}), MemoryPrediction(80 * GIB, 0, 0))
    assert not fits(PublishedRow({"gpu_mem_gb": "80"}), MemoryPrediction(80.1 * GIB, 0, 0))
    assert fits(PublishedRow({"hw": "A100"}), MemoryPrediction(85 * GIB, 75 * GIB, 0))
    assert not fits(PublishedRow({"hw": "A100"}), MemoryPrediction(95 * GIB, 81 * GIB, 0))


def test_precisions_are_known_by_part_of_their_names() -> None:
    assert precision(PublishedRow({"precision": "float8-rowwise"})) == "fp8-mixed"
    assert blank(PublishedRow(COLUMNS | {"row_id": "a", "step_time_s": "3"})).step_s is None
