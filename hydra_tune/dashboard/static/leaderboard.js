// The table of trials: sorted and filtered by the server, a page at a time, kept up to date in place.

import { get, link, report } from "./api.js";
import { h, replace, state } from "./dom.js";
import { bytes, duration, number, param } from "./format.js";

const PAGE = 50;

/** The filter and the order of trials in an address. */
function wanted(query) {
  return { sort: query.get("sort"), down: query.get("descending") === "true", filter: query.get("filter") || "", offset: Number(query.get("offset")) || 0 };
}

function page(study, { sort, down, filter, offset }) {
  const query = new URLSearchParams({ offset, limit: PAGE });
  if (sort) { query.set("sort", sort); query.set("descending", down); }
  if (filter) query.set("filter", filter);
  return get(`/api/studies/${study}/trials?${query}`);
}

/** Request the first page while the study itself is still loading; `load` reports its errors. */
export function firstPage(study, query) {
  const asked = page(study, wanted(query));
  asked.catch(() => {});
  return asked;
}

export class Leaderboard {
  constructor(study, query, first) {
    this.study = study;
    this.first = first;
    Object.assign(this, wanted(query));
    this.chosen = new Set((query.get("compare") || "").split(",").filter(Boolean).map(Number));
    this.rows = new Map();
    this.body = h("tbody", {});
    this.head = h("tr", {});
    this.error = h("span", { class: "error", role: "alert" });
    this.count = h("span", { class: "small soft", role: "status" });
    this.search = h("input", {
      type: "search", value: this.filter, placeholder: "state:failed  lr<0.01  activation=relu", "aria-label": "Filter trials",
      title: "Terms separated by spaces: state:failed, a parameter or metric compared with a number (lr<0.01), a category (activation=relu), or words of an error",
      oninput: () => { clearTimeout(this.typing); this.typing = setTimeout(() => this.refilter(), 250); },
    });
    this.compare = h("button", { disabled: true, onclick: () => this.openComparison() }, "Compare");
    this.back = h("button", { onclick: () => this.turn(-PAGE) }, "Previous");
    this.next = h("button", { onclick: () => this.turn(PAGE) }, "Next");
    const downloads = report ? null : [h("a", { class: "button", href: `/api/studies/${study.id}/trials.csv`, download: true }, "CSV"), h("a", { class: "button", href: `/api/studies/${study.id}/trials.parquet`, download: true }, "Parquet")];
    this.element = h("section", { class: "card", id: "leaderboard", "aria-label": "Leaderboard" },
      h("header", {}, h("h2", {}, "Leaderboard"), this.count, h("span", { class: "spacer" }), this.error),
      h("div", { class: "row" }, this.search, this.compare, h("span", { class: "spacer", style: { flex: "1" } }), downloads),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, this.head), this.body)),
      h("div", { class: "row" }, this.back, this.next));
  }

  /** If there are many parameters, those that only some trials have share a column: each would be mostly empty. */
  columns(rows) {
    const { metrics } = this.study;
    const many = this.study.parameters.length > 10;
    const parameters = this.study.parameters.filter((one) => !many || this.sort === one.name || rows.every((row) => one.name in row.params));
    const own = new Set(parameters.map((one) => one.name));
    return [
      { text: "Trial", sort: "number", numeric: true, cell: (row) => h("a", { href: link(`/studies/${this.study.id}/trials/${row.number}`) }, row.number) },
      ...metrics.map((metric, i) => ({ text: metric, sort: metrics.length === 1 ? "value" : metric, numeric: true, cell: (row) => number(row.values[i]) })),
      { text: "State", sort: "state", cell: (row) => state(row.state) },
      ...parameters.map((one) => ({ text: one.name, sort: one.name, numeric: one.kind !== "categorical", cell: (row) => (one.name in row.params ? param(row.params[one.name]) : "") })),
      ...(many ? [{ text: "Other parameters", cell: (row) => others(row, own), wide: true }] : []),
      { text: "Strategy", sort: "strategy", cell: (row) => (row.shards > 1 ? `${row.strategy} × ${row.shards}` : row.strategy) },
      { text: "Time", sort: "seconds", numeric: true, cell: (row) => duration(row.seconds) },
      { text: "Memory", sort: "memory", numeric: true, cell: (row) => bytes(row.peak_device_bytes) },
      { text: "Error", cell: (row) => row.error, clip: true },
    ];
  }

  async load() {
    const asked = (this.asked = Symbol()), first = this.first;
    this.first = null;
    try {
      const found = await (first ?? page(this.study.id, this));
      if (asked !== this.asked) return;
      this.error.textContent = "";
      this.draw(found);
    } catch (error) {
      if (asked === this.asked) this.error.textContent = error.message;
    }
  }

  draw(page) {
    this.page = page;
    const shown = page.rows.some((row) => row.error);
    const used = this.columns(page.rows).filter((column) => column.text !== "Error" || shown);
    replace(this.head, h("th", {}, ""), used.map((column) => this.heading(column)));
    const first = this.rows.size === 0;
    const fresh = new Map();
    const elements = page.rows.map((row) => {
      const text = JSON.stringify([row, used.map((column) => column.text)]);
      const known = this.rows.get(row.number);
      const kept = known && known.text === text ? known : { text, element: this.row(row, used, !first) };
      fresh.set(row.number, kept);
      return kept.element;
    });
    this.rows = fresh;
    this.body.replaceChildren(...elements);
    if (!elements.length) this.body.append(h("tr", {}, h("td", { colspan: used.length + 1, class: "empty" }, page.total ? "No trial matches the filter." : "No trial has started yet.")));
    const last = Math.min(page.offset + page.rows.length, page.matching);
    this.count.textContent = page.matching ? `${page.offset + 1}–${last} of ${page.matching}${page.matching < page.total ? ` (${page.total} in all)` : ""}` : "";
    this.back.disabled = page.offset === 0;
    this.next.disabled = last >= page.matching;
    this.back.parentElement.hidden = page.matching <= PAGE && page.offset === 0;
    this.element.dataset.version = page.version;
  }

  heading({ text, sort, numeric }) {
    const multiple = this.study.metrics.length > 1;
    const by = this.sort || (multiple ? "number" : "value");
    const down = this.sort ? this.down : multiple || this.study.directions[0] === "maximize";
    const how = sort && sort === by ? (down ? "descending" : "ascending") : null;
    const button = sort ? h("button", { onclick: () => this.sortBy(sort, how === "ascending") }, text) : text;
    return h("th", { class: numeric ? "number" : null, "aria-sort": how, scope: "col" }, button);
  }

  row(row, columns, fresh) {
    const best = this.study.best && this.study.best.number === row.number;
    const choose = h("input", { type: "checkbox", "aria-label": `Compare trial ${row.number}`, checked: this.chosen.has(row.number), onchange: (event) => this.choose(row.number, event.target.checked) });
    return h("tr", { class: [best ? "best" : "", fresh ? "fresh" : ""].join(" ").trim() || null, "data-trial": row.number },
      h("td", {}, choose),
      columns.map((column) => h("td", { class: column.numeric ? "number" : column.clip ? "clip" : column.wide ? "params" : null, title: column.clip ? row.error : null }, column.cell(row))));
  }

  choose(trial, wanted) {
    if (wanted) this.chosen.add(trial); else this.chosen.delete(trial);
    this.compare.disabled = this.chosen.size < 2 || this.chosen.size > 5;
    this.compare.textContent = this.chosen.size > 5 ? "Compare (5 at most)" : this.chosen.size ? `Compare ${this.chosen.size}` : "Compare";
  }

  openComparison() {
    location.assign(link(`/studies/${this.study.id}/compare?trials=${[...this.chosen].sort((a, b) => a - b).join(",")}`));
  }

  sortBy(column, down) {
    this.sort = column; this.down = down; this.offset = 0;
    this.remember(); this.load();
  }

  refilter() {
    this.filter = this.search.value.trim(); this.offset = 0;
    this.remember(); this.load();
  }

  turn(by) {
    this.offset = Math.max(0, this.offset + by);
    this.remember(); this.load();
    this.element.scrollIntoView({ block: "start" });
  }

  remember() {
    if (report) return;
    const query = new URLSearchParams();
    if (this.sort) { query.set("sort", this.sort); query.set("descending", this.down); }
    if (this.filter) query.set("filter", this.filter);
    if (this.offset) query.set("offset", this.offset);
    history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  }
}

function others(row, own) {
  const families = new Set(Object.values(row.params).filter((value) => typeof value === "string").map((value) => `${value}.`));
  const short = (name) => { const at = name.indexOf(".") + 1; return families.has(name.slice(0, at)) ? name.slice(at) : name; };
  return Object.entries(row.params).filter(([name]) => !own.has(name)).map(([name, value]) => `${short(name)}\u00a0${typeof value === "number" ? number(value, 3) : param(value)}`).join(", ");
}
