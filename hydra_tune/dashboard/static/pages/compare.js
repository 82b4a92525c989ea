// Two to five trials side by side: differences are marked, and their curves share a chart.

import { get, link } from "../api.js";
import { card, empty, h, replace, state } from "../dom.js";
import { bytes, duration, number, param } from "../format.js";
import { Chart, finite, label, seriesColour } from "../plots.js";

export async function show(content, { frame, query }, id) {
  const study = await get(`/api/studies/${id}`);
  frame.title([[study.name, `/studies/${id}`], ["Compare"]]);
  const wanted = [...new Set((query.get("trials") || "").split(",").filter((text) => /^\d+$/.test(text)).map(Number))];
  if (wanted.length < 2 || wanted.length > 5) {
    replace(content, h("h1", {}, "Compare"), card("Which trials?", {}, empty("Choose two to five trials on the leaderboard of the study.")));
    return null;
  }
  const trials = await Promise.all(wanted.map((one) => get(`/api/studies/${id}/trials/${one}`)));
  const charts = [];
  replace(content, h("div", { class: "head" }, h("h1", {}, `Trials ${wanted.join(", ")}`)), card("Side by side", {}, table(study, trials)), curves(trials, charts));
  return () => charts.forEach((chart) => chart.close());
}

function table(study, trials) {
  const names = [...new Set(trials.flatMap((trial) => Object.keys(trial.params)))];
  const rows = [
    ["State", (trial) => state(trial.state), (trial) => trial.state],
    ...study.metrics.map((metric, i) => [metric, (trial) => number(trial.values[i], 6) || "none"]),
    ...names.map((name) => [name, (trial) => (name in trial.params ? param(trial.params[name]) : "–")]),
    ["Strategy", (trial) => (trial.shards > 1 ? `${trial.strategy} × ${trial.shards}` : trial.strategy)],
    ["Time on devices", (trial) => duration(trial.seconds)],
    ["Peak memory", (trial) => bytes(trial.peak_device_bytes)],
    ["Spilled at most", (trial) => bytes(trial.spilled_bytes)],
    ["Written to the spill store", (trial) => bytes(trial.spill_written_bytes)],
    ["Communicated", (trial) => bytes(trial.communicated_bytes)],
    ["Seed", (trial) => String(trial.seed ?? "")],
    ["Error", (trial) => trial.error],
  ];
  const shown = rows.filter(([, cell, text]) => trials.some((trial) => !["", "0 B"].includes((text ?? cell)(trial))));
  const differs = (cell, text) => new Set(trials.map((trial) => (text ?? cell)(trial))).size > 1;
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, ""), trials.map((trial, i) => h("th", {}, h("a", { href: link(`/studies/${study.id}/trials/${trial.number}`), style: { color: seriesColour(i) } }, `Trial ${trial.number}`))))),
    h("tbody", {}, shown.map(([name, cell, text]) => h("tr", {}, h("th", { scope: "row" }, name), trials.map((trial) => h("td", { class: differs(cell, text) ? "differs" : null }, cell(trial))))))));
}

function curves(trials, charts) {
  const of = (trial) => (trial.curves.length ? trial.curves : trial.reports.x.length ? [{ ...trial.reports, name: "reported value" }] : []);
  const names = [...new Set(trials.flatMap((trial) => of(trial).map((one) => one.name)))];
  if (!names.length) return null;
  return h("div", { class: "grid" }, names.map((name) => {
    const element = h("div", { class: "plot" });
    charts.push(new Chart(element, () => ({
      traces: trials.flatMap((trial, i) => of(trial).filter((one) => one.name === name).map((one) => ({ x: one.x.map((x) => x + (trial.curves.length ? 1 : 0)), y: finite(one.y), name: `trial ${trial.number}`, mode: one.x.length > 1 ? "lines" : "markers", line: { width: 2, color: seriesColour(i) }, hovertemplate: `trial ${trial.number}<br>%{x}: %{y:.6g}<extra></extra>` }))),
      layout: { showlegend: true, legend: { orientation: "h", y: 1.12 }, xaxis: { title: { text: "epoch" } }, yaxis: { title: { text: label(name) } } },
    })));
    return card(name, {}, element);
  }));
}
