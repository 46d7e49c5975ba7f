"""The page's style sheet. No external resources; light and dark by the reader's preference."""

from __future__ import annotations

from collections.abc import Iterable

from sweeps.reports.drawing import INK, MUTED, PAPER, RULE
from sweeps.reports.style import Look

_LIGHT = {"ink": INK, "muted": MUTED, "rule": RULE, "paper": PAPER, "wash": "#f5f3ec"}
_LIGHT |= {"good": "#0b6e4f", "bad": "#a8321e", "warn": "#8a5a00", "warn-wash": "#fdf3da"}
_DARK = {"ink": "#e9e7e1", "muted": "#9a9ca3", "rule": "#34363b", "paper": "#15161a", "wash": "#1e2025"}
_DARK |= {"good": "#4fc79a", "bad": "#f08a76", "warn": "#e7b75a", "warn-wash": "#2b2416"}

_CSS = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 var(--sans);font-variant-numeric:tabular-nums}
main{max-width:1200px;margin:0 auto;padding:72px 32px 96px}
h1,h2{font-family:var(--serif);font-weight:500;letter-spacing:-.012em;text-wrap:balance}
h1{font-size:clamp(2rem,4.6vw,3.1rem);line-height:1.1;margin:0 0 .5em;max-width:21em}
h2{font-size:1.62rem;line-height:1.2;margin:0 0 .35em}
h3{font-size:.98rem;font-weight:600;margin:0 0 .15em}
p{margin:0 0 1em;max-width:46em}
a{color:inherit}
code,.hash{font:.92em/1.4 var(--mono)}
section{margin-top:76px}
.kicker{font-size:.8rem;letter-spacing:.09em;text-transform:uppercase;color:var(--muted);margin:0 0 1.4em}
.kicker b{color:var(--ink);letter-spacing:.02em;text-transform:none;font-size:.98rem;margin-right:.75em}
.lead{font-size:1.16rem;line-height:1.5;max-width:40em}
.note,.caption{color:var(--muted);font-size:.9rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:22px 24px;
 margin:40px 0 0;padding:22px 0;border-top:1px solid var(--rule);border-bottom:1px solid var(--rule)}
.facts dt{font-size:.78rem;color:var(--muted);margin:0}
.facts dd{margin:.1em 0 0;font-size:1.04rem;line-height:1.35}
.scroll{overflow-x:auto;margin:22px -32px 0;padding:0 32px}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th{font-weight:500;color:var(--muted);text-align:left;font-size:.78rem;line-height:1.3;
 white-space:nowrap;padding:0 14px 9px 0;vertical-align:bottom;border-bottom:1px solid var(--rule)}
td{padding:9px 14px 9px 0;border-bottom:1px solid var(--rule);vertical-align:middle;white-space:nowrap}
th.n,td.n{text-align:right}
th:last-child,td:last-child{padding-right:0}
tbody tr:last-child td{border-bottom:0}
td small{display:block;color:var(--muted);font-size:.8rem;line-height:1.3}
td.name{font-weight:600}
td.wrap{white-space:normal;min-width:9em}
.dot{display:inline-block;width:.68em;height:.68em;border-radius:50%;margin-right:.6em;background:var(--c)}
.tag{font-size:.75rem;color:var(--muted);border:1px solid var(--rule);border-radius:99px;
 padding:.05em .55em;margin-left:.5em;font-weight:400}
.verdict{font-weight:600}
.better{color:var(--good)}.worse{color:var(--bad)}.open{color:var(--muted);font-weight:400}
tr.other td{color:var(--muted);padding-top:0}
tr.other svg{opacity:.55}
td.other{padding-left:1.3em}
tr.bar td{color:var(--muted);border-bottom-style:dashed;border-top:1px dashed var(--rule)}
svg.forest{display:block;margin-right:14px;width:230px;height:26px;overflow:visible}
svg.scale{height:18px}
svg text{fill:var(--muted)}
.warnings{background:var(--warn-wash);border-radius:10px;padding:18px 24px 16px;margin-top:30px}
.warnings h3{color:var(--warn)}
.undecided{background:var(--wash);border-radius:10px;padding:18px 24px 14px;margin-top:30px}
.undecided .caption{margin:.7em 0 0;max-width:62em}
.warnings ul,.undecided ul{margin:.4em 0 0;padding-left:1.15em;font-size:.92rem}
.warnings li,.undecided li{margin:.22em 0;max-width:62em}
figure{margin:30px 0 0;min-width:0}
figure>svg{display:block;width:100%;height:auto;margin-top:6px}
figcaption p{margin:0}
.scroll+.caption{margin-top:18px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:0 44px}
.seals{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:16px;margin:26px 0}
.seal{background:var(--wash);border-radius:10px;padding:18px 20px}
.seal .hash{font-size:1.22rem;display:block;margin:.2em 0}
.seal p{margin:0;font-size:.85rem;color:var(--muted)}
.seal p b{color:var(--good);font-weight:600}
details{border-top:1px solid var(--rule);padding:12px 0}
details:last-of-type{border-bottom:1px solid var(--rule)}
summary{cursor:pointer;font-weight:500}
summary span{color:var(--muted);font-weight:400;margin-left:.5em}
.keys{columns:2;column-gap:44px;font:.8rem/1.75 var(--mono);margin:14px 0 8px;padding:0;list-style:none}
.keys li{display:flex;justify-content:space-between;gap:16px;break-inside:avoid;border-bottom:1px dotted var(--rule)}
.keys span{color:var(--muted);text-align:right;overflow-wrap:anywhere}
.chosen{font-weight:700;border-radius:6px;box-shadow:inset 0 0 0 1.5px var(--c);padding:.18em .55em;margin:0 -.55em}
.edge{color:var(--warn);font-size:.8rem}
.none{color:var(--muted);opacity:.75}
.made{display:grid;grid-template-columns:max-content 1fr;gap:8px 28px;font-size:.92rem;margin:20px 0 0}
.made dt{color:var(--muted)}.made dd{margin:0;overflow-wrap:anywhere}
.made code{background:var(--wash);border-radius:5px;padding:.12em .42em}
@media(max-width:820px){.pair,.keys{display:block;columns:1}main{padding:40px 20px 64px}
 .scroll{margin:18px -20px 0;padding:0 20px}
 figure{overflow-x:auto}figure.wide>svg{min-width:680px}.made{display:block}.made dd{margin-bottom:.8em}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""


def style_sheet(looks: Iterable[Look]) -> str:
    """The whole of it, with the mixers' colours."""
    looks = list(looks)
    light = _variables({**_LIGHT, **{look.css.removeprefix("--"): look.light for look in looks}})
    dark = _variables({**_DARK, **{look.css.removeprefix("--"): look.dark for look in looks}})
    fonts = (
        '--sans:Inter,ui-sans-serif,system-ui,"Segoe UI","Helvetica Neue",Arial,sans-serif;'
        '--serif:"Iowan Old Style","Palatino Linotype",Palatino,"Source Serif 4",Georgia,serif;'
        "--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
    )
    return f":root{{{fonts}{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{_CSS}"


def _variables(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())
