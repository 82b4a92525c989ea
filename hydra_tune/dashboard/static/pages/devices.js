// The devices of a study: the timeline of their units, their utilisation and memory.

import { get, link } from "../api.js";
import { card, empty, fact, h, replace, state, throttled } from "../dom.js";
import { bytes, duration, percent } from "../format.js";
import { Gantt } from "../gantt.js";
import { Chart, colour, label, seriesColour } from "../plots.js";
import { followStudy, tabs } from "../study_head.js";

const BINS = 240;

export async function show(content, { frame }, id) {
  const path = `/api/studies/${id}`;
  const [study, devices] = await Promise.all([get(path), get(`${path}/devices`)]);
  frame.title([[study.name, `/studies/${id}`], ["Devices"]]);
  const notices = h("div", { "aria-live": "polite" }), top = h("div", {}), below = h("div", { class: "grid" });
  let pool = devices, timeline = null;
  const gantt = new Gantt((start, end) => load(start, end), (trial) => location.assign(link(`/studies/${id}/trials/${trial}`)));
  const drawing = card("What ran where", { id: "gantt", aside: [h("span", { class: "spacer" }), gantt.tools] }, gantt.element);
  replace(content, h("div", { class: "head" }, h("h1", {}, study.name), state(study.state)), notices, tabs(study, "Devices"), top, drawing, below);
  const charts = seriesCharts(below, () => timeline, () => pool);
  drawTop(top, pool);

  async function load(start, end) {
    const whole = gantt.start === undefined || gantt.whole;
    timeline = await get(`${path}/timeline?bins=${BINS}${whole ? "" : `&start=${start}&end=${end}`}`);
    const names = [...new Set([...pool.devices.map((one) => one.name), ...timeline.units.map((unit) => unit.device)])];
    names.sort((a, b) => (a === "builder") - (b === "builder") || a.localeCompare(b, undefined, { numeric: true }));
    gantt.bounds(pool.start ?? timeline.start, pool.end ?? timeline.end, names);
    gantt.set(timeline);
    charts.forEach((chart) => chart.draw());
  }

  if (!pool.units) replace(drawing, empty("No unit of work has been recorded yet."));
  else await load();
  let known = pool.last_unit;
  const refresh = throttled(async () => {
    const first = !pool.units;
    pool = await get(`${path}/devices`);
    drawTop(top, pool);
    if (first) { replace(drawing, h("header", {}, h("h2", {}, "What ran where"), h("span", { class: "spacer" }), gantt.tools), gantt.element); await load(); known = pool.last_unit; return; }
    const fresh = timeline?.exact ? await get(`${path}/units?after=${known}`) : null;
    known = pool.last_unit;
    if (fresh === null || gantt.units.length > 4000) { gantt.bounds(pool.start, pool.end, gantt.devices); await load(gantt.start, gantt.end); return; }
    gantt.bounds(pool.start, pool.end, [...new Set([...gantt.devices, ...fresh.map((unit) => unit.device)])]);
    gantt.add(fresh);
    series();
  }, 1000);
  const series = throttled(() => load(gantt.start, gantt.end), 5000);
  const stop = followStudy(study, frame, notices, (news) => { if (news.last_unit !== known) refresh(); });
  return () => { stop(); gantt.close(); charts.forEach((chart) => chart.close()); };
}

function drawTop(top, pool) {
  const ratio = pool.bound ? pool.makespan / pool.bound : null;
  replace(top, h("dl", { class: "facts" },
    fact("Devices busy", percent(pool.utilisation), `${pool.devices.length} devices, ${pool.units} units`),
    fact("Makespan", duration(pool.makespan), "from the first unit on a device to the last"),
    fact("Lower bound", duration(pool.bound), pool.bound_reason),
    fact("Makespan / bound", ratio === null ? "" : ratio.toFixed(2), "1 is the least possible"),
    pool.spilled_bytes ? fact("Spilled at most", bytes(pool.spilled_bytes), "in host memory and on disk") : null),
  pool.devices.length ? h("section", { class: "card", style: { marginTop: "1rem" }, "aria-label": "Devices" }, h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Device", "Busy", "", "Work", "Memory budget"].map((text, i) => h("th", { class: i > 2 ? "number" : i === 2 ? "roomy" : null }, text)))),
    h("tbody", {}, pool.devices.map((one) => h("tr", {}, h("td", {}, one.name), h("td", { class: "number", style: { textAlign: "left" } }, percent(one.utilisation)),
      h("td", { class: "roomy", style: { width: "45%" } }, h("div", { class: "meter", style: { marginTop: ".4rem" } }, h("i", { class: "used", style: { width: `${100 * one.utilisation}%` } }))),
      h("td", { class: "number" }, duration(one.seconds)), h("td", { class: "number" }, one.budget_bytes ? bytes(one.budget_bytes) : "not recorded"))))))) : null);
}

/** Utilisation, memory and spilling over the time range shown in the Gantt. */
function seriesCharts(below, timeline, pool) {
  const chart = (title, says, make) => {
    const element = h("div", { class: "plot" });
    const section = card(title, { id: title.toLowerCase().replaceAll(" ", "-") }, h("p", { class: "small soft" }, says), element);
    below.append(section);
    return new Chart(element, () => { const made = timeline() && make(timeline()); section.hidden = !made; return made || null; });
  };
  const times = (found) => { const origin = pool().start ?? found.start; return Array.from({ length: found.bins }, (_, i) => found.start - origin + ((i + 0.5) * (found.end - found.start)) / found.bins); };
  const axis = { title: { text: "seconds since the start" } };
  const legend = { showlegend: true, legend: { orientation: "h", y: 1.13 } };
  const mebibytes = (counts) => counts.map((count) => (count === null ? null : count / 2 ** 20));
  const memoryAxis = { title: { text: "MiB" }, rangemode: "tozero" };
  const budgets = () => new Map(pool().devices.map((one) => [one.name, one.budget_bytes]));
  const lines = (found, counts) => found.series.map((one, i) => [one, i, counts(one)]).filter(([, , some]) => some.some((count) => count !== null))
    .map(([one, i, some]) => ({ x: times(found), y: mebibytes(some), name: label(one.device), mode: "lines", connectgaps: false, line: { width: 1.6, color: seriesColour(i), shape: "hvh" }, hovertemplate: `${label(one.device)}: %{y:.1f} MiB<extra></extra>` }));
  const measured = (found) => found.series.filter((one) => one.resident_bytes.some((count) => count !== null));
  return [
    chart("Utilisation", "The share of the time that a device worked.", (found) => ({
      traces: found.series.map((one, i) => ({ x: times(found), y: one.busy, name: label(one.device), mode: "lines", line: { width: 1.6, color: seriesColour(i), shape: "hvh" }, hovertemplate: `${label(one.device)}: %{y:.0%}<extra></extra>` })),
      layout: { xaxis: axis, yaxis: { tickformat: ".0%", range: [0, 1.04] }, ...legend },
    })),
    chart("Resident memory", "The most that units of work held on their device.", (found) => {
      const some = measured(found);
      if (!some.length) return null;
      const traces = lines(found, (one) => one.resident_bytes);
      // The budget is drawn only if it is near the used memory; otherwise it would flatten the other lines.
      const most = Math.max(...some.flatMap((one) => one.resident_bytes.map((count) => count ?? 0)));
      const budget = Math.max(...some.map((one) => budgets().get(one.device) ?? 0));
      if (budget && budget < 20 * most) traces.push({ x: [times(found)[0], times(found).at(-1)], y: mebibytes([budget, budget]), name: "budget", mode: "lines", line: { dash: "dot", width: 1.5, color: colour("bad") }, hovertemplate: `budget ${bytes(budget)}<extra></extra>` });
      return { traces, layout: { xaxis: axis, yaxis: memoryAxis, ...legend } };
    }),
    chart("Free memory", "What was left of each device's budget.", (found) => {
      const traces = lines(found, (one) => one.resident_bytes.map((count) => (count === null || !budgets().get(one.device) ? null : Math.max(0, budgets().get(one.device) - count))));
      return traces.length ? { traces, layout: { xaxis: axis, yaxis: memoryAxis, ...legend } } : null;
    }),
    chart("Spilled memory", "What lay in the spill store, for all trials together.", (found) => {
      const { host_bytes: host, disk_bytes: disk } = found.spilled;
      if (![...host, ...disk].some(Boolean)) return null;
      const area = (counts, name, i) => ({ x: times(found), y: mebibytes(counts), name, mode: "lines", stackgroup: "spilled", line: { width: 1.2, color: seriesColour(i), shape: "hv" }, hovertemplate: `${name}: %{y:.1f} MiB<extra></extra>` });
      return { traces: [area(host, "in host memory", 1), ...(disk.some(Boolean) ? [area(disk, "on disk", 2)] : [])], layout: { xaxis: axis, yaxis: memoryAxis, ...legend } };
    }),
    chart("Spill traffic", "What was written to the spill store and read back.", (found) => {
      const moved = found.series.some((one) => one.read_bytes.some(Boolean) || one.written_bytes.some(Boolean));
      if (!moved) return null;
      const total = (key) => found.series[0][key].map((_, i) => found.series.reduce((sum, one) => sum + one[key][i], 0) / 2 ** 20);
      const width = (found.end - found.start) / found.bins;
      return {
        traces: [["written_bytes", "written", 2], ["read_bytes", "read back", 1]].map(([key, name, i]) => ({ type: "bar", x: times(found), y: total(key), name, marker: { color: seriesColour(i) }, hovertemplate: `${name} %{y:.1f} MiB<extra></extra>` })),
        layout: { barmode: "stack", bargap: 0, xaxis: axis, yaxis: { title: { text: `MiB in ${duration(width)}` } }, ...legend },
      };
    }),
  ];
}
