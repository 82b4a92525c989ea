// Parallel coordinates on a canvas: each line is a trial, the last axis its value; drag along an axis to pick a range.

import { link } from "./api.js";
import { h } from "./dom.js";
import { number, param } from "./format.js";
import { colour } from "./plots.js";

const TOP = 34, BOTTOM = 26, SIDE = 46, HEIGHT = 330, MOST_AXES = 11;

export class ParallelCoordinates {
  constructor(study) {
    this.study = study;
    this.brushes = new Map();
    this.canvas = h("canvas", { class: "parallel", height: HEIGHT, role: "img", "aria-label": "Parallel coordinates of completed trials" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.says = h("p", { class: "small soft" });
    this.element = h("div", {}, h("div", { class: "drawing" }, this.canvas, this.tip), this.says);
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.near = null; this.draw(); });
    this.again = () => this.draw();
    addEventListener("themechange", this.again);
    this.watch = new ResizeObserver(this.again);
    this.watch.observe(this.element);
  }

  close() { removeEventListener("themechange", this.again); this.watch.disconnect(); }

  set(sample) {
    this.sample = sample;
    const value = { name: this.study.metrics[0], kind: "float", log: false, choices: null, values: sample.values.map((row) => row[0]) };
    this.axes = [...mostPresent(sample.axes, MOST_AXES), value].map(scaled);
    this.draw();
  }

  draw() {
    const { canvas, axes, sample } = this;
    const width = canvas.parentElement?.clientWidth;
    if (!axes || !width) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = HEIGHT * ratio; canvas.style.height = `${HEIGHT}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, HEIGHT);
    this.step = axes.length > 1 ? (width - 2 * SIDE) / (axes.length - 1) : 0;
    const inside = sample.numbers.map((_, i) => this.picked(i));
    const last = axes.at(-1);
    const maximize = this.study.directions[0] === "maximize";
    const order = sample.numbers.map((_, i) => i).sort((a, b) => inside[a] - inside[b] || (last.at[a] ?? 0.5) * (maximize ? 1 : -1) - (last.at[b] ?? 0.5) * (maximize ? 1 : -1));
    const faint = Math.min(0.75, Math.max(0.12, 60 / order.length));
    for (const i of order) {
      const good = maximize ? last.at[i] ?? 0 : 1 - (last.at[i] ?? 1);
      pen.strokeStyle = i === this.near ? colour("ink") : inside[i] ? blend(good, good > 0.97 ? 0.95 : faint) : `color-mix(in srgb, ${colour("line")} 55%, transparent)`;
      pen.lineWidth = i === this.near ? 2.4 : inside[i] && good > 0.97 ? 1.8 : 1;
      this.line(pen, i);
    }
    axes.forEach((axis, a) => this.axis(pen, axis, a));
    this.summary(inside);
  }

  line(pen, i) {
    pen.beginPath();
    let down = false;
    this.axes.forEach((axis, a) => {
      const at = axis.at[i];
      if (at === null) { down = false; return; }
      const x = SIDE + a * this.step, y = place(at);
      if (down) pen.lineTo(x, y); else pen.moveTo(x, y);
      down = true;
    });
    pen.stroke();
  }

  axis(pen, axis, a) {
    const x = SIDE + a * this.step;
    pen.strokeStyle = colour("faint"); pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(x, TOP); pen.lineTo(x, HEIGHT - BOTTOM); pen.stroke();
    const font = getComputedStyle(document.body).fontFamily;
    pen.font = `600 11.5px ${font}`; pen.fillStyle = colour("ink"); pen.textAlign = "center";
    pen.fillText(cut(pen, axis.name, this.step - 8 || 80), x, 13);
    pen.font = `10.5px ${font}`; pen.fillStyle = colour("soft");
    for (const [at, text] of axis.ticks) {
      const y = place(at);
      const shown = cut(pen, text, this.step - 6 || 80), line = at === 1 ? y - 6 : at === 0 ? y + 15 : y + 3.5;
      pen.strokeStyle = colour("surface"); pen.lineWidth = 4; pen.strokeText(shown, x, line);
      pen.fillText(shown, x, line);
    }
    const brush = this.brushes.get(axis.name);
    if (brush) {
      pen.fillStyle = `color-mix(in srgb, ${colour("accent")} 35%, transparent)`;
      pen.fillRect(x - 6, place(brush[1]), 12, place(brush[0]) - place(brush[1]));
    }
  }

  picked(i) {
    for (const axis of this.axes) {
      const brush = this.brushes.get(axis.name);
      if (brush && (axis.at[i] === null || axis.at[i] < brush[0] || axis.at[i] > brush[1])) return false;
    }
    return true;
  }

  summary(inside) {
    const { sample, study } = this;
    const shown = sample.numbers.length < sample.complete ? `${sample.numbers.length} of ${sample.complete} completed trials: the best, and an even selection of the others.` : `${sample.complete} completed trials.`;
    if (!this.brushes.size) { this.says.textContent = `${shown} Drag along an axis to pick a range.`; return; }
    const rows = sample.numbers.map((trial, i) => ({ trial, value: sample.values[i][0], inside: inside[i] })).filter((row) => row.inside && typeof row.value === "number");
    rows.sort((a, b) => (study.directions[0] === "maximize" ? b.value - a.value : a.value - b.value));
    this.says.replaceChildren(`${rows.length} trials in the ranges`, ...(rows.length ? ["; the best is ", h("a", { href: link(`/studies/${study.id}/trials/${rows[0].trial}`) }, `trial ${rows[0].trial}`), ` with ${number(rows[0].value)}`] : []), ". ", h("button", { class: "quiet", onclick: () => { this.brushes.clear(); this.draw(); } }, "Clear"));
  }

  spot(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const a = Math.round((x - SIDE) / (this.step || 1));
    return { x, y, a: Math.min(Math.max(a, 0), this.axes.length - 1), at: Math.min(1, Math.max(0, (HEIGHT - BOTTOM - y) / (HEIGHT - BOTTOM - TOP))) };
  }

  press(event) {
    const spot = this.spot(event);
    if (Math.abs(spot.x - (SIDE + spot.a * this.step)) > 18) return;
    this.drag = { axis: this.axes[spot.a].name, from: spot.at };
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.axes) return;
    const spot = this.spot(event);
    if (this.drag) {
      this.brushes.set(this.drag.axis, [Math.min(this.drag.from, spot.at), Math.max(this.drag.from, spot.at)]);
      this.draw();
      return;
    }
    this.point(spot);
  }

  release() {
    if (!this.drag) return;
    const brush = this.brushes.get(this.drag.axis);
    if (!brush || brush[1] - brush[0] < 0.01) this.brushes.delete(this.drag.axis);
    this.drag = null;
    this.draw();
  }

  /** Show the name of the trial whose line is nearest to the pointer. */
  point({ x, y }) {
    const left = Math.min(Math.max(Math.floor((x - SIDE) / (this.step || 1)), 0), this.axes.length - 2);
    const share = (x - SIDE - left * this.step) / (this.step || 1);
    let near = null, least = 7;
    this.sample.numbers.forEach((_, i) => {
      const a = this.axes[left]?.at[i], b = this.axes[left + 1]?.at[i];
      if (a === null || b === null || a === undefined || b === undefined || !this.picked(i)) return;
      const gap = Math.abs(place(a + (b - a) * share) - y);
      if (gap < least) { least = gap; near = i; }
    });
    this.tip.hidden = near === null;
    if (near !== null) {
      this.tip.textContent = `trial ${this.sample.numbers[near]}\n${this.study.metrics[0]} ${number(this.sample.values[near][0])}`;
      this.tip.style.left = `${Math.min(x + 12, this.canvas.clientWidth - 140)}px`;
      this.tip.style.top = `${y + 12}px`;
    }
    if (near !== this.near) { this.near = near; this.draw(); }
  }
}

/** If there are many parameters, keep those that most trials have, in order: conditional ones would be mostly empty. */
export function mostPresent(axes, limit) {
  if (axes.length <= limit) return axes;
  const present = (axis) => axis.values.filter((value) => value !== null).length;
  const kept = new Set([...axes].sort((a, b) => present(b) - present(a)).slice(0, limit));
  return axes.filter((axis) => kept.has(axis));
}

const place = (at) => HEIGHT - BOTTOM - at * (HEIGHT - BOTTOM - TOP);

/** A colour from grey-blue for the worst to the accent for the best. */
function blend(good, alpha) {
  return `color-mix(in srgb, color-mix(in srgb, ${colour("accent")} ${Math.round(100 * good ** 2)}%, ${colour("calm")}) ${Math.round(100 * alpha)}%, transparent)`;
}

/** Positions from 0 to 1 along an axis, and its labels. */
function scaled(axis) {
  if (axis.choices) {
    const most = Math.max(1, axis.choices.length - 1);
    return { ...axis, at: axis.values.map((v) => (v === null ? null : axis.choices.length === 1 ? 0.5 : v / most)), ticks: axis.choices.map((choice, i) => [axis.choices.length === 1 ? 0.5 : i / most, param(choice)]) };
  }
  const numbers = axis.values.filter((v) => typeof v === "number");
  const way = axis.log && numbers.every((v) => v > 0) ? Math.log : (v) => v;
  const low = numbers.reduce((a, b) => Math.min(a, b), Infinity), high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  const span = way(high) - way(low) || 1;
  return { ...axis, at: axis.values.map((v) => (typeof v === "number" ? (high === low ? 0.5 : (way(v) - way(low)) / span) : null)), ticks: numbers.length ? [[1, number(high, 3)], [0, number(low, 3)]] : [] };
}

function cut(pen, text, room) {
  let shown = String(text);
  while (shown.length > 2 && pen.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
  return shown;
}
