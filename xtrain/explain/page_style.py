"""What the page looks like: one style sheet, light and dark by the reader's setting or choice."""

STYLE = """
:root { color-scheme: light dark;
  --ink: light-dark(#1f2328, #e6edf3); --dim: light-dark(#59636e, #9198a1);
  --line: light-dark(#d1d9e0, #30363d); --back: light-dark(#ffffff, #0d1117);
  --soft: light-dark(#f6f8fa, #161b22); --link: light-dark(#0969da, #4493f8);
  --gone: light-dark(#ffebe9, #3c1618); --new: light-dark(#dafbe1, #12341f);
  --moved: light-dark(#fff8c5, #332a06); --site: light-dark(#8250df, #bc8cff);
  --good: light-dark(#1a7f37, #3fb950); --bad: light-dark(#cf222e, #f85149);
  --pick: light-dark(#ffd33d, #9e6a03); --kin: light-dark(#54aeff, #1f6feb); }
:root[data-theme=light] { color-scheme: light; } :root[data-theme=dark] { color-scheme: dark; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 110rem; margin: 0 auto; padding: 1.2rem 1.2rem 9rem; }
h1 { font-size: 1.4rem; margin: 0 3rem .2rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); }
#theme { position: absolute; right: 1.2rem; top: 1.2rem; }
button, input, select { font: inherit; color: inherit; background: var(--soft);
  border: 1px solid var(--line); border-radius: 6px; padding: .2rem .6rem; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .45rem .9rem;
  background: var(--soft); min-width: 7.5rem; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.columns { display: grid; gap: 0 2.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }
.columns > div { min-width: 0; }
@media (min-width: 84rem) {
  .columns { grid-template-columns: minmax(0, max-content) minmax(0, 1fr); } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; }
.plain th, .plain td { text-align: left; vertical-align: top; padding: .22rem .9rem .22rem 0;
  border-bottom: 1px solid var(--line); }
.plain .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code, .op { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .92em; }
.tools { position: sticky; top: 0; z-index: 2; background: var(--back); padding: .6rem 0;
  border-bottom: 1px solid var(--line); display: flex; flex-wrap: wrap; gap: .5rem .9rem;
  align-items: center; }
.tools input[type=search] { width: 17rem; }
.key { display: inline-block; width: .9rem; height: .9rem; border-radius: 3px; margin: 0 .3rem 0 0;
  vertical-align: -2px; border: 1px solid var(--line); }
.graph { width: 100%; table-layout: fixed; font-size: 12px; line-height: 1.45; }
.graph thead th { text-align: left; padding: .3rem .5rem; font-size: .88rem;
  border-bottom: 1px solid var(--line); }
.graph td { width: 50%; vertical-align: top; padding: 0; }
.graph .module th { text-align: left; color: var(--dim); font-weight: 600; font-size: 12px;
  padding: .5rem .5rem .1rem; overflow-wrap: anywhere; }
.graph .first th { border-top: 2px solid var(--line); color: var(--ink); font-size: 13px; }
.op { padding: .08rem .5rem .08rem .45rem; border-left: 4px solid transparent; cursor: pointer;
  overflow-wrap: anywhere; }
.op:hover { background: var(--soft); }
.op .name { color: var(--link); } .op .type { color: var(--dim); }
.gone { background: var(--gone); } .new { background: var(--new); }
.moved { background: var(--moved); }
.op.site { border-left-color: var(--site); }
.chip { display: inline-block; border: 1px solid var(--line); border-radius: 9px; padding: 0 .45rem;
  font: 11px/1.5 system-ui, sans-serif; color: var(--dim); background: var(--back); }
.chip.site { color: var(--site); border-color: var(--site); font-weight: 600; }
.op.picked { outline: 2px solid var(--pick); outline-offset: -2px; }
.op.kin { outline: 2px solid var(--kin); outline-offset: -2px; }
.op.input { box-shadow: inset -5px 0 var(--dim); }
.op.reader { box-shadow: inset -5px 0 var(--link); }
[hidden] { display: none !important; }
#detail { position: fixed; left: 0; right: 0; bottom: 0; z-index: 3; background: var(--soft);
  border-top: 1px solid var(--line); padding: .6rem 1.2rem; max-height: 34vh; overflow: auto;
  font-size: .85rem; }
#detail dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; }
#detail dt { color: var(--dim); } #detail dd { margin: 0; overflow-wrap: anywhere; }
#detail button { float: right; }
ul.lines { padding-left: 1.1rem; margin: .3rem 0; } ul.lines li { overflow-wrap: anywhere; }
@media print { .tools, #detail, #theme { display: none; } }
"""
