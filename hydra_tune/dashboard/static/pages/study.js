// One study: the best trial, all trials, and charts.

import { get, link } from "../api.js";
import { card, empty, fact, h, pairs, replace, state, throttled, whenSeen } from "../dom.js";
import { bytes, duration, moment, number, param, percent } from "../format.js";
import { firstPage, Leaderboard } from "../leaderboard.js";
import { mostPresent, ParallelCoordinates } from "../parallel.js";
import { Chart, colour, finite, label, trialColour } from "../plots.js";
import { actionBar } from "../actions.js";
import { followStudy, goal, progressMeter, tabs, timeLeft } from "../study_head.js";

export async function show(content, { frame, query, server }, id) {
  const first = firstPage(id, query);
  const study = await get(`/api/studies/${id}`);
  const leaderboard = new Leaderboard(study, query, first);
  frame.title([[study.name]]);
  const notices = h("div", { "aria-live": "polite" });
  const head = h("div", { class: "head" }), top = h("div", {});
  const tools = h("div", { class: "row" });
  replace(content, head, notices, tabs(study, "Overview"), top, leaderboard.element);
  drawHead(head, study, tools);
  drawTop(top, study);
  await leaderboard.load();
  const charts = new StudyCharts(study);
  content.append(charts.element);
  server().then(({ actions }) => { if (actions) tools.append(actionBar(study)); });
  // Utilisation is fetched after the page is drawn: the server reads every unit for it.
  const busy = throttled(async () => { study.pool = await get(`/api/studies/${id}/devices`); drawTop(top, study); }, 5000);
  busy();
  const reload = throttled(() => leaderboard.load(), 1000);
  const stop = followStudy(study, frame, notices, (news) => {
    const before = study.version;
    Object.assign(study, news.study);
    drawHead(head, study, tools);
    drawTop(top, study);
    if (study.version !== before) { reload(); busy(); charts.changed(news); }
  });
  return () => { stop(); charts.close(); };
}

function drawHead(head, study, tools) {
  replace(head, h("h1", {}, study.name), state(study.state), h("span", { class: "soft small" }, goal(study)), h("span", { class: "spacer" }), tools);
}

function drawTop(top, study) {
  const { meter, key } = progressMeter(study);
  const took = study.started ? (study.state === "running" ? Date.now() / 1000 : study.ended ?? study.started) - study.started : null;
  const best = study.best;
  const facts = h("dl", { class: "facts" },
    best ? fact(`Best ${study.metrics[0]}`, number(best.value), h("a", { href: link(`/studies/${study.id}/trials/${best.number}`) }, `trial ${best.number}`))
      : fact("Best", study.metrics.length > 1 ? "Pareto front" : "none yet", study.metrics.length > 1 ? "several objectives, see below" : "no trial has completed"),
    fact("Trials", study.planned ? `${study.finished} of ${study.planned}` : study.trials, timeLeft(study) || `${study.counts.COMPLETE ?? 0} completed`),
    fact("Time", duration(took), study.started ? `since ${moment(study.started)}` : "not started"),
    study.pool?.units ? fact("Devices busy", percent(study.pool.utilisation), h("a", { href: link(`/studies/${study.id}/devices`) }, `${study.pool.devices.length} devices, ${duration(study.device_seconds)} of work`))
      : fact("Device time", duration(study.device_seconds), study.pool ? "no unit of work recorded" : "…"));
  const progress = h("section", { class: "card", "aria-label": "Progress" }, meter, key);
  const won = best ? card("What won", {}, pairs(Object.entries(best.params).map(([name, value]) => [name, param(value)]))) : null;
  const opened = new Set([...top.querySelectorAll("details[open]")].map((one) => one.dataset.family));
  replace(top, h("div", { style: { display: "grid", gap: "1rem" } }, progress, facts, h("div", { class: "grid" }, won, searched(study, opened))));
}

/** The ranges of the parameters, folded by family if there are several, and the settings of the search. */
function searched(study, opened) {
  const range = (one) => (one.choices ? one.choices.map(param).join(", ") : `${number(one.low)} to ${number(one.high)}${one.log ? ", logarithmic" : ""}`);
  const families = new Map(), common = [];
  for (const one of study.parameters) {
    const dot = one.name.indexOf(".");
    if (dot < 0 || study.parameters.length <= 12) { common.push([one.name, range(one)]); continue; }
    const family = one.name.slice(0, dot);
    families.set(family, [...(families.get(family) ?? []), [one.name.slice(dot + 1), range(one)]]);
  }
  const settings = Object.entries(study.settings).filter(([name, value]) => ["sampler", "pruner", "devices", "device_memory", "strategy", "concurrency"].includes(name) && value !== null);
  return card("What was searched", {}, pairs(common),
    [...families].map(([family, entries]) => h("details", { open: opened.has(family), "data-family": family }, h("summary", {}, `${family}: ${entries.length} parameters`), pairs(entries))),
    h("h3", {}, "How"), pairs([...settings.map(([name, value]) => [name.replaceAll("_", " "), name === "device_memory" && typeof value === "number" ? bytes(value) : param(value)]), ...trained(study), ...(study.seed === null ? [] : [["seed", study.seed]])]));
}

/** The number of trials by strategy, if recorded. */
function trained(study) {
  const strategies = Object.entries(study.strategies);
  return strategies.length ? [["trained", strategies.map(([name, count]) => `${count} ${name}`).join(", ")]] : [];
}

/** The charts below the leaderboard; each loads its data when it comes into view. */
class StudyCharts {
  constructor(study) {
    this.study = study;
    this.parts = [];
    this.element = h("div", { style: { display: "grid", gap: "1rem" } });
    const several = study.metrics.length > 1;
    const wide = h("div", { class: "grid" });
    if (several) this.add(wide, "Pareto front", "pareto", (box) => this.pareto(box));
    study.metrics.forEach((metric, i) => this.add(wide, several ? `History of ${metric}` : "History", `history?objective=${i}`, (box) => this.history(box, i)));
    this.add(wide, "Intermediate values", "reports", (box) => this.reports(box));
    this.add(wide, "Parameter importances", "importances", (box) => this.importances(box));
    this.add(wide, "Failures", "failures", (box) => this.failures(box));
    this.element.append(wide);
    this.add(this.element, "Parallel coordinates", "sample", (box) => this.parallel(box));
    this.add(this.element, "Slices", "sample", (box) => this.slices(box));
  }

  add(parent, title, path, make) {
    const box = h("div", { class: "pending" });
    const part = { path, box, draw: make(box), loaded: false };
    parent.append(card(title, { id: title.toLowerCase().replaceAll(" ", "-") }, box));
    part.load = async () => {
      part.loaded = true;
      part.data = await get(`/api/studies/${this.study.id}/${path}`);
      box.classList.remove("pending");
      part.draw(part.data);
    };
    part.again = throttled(() => part.load(), 5000);
    whenSeen(box, part.load);
    this.parts.push(part);
  }

  /** On new trials, add points to charts where that suffices, and reload the others periodically. */
  changed(news) {
    for (const part of this.parts) {
      if (!part.loaded) continue;
      if (part.extend && !news.more) part.extend(news.trials); else part.again();
    }
  }

  close() {
    for (const part of this.parts) for (const one of part.box.closing ?? []) one.close();
  }

  plot(box, make) {
    const element = h("div", { class: "plot" });
    const chart = new Chart(element, make);
    box.closing = [...(box.closing ?? []), chart];
    box.append(element);
    return chart;
  }

  open(point) {
    const trial = point.customdata ?? point.x;
    if (Number.isInteger(trial)) location.assign(link(`/studies/${this.study.id}/trials/${trial}`));
  }

  history(box, objective) {
    const { study } = this;
    const maximize = study.directions[objective] === "maximize";
    let data = null, chart = null;
    const draw = (found) => {
      data = found;
      if (!data.numbers.length) { replace(box, empty("No trial has completed yet.")); chart = null; return; }
      if (!chart) { replace(box); chart = this.plot(box, make); }
      chart.draw();
    };
    const make = () => {
      const last = data.numbers.at(-1);
      return {
        traces: [
          { x: data.numbers, y: finite(data.values), customdata: data.numbers, mode: "markers", marker: { size: 5, color: colour("calm"), opacity: data.numbers.length > 500 ? 0.45 : 0.75 }, hovertemplate: "trial %{x}<br>%{y:.6g}<extra></extra>" },
          { x: [...data.best_numbers, last], y: finite([...data.best_values, data.best_values.at(-1)]), mode: "lines", line: { shape: "hv", width: 2.2, color: colour("accent") }, hovertemplate: "best so far, %{y:.6g}<extra></extra>" },
        ],
        layout: { xaxis: { title: { text: "trial" } }, yaxis: { title: { text: label(study.metrics[objective]) } } },
        click: (point) => this.open(point),
      };
    };
    queueMicrotask(() => {
      const part = this.parts.find((one) => one.box === box);
      part.extend = (trials) => {
        if (!data) return;
        const known = new Set(data.numbers);
        const done = trials.filter((row) => row.state === "COMPLETE" && !known.has(row.number)).sort((a, b) => a.number - b.number);
        for (const row of done) {
          const value = row.values[objective];
          data.numbers.push(row.number); data.values.push(value);
          const best = data.best_values.at(-1);
          if (best === undefined || (maximize ? value > best : value < best)) { data.best_numbers.push(row.number); data.best_values.push(value); }
        }
        if (done.length) draw(data);
      };
    });
    return draw;
  }

  reports(box) {
    let data = null, chart = null;
    return (curves) => {
      data = curves;
      if (!curves.length) { replace(box, empty("No trial has reported a value.")); chart = null; return; }
      if (!chart) {
        replace(box);
        chart = this.plot(box, () => ({
          traces: data.map((one) => ({ x: one.x, y: finite(one.y), customdata: one.x.map(() => one.number), mode: one.x.length > 1 ? "lines" : "markers", name: one.name, line: { width: this.study.best?.number === one.number ? 2.8 : 1.3, color: this.study.best?.number === one.number ? colour("accent") : one.state === "RUNNING" ? colour("busy") : trialColour(one.number, 0.55) }, hovertemplate: `trial ${one.number}<br>step %{x}: %{y:.6g}<extra></extra>` })),
          layout: { xaxis: { title: { text: "step" } }, yaxis: { title: { text: label(this.study.metrics[0]) } } },
          click: (point) => this.open(point),
        }));
      }
      chart.draw();
    };
  }

  importances(box) {
    let data = null, chart = null;
    const says = h("p", { class: "small soft" });
    return ({ shares, trials, complete }) => {
      data = shares.filter((one) => one.share > 0).slice(0, 20).reverse();
      if (!data.length) { replace(box, empty("A few more completed trials are needed.")); chart = null; return; }
      if (!chart) {
        replace(box, says);
        chart = this.plot(box, () => ({
          traces: [{ type: "bar", orientation: "h", x: data.map((one) => one.share), y: data.map((one) => label(one.name)), marker: { color: colour("accent") }, text: data.map((one) => percent(one.share)), textposition: "outside", cliponaxis: false, hovertemplate: "%{y}: %{x:.1%}<extra></extra>" }],
          layout: { margin: { l: 48, r: 44, t: 8, b: 40 }, xaxis: { tickformat: ".0%", rangemode: "tozero" }, yaxis: { ticklabelstandoff: 4 }, bargap: 0.35 },
        }));
      }
      const from = trials < complete ? ` Computed from ${trials} of ${complete} completed trials, evenly chosen.` : "";
      says.textContent = `How much each parameter matters for being among the best tenth (PED-ANOVA).${from}`;
      chart.draw();
    };
  }

  parallel(box) {
    let drawing = null;
    return (sample) => {
      if (!sample.numbers.length) { replace(box, empty("No trial has completed yet.")); drawing = null; return; }
      if (!drawing) {
        drawing = new ParallelCoordinates(this.study);
        box.closing = [drawing];
        replace(box, drawing.element);
      }
      drawing.set(sample);
      box.dataset.drawn = "yes";
    };
  }

  slices(box) {
    let charts = new Map();
    return (sample) => {
      if (!sample.numbers.length) { replace(box, empty("No trial has completed yet.")); charts = new Map(); return; }
      const axes = mostPresent(sample.axes, 12);
      if (!charts.size) replace(box, h("div", { class: "grid", style: { gridTemplateColumns: "repeat(auto-fill, minmax(min(17rem, 100%), 1fr))" } }));
      for (const axis of axes) {
        const make = () => ({
          traces: [{ x: axis.choices ? axis.values.map((v) => (v === null ? null : label(param(axis.choices[v])))) : axis.values, y: finite(sample.values.map((row) => row[0])), customdata: sample.numbers, mode: "markers", marker: { size: sample.numbers.length > 200 ? 5 : 7, opacity: 0.75, color: sample.numbers, colorscale: [[0, colour("calm")], [1, colour("accent")]] }, hovertemplate: "trial %{customdata}<br>%{x}: %{y:.6g}<extra></extra>" }],
          layout: { margin: { l: 44, r: 8, t: 6, b: 38 }, xaxis: { type: axis.choices ? "category" : axis.log ? "log" : "linear", title: { text: label(axis.name) }, nticks: 5, ...(axis.choices ? { categoryorder: "array", categoryarray: axis.choices.map((one) => label(param(one))) } : {}), ...(axis.log && Math.max(...axis.values) >= 10 * Math.min(...axis.values.filter((v) => v !== null)) ? { dtick: 1 } : {}) }, yaxis: { nticks: 5 } },
          click: (point) => this.open(point),
        });
        const known = charts.get(axis.name);
        if (known) known.make = make;
        else {
          const cell = h("div", {});
          box.firstElementChild.append(cell);
          charts.set(axis.name, this.plot(cell, make));
          box.closing = [...(box.closing ?? []), charts.get(axis.name)];
        }
        charts.get(axis.name).draw();
      }
    };
  }

  pareto(box) {
    const { study } = this;
    let data = null, chart = null;
    return (found) => {
      data = found;
      if (!data.numbers.length) { replace(box, empty("No trial has completed yet.")); chart = null; return; }
      if (!chart) {
        const list = h("p", { class: "small soft" });
        replace(box, list);
        box.says = list;
        chart = this.plot(box, () => {
          const front = new Set(data.front);
          const some = (wanted) => data.numbers.map((n, i) => [n, data.values[i]]).filter(([n]) => front.has(n) === wanted);
          const trace = (rows, marker) => ({ x: finite(rows.map(([, v]) => v[0])), y: finite(rows.map(([, v]) => v[1])), customdata: rows.map(([n]) => n), mode: "markers", marker, hovertemplate: "trial %{customdata}<br>%{x:.6g}, %{y:.6g}<extra></extra>" });
          return {
            traces: [trace(some(false), { size: 6, color: colour("calm"), opacity: 0.6 }), trace(some(true), { size: 9, color: colour("accent") })],
            layout: { xaxis: { title: { text: label(`${study.metrics[0]} (${study.directions[0]})`) } }, yaxis: { title: { text: label(`${study.metrics[1]} (${study.directions[1]})`) } } },
            click: (point) => this.open(point),
          };
        });
      }
      const shown = data.front.slice(0, 30);
      replace(box.says, `${data.front.length} trials that no other beats: `, shown.map((n, i) => [i ? ", " : "", h("a", { href: link(`/studies/${study.id}/trials/${n}`) }, n)]), study.metrics.length > 2 ? `. The chart shows ${study.metrics[0]} and ${study.metrics[1]} only.` : "");
      chart.draw();
    };
  }

  failures(box) {
    return (reasons) => {
      if (!reasons.length) { replace(box, empty("No trial has failed.")); return; }
      replace(box, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "number" }, "Trials"), h("th", {}, "State"), h("th", {}, "Reason"), h("th", {}, "Such as"))),
        h("tbody", {}, reasons.slice(0, 30).map((one) => h("tr", {}, h("td", { class: "number" }, one.count), h("td", {}, state(one.state)), h("td", { class: "wrap" }, one.reason),
          h("td", {}, one.numbers.slice(0, 6).map((n, i) => [i ? ", " : "", h("a", { href: link(`/studies/${this.study.id}/trials/${n}`) }, n)]))))))));
    };
  }
}
