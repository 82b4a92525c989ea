// Plotly charts in this page's colours. The large Plotly script is loaded when the first chart comes into view.

import { report } from "./api.js";
import { h, whenSeen } from "./dom.js";

let loading = null;

function plotly() {
  if (report) return Promise.resolve(window.Plotly);
  loading ||= new Promise((resolve, reject) => {
    const script = h("script", { src: "/static/plotly.min.js" });
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("the chart script cannot be loaded"));
    document.head.append(script);
  });
  return loading;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The colour of a trial: neighbours in number are far apart in hue. */
export function trialColour(number, alpha = 1) {
  const dark = document.documentElement.dataset.theme === "dark";
  return `hsl(${(number * 137.508) % 360} ${dark ? "55% 62%" : "52% 46%"} / ${alpha})`;
}

const SERIES = {
  light: ["#0f766e", "#2563eb", "#b45309", "#7c3aed", "#be185d", "#4d7c0f", "#0e7490", "#9f1239"],
  dark: ["#2dd4bf", "#60a5fa", "#fbbf24", "#a78bfa", "#f472b6", "#a3e635", "#22d3ee", "#fb7185"],
};
export function seriesColour(index) {
  const colours = SERIES[document.documentElement.dataset.theme] ?? SERIES.light;
  return colours[index % colours.length];
}

function layout(own) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, tickfont: { size: 11 } };
  const titled = (given) => ({ ...axis, ...given, ...(given?.title ? { title: { font: { size: 12 }, standoff: 8, ...given.title } } : {}) });
  const { xaxis, yaxis, ...rest } = own;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 12, t: 8, b: 40 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("soft") },
    hoverlabel: { font: { family: getComputedStyle(document.body).fontFamily, size: 12 } },
    showlegend: false, autosize: true, hovermode: "closest",
    xaxis: titled(xaxis), yaxis: titled(yaxis), ...rest,
  };
}

const CONFIG = { displaylogo: false, responsive: true, displayModeBar: "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };

/**
 * A chart that draws itself when it comes into view and again when its data or the theme change.
 * `make()` returns {traces, layout, click}, or null if there is nothing to draw.
 */
export class Chart {
  constructor(element, make) {
    this.element = element;
    this.make = make;
    this.seen = false;
    whenSeen(element, () => { this.seen = true; this.draw(); });
    this.again = () => this.draw();
    addEventListener("themechange", this.again);
  }

  async draw() {
    if (!this.seen || !this.element.isConnected) return;
    const made = this.make();
    if (!made) return;
    const Plotly = await plotly();
    if (!this.element.isConnected) return;
    if (!this.element.querySelector(".plot-container")) this.element.replaceChildren();
    await Plotly.react(this.element, made.traces, layout(made.layout || {}), CONFIG);
    this.drawn = true;
    this.element.dataset.drawn = "yes";
    if (made.click && !this.clicking) {
      this.clicking = true;
      this.element.on("plotly_click", (event) => made.click(event.points[0]));
    }
  }

  /** Add points to the ends of traces, without drawing the others again. */
  async extend(update, traces) {
    if (this.drawn && this.element.isConnected) (await plotly()).extendTraces(this.element, update, traces);
  }

  close() {
    removeEventListener("themechange", this.again);
    if (this.drawn) window.Plotly.purge(this.element);
  }
}

/** A number from JSON; words for non-finite numbers are left out of charts. */
export function finite(values) {
  return values.map((value) => (typeof value === "number" ? value : null));
}

/** Escape text for Plotly, which interprets some HTML in labels. */
export function label(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
