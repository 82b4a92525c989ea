// The Gantt of units on a canvas: a row for each device, a colour for each trial; wheel or buttons zoom, dragging moves.

import { h } from "./dom.js";
import { bytes, duration } from "./format.js";
import { colour, trialColour } from "./plots.js";

const ROW = 34, GAP = 8, LEFT = 76, AXIS = 26;

export class Gantt {
  /** `load(start, end)` is called when the shown time range changes; `open(trial)` when a trial is clicked. */
  constructor(load, open) {
    this.load = load;
    this.open = open;
    this.canvas = h("canvas", { class: "gantt", tabindex: 0, role: "img", "aria-label": "Units of work on devices over time" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.says = h("p", { class: "small soft" });
    const buttons = [["−", "Zoom out", () => this.zoom(2)], ["+", "Zoom in", () => this.zoom(0.5)], ["All", "Show all", () => this.all()]];
    this.tools = h("div", { class: "row" }, buttons.map(([text, title, act]) => h("button", { title, "aria-label": title, onclick: act }, text)));
    this.element = h("div", {}, h("div", { class: "drawing" }, this.canvas, this.tip), this.says);
    this.listen();
    this.again = () => this.draw();
    addEventListener("themechange", this.again);
    this.watch = new ResizeObserver(this.again);
    this.watch.observe(this.element);
  }

  close() { removeEventListener("themechange", this.again); this.watch.disconnect(); clearTimeout(this.asking); }

  /** Set the time range of the whole search, and the devices in order. */
  bounds(first, last, devices) {
    const follow = this.end === undefined || this.end >= this.last - 1e-6;
    const whole = this.start === undefined || this.start <= this.first + 1e-6;
    this.first = first; this.last = Math.max(last, first + 1e-3); this.devices = devices;
    if (follow) { const width = this.end - this.start; this.end = this.last; this.start = whole ? this.first : this.end - width; }
  }

  set(timeline) { this.units = timeline.units; this.exact = timeline.exact; this.draw(); }

  add(units) { this.units.push(...units); this.draw(); }

  draw() {
    const width = this.canvas.parentElement?.clientWidth;
    if (!this.units || !width || !this.devices) return;
    const height = this.devices.length * (ROW + GAP) + AXIS;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio; this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const room = width - LEFT, scale = room / (this.end - this.start);
    this.scale = scale;
    this.devices.forEach((device, i) => {
      pen.fillStyle = colour("sunken"); pen.fillRect(LEFT, i * (ROW + GAP), room, ROW);
      pen.fillStyle = colour("soft"); pen.textAlign = "left"; pen.textBaseline = "middle";
      pen.fillText(device, 0, i * (ROW + GAP) + ROW / 2, LEFT - 8);
    });
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, room, height); pen.clip();
    const rows = new Map(this.devices.map((device, i) => [device, i]));
    for (const unit of this.units) this.unit(pen, unit, rows.get(unit.device), scale);
    pen.restore();
    this.axis(pen, width, height, scale);
    this.says.textContent = this.exact ? `${this.units.length} units. Wheel or +/− zooms, dragging moves, a click opens the trial.` : "Too many units to draw: each piece shows the trial that worked most in it. Zoom in to see units.";
    this.canvas.dataset.start = this.start; this.canvas.dataset.end = this.end; this.canvas.dataset.units = this.units.length;
  }

  unit(pen, unit, row, scale) {
    if (row === undefined) return;
    const x = LEFT + (unit.started - this.start) * scale, w = unit.seconds * scale, y = row * (ROW + GAP);
    if (x + w < LEFT || x > this.canvas.clientWidth) return;
    pen.fillStyle = trialColour(unit.number, ["train", "forward", "forward-backward", "backward", "weights", "", "objective"].includes(unit.kind) || unit.kind.startsWith("step") || unit.kind.startsWith("train ") ? 0.95 : 0.55);
    const gap = w > 4 ? 0.5 : 0;
    pen.fillRect(x, y, Math.max(w - gap, 0.7), ROW);
    if (unit === this.near) { pen.strokeStyle = colour("ink"); pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, Math.max(w - 2, 1), ROW - 2); }
    if (w > 22) {
      pen.fillStyle = "#fff"; pen.textAlign = "center"; pen.textBaseline = "middle";
      pen.fillText(w > 70 && unit.kind ? `${unit.number} ${unit.kind}` : unit.number, x + w / 2, y + ROW / 2, w - 4);
    }
  }

  axis(pen, width, height, scale) {
    const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800];
    const step = steps.find((one) => one * scale >= 84) ?? 2592000;
    pen.fillStyle = colour("faint"); pen.textAlign = "center"; pen.textBaseline = "alphabetic"; pen.strokeStyle = colour("line"); pen.lineWidth = 1;
    for (let at = Math.ceil((this.start - this.first) / step) * step; at <= this.end - this.first; at += step) {
      const x = LEFT + (this.first + at - this.start) * scale;
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - AXIS + 4); pen.stroke();
      pen.fillText(at < 1e-9 ? "0" : duration(at), Math.min(Math.max(x, LEFT + 12), width - 24), height - 6);
    }
  }

  zoom(by, around = (this.start + this.end) / 2) {
    const whole = this.last - this.first;
    const width = Math.min(whole, Math.max((this.end - this.start) * by, Math.min(whole, 1e-3)));
    const share = (around - this.start) / (this.end - this.start);
    this.to(around - share * width, width);
  }

  all() { this.to(this.first, this.last - this.first); }

  to(start, width) {
    this.start = Math.min(Math.max(start, this.first), this.last - width);
    this.end = this.start + width;
    this.draw();
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.load(this.start, this.end), 150);
  }

  get whole() { return this.start <= this.first + 1e-6 && this.end >= this.last - 1e-6; }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const device = this.devices?.[Math.floor(y / (ROW + GAP))];
    const time = this.start + (x - LEFT) / this.scale;
    const slack = 2 / this.scale;
    return { x, y, time, unit: this.units?.find((unit) => unit.device === device && unit.started - slack <= time && time <= unit.started + unit.seconds + slack && y % (ROW + GAP) <= ROW) };
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      if (!this.units) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.to(this.start + event.deltaX / this.scale, this.end - this.start);
      else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event).time);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { this.drag = { x: event.clientX, start: this.start, moved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerup", (event) => {
      const { unit } = this.at(event);
      if (this.drag && !this.drag.moved && unit) this.open(unit.number);
      this.drag = null;
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.near = null; this.draw(); });
    canvas.addEventListener("dblclick", () => this.all());
    canvas.addEventListener("keydown", (event) => {
      const width = this.end - this.start;
      const keys = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.all(), ArrowLeft: () => this.to(this.start - width / 4, width), ArrowRight: () => this.to(this.start + width / 4, width) };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
  }

  moved(event) {
    if (this.drag && event.buttons) {
      const by = event.clientX - this.drag.x;
      if (Math.abs(by) > 3) this.drag.moved = true;
      if (this.drag.moved) this.to(this.drag.start - by / this.scale, this.end - this.start);
      return;
    }
    const { x, y, unit } = this.at(event);
    this.tip.hidden = !unit;
    if (unit) {
      const lines = [`trial ${unit.number}${unit.kind ? `, ${unit.kind}` : ""}${unit.shard === null ? "" : `, part ${unit.shard}`}`, `${duration(unit.seconds)}${unit.steps > 1 ? ` (${unit.steps} steps)` : ""} on ${unit.device}`];
      if (unit.peak_bytes) lines.push(`peak ${bytes(unit.peak_bytes)}`);
      if (unit.read_bytes || unit.written_bytes) lines.push(`read back ${bytes(unit.read_bytes || 0)}, wrote ${bytes(unit.written_bytes || 0)}`);
      this.tip.textContent = lines.join("\n");
      this.tip.style.left = `${Math.min(x + 12, this.canvas.clientWidth - 190)}px`;
      this.tip.style.top = `${y + 14}px`;
    }
    if (unit !== this.near) { this.near = unit; this.draw(); }
  }
}
