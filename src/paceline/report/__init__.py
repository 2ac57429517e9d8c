"""One self-contained HTML page about one or several runs."""

from paceline.report.page import write_report

__all__ = ["write_report"]
