"""The page's one style sheet."""

CSS = """
:root { --ink: #222; --soft: #5c5c5c; --line: #dcdcdc; --wash: #f6f7f8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 40px 28px 64px; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 30px 0 4px; }
section + section { margin-top: 60px; border-top: 1px solid var(--line); }
h3 { font-size: 16px; margin: 34px 0 6px; }
p { margin: 6px 0; max-width: 105ch; }
.soft, figcaption, caption { color: var(--soft); }
figcaption, caption { font-size: 13px; line-height: 1.45; text-align: left; max-width: 110ch; }
caption { caption-side: bottom; padding-top: 8px; }
code { font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 6px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; font-size: 13px; vertical-align: bottom; }
th.group { border-bottom: 0; padding-bottom: 0; text-align: center; }
thead tr:last-child th { font-weight: 400; color: var(--soft); border-bottom: 1.5px solid #999; }
td { font-size: 13.5px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; white-space: normal; }
.swatch { display: inline-block; width: 22px; height: 0; margin-right: 8px; vertical-align: middle;
  border-top: 4px solid; border-radius: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 26px; margin: 12px 0 4px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 26px 36px;
  margin: 14px 0 8px; }
figure { margin: 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif
  !important; }
.lane { margin: 16px 0 22px; }
ul { margin: 6px 0; padding-left: 20px; }
footer { margin-top: 56px; padding-top: 12px; border-top: 1px solid var(--line); color: var(--soft); font-size: 13px; }
@media print { body { padding: 0; max-width: none; font-size: 11pt; } h2, h3 { break-after: avoid; }
  .grid { grid-template-columns: 1fr 1fr; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
