"""What ``train`` prints for people."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.metrics.efficiency import verdict

if TYPE_CHECKING:
    from paceline.run import Run

ROWS = (
    ("test accuracy", "test_accuracy", "{:.2%}"),
    ("test loss", "test_loss", "{:.4f}"),
    ("training loss", "train_loss", "{:.4f}"),
    ("updates of A", "updates", "{:,}"),
    ("gradients", "gradients", "{:,}"),
    ("  discarded", "discarded", "{:,}"),
    ("mean staleness", "staleness_mean", "{:.2f}"),
    ("largest staleness", "staleness_max", "{:,}"),
    ("pipeline utilisation", "pipeline_utilisation", "{:.1%}"),
    ("bubble", "bubble", "{:.1%}"),
    ("samples/s", "samples_per_s", "{:,.0f}"),
    ("noise scale, samples", "noise_scale_mean", "{:,.0f}"),
    ("  standard error", "noise_scale_error", "{:.1%}"),
    ("efficiency", "efficiency", "{:.1%}"),
    ("goodput, samples/s", "goodput_samples_per_s", "{:,.0f}"),
    ("updates/s", "updates_per_s", "{:,.0f}"),
)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and figure of all that was measured.

    >>> summary_rows({"test_accuracy": 0.9731, "updates": 12000, "test_loss": None})
    [('test accuracy', '97.31%'), ('updates of A', '12,000')]
    """
    return [(label, form.format(summary[key])) for label, key, form in ROWS if summary.get(key) is not None]


def print_summary(run: "Run") -> None:
    """The run in one short table on stdout, and the replicas that left it early."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for label, figure in summary_rows(run.summary):
        table.add_row(label, figure)
    console = Console()
    # As Text: square brackets in a strategy are no markup.
    console.print(Text(str(run.strategy), style="bold"), soft_wrap=True)
    console.print(table)
    if said := verdict(run.summary):
        console.print(Text(said), soft_wrap=True)
    for departure in run.left:
        line = f"replica {departure.replica} left at {departure.time_s:.1f} s: {departure.reason}"
        console.print(Text(line, style="yellow"), soft_wrap=True)
