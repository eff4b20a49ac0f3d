"""What the page does: filter rows, follow links across the panes, show one op in detail.

Without scripts the page shows everything, unfiltered.
"""

SCRIPT = """
"use strict";
const $ = (selector, root = document) => [...root.querySelectorAll(selector)];
const search = document.getElementById("search"), layer = document.getElementById("layer");
const changed = document.getElementById("changed"), count = document.getElementById("count");
const detail = document.getElementById("detail"), rows = $(".graph tbody tr");

function filter() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let heading = null, shown = 0, total = 0;
  for (const row of rows) {
    if (row.classList.contains("module")) { heading = row; row.hidden = true; continue; }
    total += 1;
    const text = row.dataset.text ??= (row.textContent + " " + row.dataset.module).toLowerCase();
    const keep = words.every(word => text.includes(word))
      && (!layer.value || row.dataset.block === layer.value.slice(1))
      && (!changed.checked || row.dataset.kind !== "same");
    row.hidden = !keep;
    if (keep) { shown += 1; if (heading) heading.hidden = false; }
  }
  count.textContent = shown === total ? `${total} rows` : `${shown} of ${total} rows`;
}

function clearFilters() { search.value = ""; layer.value = ""; changed.checked = false; filter(); }
const split = text => (text || "").split(" ").filter(Boolean);

function mark(op) {
  $(".op.picked, .op.kin, .op.input, .op.reader").forEach(
    other => other.classList.remove("picked", "kin", "input", "reader"));
  op.classList.add("picked");
  split(op.dataset.kin).forEach(id => document.getElementById(id).classList.add("kin"));
  split(op.dataset.inputs).forEach(id => document.getElementById(id).classList.add("input"));
  readers(op).forEach(other => other.classList.add("reader"));
}

const readers = op => $(".op", op.closest("table")).filter(
  other => split(other.dataset.inputs).includes(op.id));

function links(ids) {
  const span = document.createElement("span");
  ids.forEach((id, i) => {
    const link = document.createElement("a");
    link.href = "#" + id;
    link.textContent = document.getElementById(id).querySelector(".name").textContent;
    if (i) span.append(", ");
    span.append(link);
  });
  return span;
}

function show(op) {
  mark(op);
  const list = document.createElement("dl");
  const add = (name, value) => {
    if (!value || (value.childNodes && !value.childNodes.length)) return;
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.append(value);
    list.append(term, text);
  };
  add("op", op.querySelector(".code").textContent);
  add("module", op.dataset.module || "the model itself");
  add("traced from", op.dataset.source);
  add("by pass", op.dataset.pass);
  add(op.dataset.side === "a" ? "replaced by" : "stands for", links(split(op.dataset.kin)));
  add("reads", links(split(op.dataset.inputs)));
  add("read by", links(readers(op).map(other => other.id)));
  const close = document.createElement("button");
  close.textContent = "close";
  close.onclick = () => { detail.hidden = true; };
  detail.replaceChildren(close, list);
  detail.hidden = false;
}

function go() {
  const op = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!op || !op.classList.contains("op")) return;
  if (op.closest("tr").hidden) clearFilters();
  show(op);
  op.scrollIntoView({block: "center"});
}

document.addEventListener("click", event => {
  const link = event.target.closest("a[href^='#']");
  if (link) {
    if (link.hash === location.hash) { event.preventDefault(); go(); }
    return;
  }
  const op = event.target.closest(".op");
  if (op && !String(getSelection())) show(op);
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") detail.hidden = true;
  if (event.key === "/" && document.activeElement !== search) {
    event.preventDefault();
    search.focus();
  }
  if (event.key === "Enter" && event.target.classList?.contains("op")) show(event.target);
});
[search, layer, changed].forEach(control => control.addEventListener("input", filter));
document.getElementById("theme").onclick = () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
};
addEventListener("hashchange", go);
filter();
go();
"""
