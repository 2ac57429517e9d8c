"""The README's table of what runs with what is what really ran."""

import json
import os
from pathlib import Path

import pytest

from paceline.engine.local.engine import LocalEngine
from paceline.engine.ray.engine import RayEngine
from tests.combinations import END, START, WORKERS, Cell, cells, table, tried
from tests.engine.distributed_cases import ended, torchrun
from tests.ranks import Play

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.timeout(900)
def test_the_table_is_what_ran(engine: LocalEngine, play: Play, tmp_path: Path) -> None:
    found = {cell: tried(cell, "virtual") for cell in cells("virtual")}
    found |= {cell: tried(cell, engine) for cell in cells("local")}
    found |= _on_ranks(play, tmp_path)
    with RayEngine() as ray:
        found |= {cell: tried(cell, ray) for cell in cells("ray")}
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    made = table(found)
    if os.environ.get("PACELINE_REWRITE_GOLDENS"):
        README.write_text(f"{before}{START}{made}{END}{after}", encoding="utf-8")
        return
    assert text == f"{before}{START}{made}{END}{after}"


def _on_ranks(play: Play, folder: Path) -> dict[Cell, str]:
    """The largest of them under torchrun itself."""
    found: dict[Cell, str] = {}
    script = Path(__file__).with_name("combinations_script.py")
    for ranks in sorted(set(WORKERS.values())):
        if ranks < max(WORKERS.values()):
            play(script, "distributed", size=ranks, folder=folder)
        else:
            process = torchrun(script, "distributed", ranks=ranks, folder=folder)
            said = ended(process, within_s=200.0)
            assert process.returncode == 0, said
        told = json.loads((folder / f"{ranks}.json").read_text(encoding="utf-8"))
        found |= {Cell(policy, form, engine): why for policy, form, engine, why in told}
    return found
