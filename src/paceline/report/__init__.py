"""One self-contained HTML page about one or several runs."""

from paceline.run import require_package

require_package("matplotlib", "a report", extra="plots")

from paceline.report.page import write_report  # noqa: E402 (where matplotlib is absent, it says what to install)

__all__ = ["write_report"]
