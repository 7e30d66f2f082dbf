"""The frame of a dump's index.html: style and script, with ``%NAME%`` where the content goes."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>moe_compile dump</title>
<style>
:root { --ground: #fff; --panel: #f6f7f9; --line: #d5d9e0; --text: #1c2330; --faint: #667085; --accent: #2457c5;
  --gemm: #dbe7ff; --routing: #fff0cf; --expert: #d3f2dd; --input: #eceef1; --other: #fff;
  --good: #15803d; --bad: #b45309; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171d; --panel: #1b1f27; --line: #39404d; --text: #e4e7ec;
  --faint: #98a2b3; --accent: #84a9ff; --gemm: #223a6b; --routing: #554312; --expert: #14532d; --input: #2a303b;
  --other: #1b1f27; --good: #4ade80; --bad: #fbbf24; } }
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground);
  display: grid; grid-template-columns: 330px 1fr; grid-template-rows: auto 1fr; height: 100vh; }
header { grid-column: 1 / 3; padding: 12px 20px; border-bottom: 1px solid var(--line); }
h1 { font-size: 17px; margin: 0; } h2 { font-size: 19px; margin: 0 0 10px; overflow-wrap: anywhere; }
h3 { font-size: 13px; margin: 0 0 6px; color: var(--faint); }
.note { margin: 2px 0; color: var(--faint); } a { color: var(--accent); }
details { color: var(--faint); } details p { margin: 4px 0; }
nav { padding: 12px; background: var(--panel); border-right: 1px solid var(--line); overflow: auto; }
nav input { width: 100%; padding: 7px 10px; font: inherit; color: inherit; background: var(--ground);
  border: 1px solid var(--line); border-radius: 6px; }
nav ul { list-style: none; padding: 0; margin: 6px 0; }
nav li a { display: block; padding: 6px 8px; border-radius: 6px; color: inherit; text-decoration: none; }
nav li a:hover { background: var(--line); } nav li a.current { background: var(--gemm); }
nav .name { display: block; overflow-wrap: anywhere; }
.outcome { font-size: 12px; margin-right: 8px; } .done { color: var(--good); } .left { color: var(--bad); }
.where, #count { font-size: 12px; color: var(--faint); }
main { padding: 18px 24px; overflow: auto; }
section + section { margin-top: 40px; }
.js section { display: none; margin: 0; } .js section.current { display: block; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0 0 14px; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.views { display: none; margin: 0 0 12px; } .js .views { display: flex; }
.views button { font: inherit; padding: 5px 14px; color: inherit; background: var(--ground); cursor: pointer;
  border: 1px solid var(--line); } .views button + button { border-left: 0; }
.views button:first-child { border-radius: 6px 0 0 6px; } .views button:last-child { border-radius: 0 6px 6px 0; }
.views button[aria-pressed=true] { background: var(--accent); border-color: var(--accent); color: var(--ground); }
.view { overflow: auto; } .js .view { display: none; } .js .view.current { display: block; }
svg { display: block; max-width: none; } svg path { fill: none; stroke: var(--faint); stroke-width: 1.2; }
svg rect { fill: var(--other); stroke: var(--line); stroke-width: 1.2; } .gemm rect { fill: var(--gemm); }
.routing rect { fill: var(--routing); } .expert rect { fill: var(--expert); } .input rect { fill: var(--input); }
.input rect { stroke-dasharray: 4 3; }
svg text { font: 12px ui-monospace, monospace; text-anchor: middle; fill: var(--text); }
svg .shape { font-size: 11px; fill: var(--faint); }
.columns { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; } .columns > div { min-width: 0; }
ol { margin: 0; padding: 8px 8px 8px 40px; background: var(--panel); border-radius: 6px; }
code { font: 12px ui-monospace, monospace; overflow-wrap: anywhere; } li::marker { color: var(--faint); }
.legend span { font-size: 12px; padding: 1px 8px; border: 1px solid var(--line); border-radius: 4px; }
</style>
</head>
<body>
<header><h1>%HEADING%</h1>%NOTES%
<details><summary>files</summary>%FILES%</details></header>
<nav><input id="search" type="search" placeholder="search a layer" aria-label="search a layer" autocomplete="off">
<p id="count" aria-live="polite"></p><ul id="list">%LINKS%</ul>
<p class="legend"><span style="background:var(--gemm)">GEMM</span>
<span style="background:var(--routing)">routing</span>
<span style="background:var(--expert)">MXFP8 operator</span>
<span style="background:var(--input)">input</span></p></nav>
<main>%SECTIONS%</main>
<script>
"use strict";
document.documentElement.classList.add("js");
const items = [...document.querySelectorAll("#list li")];
const sections = [...document.querySelectorAll("section")];
const search = document.getElementById("search");
let view = "before";
function pick(id) {
  sections.forEach(s => s.classList.toggle("current", s.id === id));
  items.forEach(i => i.firstChild.classList.toggle("current", i.firstChild.hash === "#" + id));
}
function show(name) {
  view = name;
  document.querySelectorAll(".view").forEach(v => v.classList.toggle("current", v.dataset.view === name));
  document.querySelectorAll(".views button").forEach(b => b.setAttribute("aria-pressed", b.dataset.view === name));
}
function filter() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const found = items.filter(i => {
    i.hidden = !words.every(w => i.dataset.name.includes(w));
    return !i.hidden;
  });
  document.getElementById("count").textContent = found.length + " of " + items.length + " blocks";
  if (words.length && found.length) pick(found[0].firstChild.hash.slice(1));
}
document.addEventListener("click", event => {
  const button = event.target.closest(".views button");
  if (button) show(button.dataset.view);
  const link = event.target.closest("#list a");
  if (link) pick(link.hash.slice(1));
});
addEventListener("hashchange", () => pick(location.hash.slice(1)));
search.addEventListener("input", filter);
show(view);
filter();
pick(sections.some(s => "#" + s.id === location.hash) ? location.hash.slice(1) : sections[0]?.id);
</script>
</body>
</html>
"""
