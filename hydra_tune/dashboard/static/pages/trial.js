// One trial: its parameters, learning curves, strategy and devices, and errors.

import { get, link, send } from "../api.js";
import { trialActions } from "../actions.js";
import { card, empty, fact, h, pairs, replace, state, throttled } from "../dom.js";
import { bytes, duration, moment, number, param } from "../format.js";
import { plan } from "../plan.js";
import { Chart, finite, label, seriesColour } from "../plots.js";
import { followStudy } from "../study_head.js";

export async function show(content, { frame, server }, id, trialNumber) {
  const path = `/api/studies/${id}/trials/${trialNumber}`;
  const [study, trial] = await Promise.all([get(`/api/studies/${id}`), get(path)]);
  frame.title([[study.name, `/studies/${id}`], [`Trial ${trialNumber}`]]);
  const notices = h("div", { "aria-live": "polite" });
  const head = h("div", {}), curves = new Curves(), rest = h("div", { style: { display: "grid", gap: "1rem" } });
  const { actions } = await server();
  const notes = card("Note", {}, note(path, trial, actions));
  replace(content, notices, head, h("div", { class: "grid" }, parameters(trial), curves.element), rest, trial.note || actions ? notes : null);
  const says = h("span", { class: "small soft", role: "status" });
  const draw = (found) => { drawHead(head, study, found, actions ? says : null); curves.set(found, study); replace(rest, details(found)); };
  draw(trial);
  let last = JSON.stringify(trial);
  const reload = throttled(async () => {
    const found = await get(path);
    const text = JSON.stringify(found);
    if (text !== last) { last = text; draw(found); }
  }, 1000);
  const stop = trial.ended ? () => {} : followStudy(study, frame, notices, reload);
  return () => { stop(); curves.close(); };
}

function drawHead(head, study, trial, says) {
  const values = study.metrics.map((metric, i) => fact(metric, trial.values[i] === null || trial.values[i] === undefined ? "none" : number(trial.values[i], 6), trial.number === study.best?.number ? "the best of the study" : study.directions[i]));
  const strategy = trial.strategy ? fact("Strategy", trial.strategy, trial.shards > 1 ? `${trial.shards} parts` : "in one part") : null;
  const place = `/studies/${study.id}/trials/`;
  replace(head, h("div", { style: { display: "grid", gap: "1rem" } },
    h("div", { class: "head" }, h("h1", {}, `Trial ${trial.number}`), state(trial.state), h("span", { class: "spacer" }),
      says ? trialActions(study, trial, says) : null,
      trial.number > 0 ? h("a", { class: "button", href: link(`${place}${trial.number - 1}`) }, "Previous") : null,
      trial.number + 1 < study.trials ? h("a", { class: "button", href: link(`${place}${trial.number + 1}`) }, "Next") : null),
    trial.error ? h("p", { class: "notice bad", role: "alert" }, trial.error) : null,
    h("dl", { class: "facts" }, values, strategy,
      fact("Time on devices", duration(trial.seconds) || "…", trial.started ? `began ${moment(trial.started)}` : null),
      fact("Peak memory", bytes(trial.peak_device_bytes) || "not measured", trial.budget_bytes ? `of ${bytes(trial.budget_bytes)} a device` : trial.device || null))));
}

function parameters(trial) {
  const says = h("span", { class: "small soft", role: "status" });
  const copy = (text) => async () => {
    try { await navigator.clipboard.writeText(text); says.textContent = "copied"; } catch { says.textContent = "the browser did not allow it"; }
  };
  const aside = h("div", { class: "row" }, says, h("button", { onclick: copy(python(trial.params)) }, "Copy as Python"), h("button", { onclick: copy(JSON.stringify(trial.params, null, 2)) }, "Copy as JSON"));
  const entries = Object.entries(trial.params);
  return card("Parameters", { aside: [h("span", { class: "spacer" }), aside] }, entries.length ? pairs(entries.map(([name, value]) => [name, typeof value === "number" ? String(value) : param(value)])) : empty("No parameter has been suggested yet."));
}

function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** One chart for each metric: their scales differ. */
class Curves {
  constructor() {
    this.charts = new Map();
    this.place = h("div", {});
    this.element = card("Learning curves", {}, this.place);
  }

  set(trial) {
    const curves = trial.curves.length ? trial.curves : trial.reports.x.length ? [{ ...trial.reports, name: "reported value" }] : [];
    if (!curves.length) { replace(this.place, empty("Nothing has been reported yet.")); this.charts.clear(); return; }
    if (!this.charts.size) replace(this.place);
    curves.forEach((curve, i) => {
      const make = () => ({
        traces: [{ x: curve.x.map((x) => x + (trial.curves.length ? 1 : 0)), y: finite(curve.y), mode: curve.x.length > 60 ? "lines" : "lines+markers", line: { width: 2, color: seriesColour(i) }, marker: { size: 5 }, hovertemplate: `%{x}: %{y:.6g}<extra></extra>` }],
        layout: { height: curves.length > 2 ? 170 : 230, margin: { l: 50, r: 8, t: 6, b: 34 }, xaxis: { title: { text: trial.curves.length ? "epoch" : "step" }, rangemode: "tozero" }, yaxis: { title: { text: label(curve.name) }, nticks: 5 } },
      });
      const known = this.charts.get(curve.name);
      if (known) { known.make = make; known.draw(); return; }
      const element = h("div", { class: "plot", style: { minHeight: "10rem" } });
      this.place.append(element);
      this.charts.set(curve.name, new Chart(element, make));
    });
  }

  close() { for (const chart of this.charts.values()) chart.close(); }
}

function details(trial) {
  return [
    card("How it was trained", {}, plan(trial), work(trial)),
    memory(trial),
    attempts(trial),
    trial.checkpoints.length ? card("Checkpoints", {}, table(["Step", "Size", "Took", "Made"], trial.checkpoints.map((one) => [one.step, bytes(one.bytes), duration(one.seconds), moment(one.made)]), 3)) : null,
    trial.events.length ? card("Events", {}, table(["When", "What", "Message"], trial.events.map((one) => [moment(one.happened), one.kind, one.message]), 0)) : null,
    Object.keys(trial.user_attrs).length ? card("User attributes", {}, pairs(Object.entries(trial.user_attrs).map(([name, value]) => [name, param(value)]))) : null,
  ];
}

function table(heads, rows, numeric) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, i) => h("th", { class: i < numeric ? "number" : null }, text)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) => h("td", { class: i < numeric ? "number" : i === cells.length - 1 && numeric === 0 ? "wrap" : null }, cell)))))));
}

/** One row for the units of one kind on one device; for a model in many parts also a folded row per part. */
function work(trial) {
  if (!trial.work.length) return empty("No unit of work has been recorded.");
  const sums = new Map();
  for (const one of trial.work) {
    const key = `${one.kind}/${one.device}`, sum = sums.get(key);
    if (!sum) { sums.set(key, { ...one, shard: null }); continue; }
    for (const name of ["units", "seconds", "read_bytes", "written_bytes"]) sum[name] += one[name];
  }
  const parted = sums.size < trial.work.length;
  return h("div", {}, h("h3", {}, "Units of work"), workTable(trial, [...sums.values()]),
    parted ? h("details", {}, h("summary", {}, "By part of the model"), workTable(trial, trial.work)) : null);
}

function workTable(trial, rows) {
  const moved = rows.some((one) => one.read_bytes || one.written_bytes);
  const sharded = rows.some((one) => one.shard !== null);
  const total = trial.work.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const heads = ["Work", ...(sharded ? ["Part"] : []), "Device", "Units", "Time", "Share", ...(moved ? ["Read back", "Written"] : [])];
  const number = (text) => h("td", { class: "number" }, text);
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { class: ["Work", "Device"].includes(text) ? null : "number" }, text)))),
    h("tbody", {}, rows.map((one) => h("tr", {}, h("td", {}, one.kind), sharded ? number(one.shard ?? "") : null, h("td", {}, one.device), number(one.units), number(duration(one.seconds)), number(`${((100 * one.seconds) / total).toFixed(0)}%`),
      moved ? [number(one.read_bytes ? bytes(one.read_bytes) : ""), number(one.written_bytes ? bytes(one.written_bytes) : "")] : null)))));
}

function memory(trial) {
  const peak = trial.peak_device_bytes, budget = trial.budget_bytes;
  if (!peak && !trial.spill_written_bytes) return null;
  const facts = [["peak on a device", bytes(peak)], ["budget of a device", bytes(budget)], ["spilled at most", bytes(trial.spilled_bytes)], ["written to the spill store", bytes(trial.spill_written_bytes)], ["read back", bytes(trial.spill_read_bytes)], ["communicated", bytes(trial.communicated_bytes)]];
  const bar = peak && budget ? h("div", { class: "meter", role: "img", "aria-label": `${bytes(peak)} of ${bytes(budget)}` }, h("i", { class: "used", style: { width: `${Math.min(100, (100 * peak) / budget)}%` } })) : null;
  return card("Memory against the budget", {}, bar, h("div", { style: { marginTop: ".6rem" } }, pairs(facts.filter(([, text]) => text && text !== "0 B"))));
}

function attempts(trial) {
  if (!trial.attempts.length) return null;
  return card("Attempts", {}, trial.attempts.map((one) => h("div", {},
    h("div", { class: "row" }, h("strong", {}, `Attempt ${one.attempt}`), state(one.state), h("span", { class: "small soft" }, `${moment(one.started)}${one.ended ? `, ${duration((new Date(one.ended) - new Date(one.started)) / 1000)}` : ""}`)),
    one.error ? h("p", {}, one.error) : null,
    one.traceback ? h("details", { open: true }, h("summary", {}, "Traceback"), h("pre", { tabindex: 0 }, one.traceback)) : null)));
}

function note(path, trial, editable) {
  if (!editable) return h("p", { style: { whiteSpace: "pre-wrap" } }, trial.note);
  const says = h("span", { class: "small soft", role: "status" });
  const text = h("textarea", { "aria-label": "Note", maxlength: 10000 });
  text.value = trial.note;
  const save = async () => {
    try { await send("PUT", `${path}/note`, { text: text.value }); says.textContent = "saved"; } catch (error) { says.textContent = error.message; }
  };
  return h("div", {}, text, h("div", { class: "row" }, h("button", { onclick: save }, "Save note"), says));
}
