/** uPlot with this page's colours, sizes and words for those who cannot see it. */

import { h } from "./dom.js";
import { number } from "./format.js";

const { uPlot } = window;
const HEIGHT = 240;
const FONT = "12px system-ui, sans-serif";
const NARROW = 480;
/** Distances of the horizontal axis' ticks: whole numbers, as half a step means nothing. */
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const dark = window.matchMedia("(prefers-color-scheme: dark)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/**
 * A chart in a figure. Series without a value are left out until they have one.
 * @param options title, x (what the horizontal axis counts), y and y2 (labels of the axes left and right), `zero` (the
 *   axis begins there), `share` (the right axis goes from 0 to 1), and `series`: {label, colour (a CSS variable),
 *   points (true, or "only"), width, dash, scale ("y2" for the right axis)}
 */
export class Chart {
  constructor(options, signal) {
    this.options = options;
    this.data = [[], ...options.series.map(() => [])];
    this.used = "";
    this.box = h("div", { class: "plot", role: "img" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, options.title), this.box);
    this.watch = new ResizeObserver(() => this.#fit());
    this.watch.observe(this.box);
    dark.addEventListener("change", () => this.#make(), { signal });
    signal.addEventListener("abort", () => {
      this.watch.disconnect();
      this.plot?.destroy();
    });
  }

  /** Draw: a column of x, then one a series; undefined where a series has nothing at that x, null for a gap. */
  set(data) {
    this.data = data;
    this.box.setAttribute("aria-label", this.#words());
    if (this.plot && this.used === this.#filled().join()) this.plot.setData(this.#shown());
    else this.#make();
  }

  /** Numbers of the series that have a value. */
  #filled() {
    return this.options.series.map((_, index) => index).filter((index) => this.data[index + 1].some(Number.isFinite));
  }

  #shown() {
    return [this.data[0], ...this.#filled().map((index) => this.data[index + 1])];
  }

  #fit() {
    const width = Math.floor(this.box.clientWidth);
    if (!width) return;
    if (!this.plot || this.plot.width < NARROW !== width < NARROW) this.#make();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  #make() {
    const width = Math.floor(this.box.clientWidth);
    if (!width) return;
    this.plot?.destroy();
    this.used = this.#filled().join();
    const { x, series } = this.options;
    const shown = this.#filled().map((index) => series[index]);
    const options = {
      width,
      height: HEIGHT,
      legend: { live: true },
      cursor: { drag: { x: true, y: false } },
      scales: this.#scales(),
      axes: this.#axes(width < NARROW, shown),
      series: [{ label: x, value: (_, value) => number(value) || "–" }, ...shown.map(seriesOptions)],
    };
    this.plot = new uPlot(options, this.#shown(), this.box);
  }

  #scales() {
    const { zero, share } = this.options;
    const scales = { x: { time: false, range: (_, low, high) => [low ?? 0, Math.max(high ?? 1, (low ?? 0) + 1)] } };
    if (zero) scales.y = { range: (_, low, high) => [0, (high ?? 1) * 1.1 || 1] };
    if (share) scales.y2 = { range: [0, 1.05] };
    return scales;
  }

  #axes(narrow, shown) {
    const { x, y, y2, share } = this.options;
    const line = { stroke: colour("line"), width: 1 };
    const axis = (more) => ({
      stroke: colour("text-soft"),
      grid: line,
      ticks: line,
      font: FONT,
      labelFont: FONT,
      labelSize: 18,
      values: (_, ticks) => ticks.map((tick) => number(tick)),
      ...more,
    });
    const size = (_, values) => 24 + 7 * Math.max(1, ...(values ?? []).map((value) => value.length));
    const axes = [axis({ label: x, size: 34, incrs: WHOLE }), axis({ label: narrow ? undefined : y, size })];
    if (!shown.some((one) => one.scale === "y2")) return axes;
    const values = (_, ticks) => ticks.map((tick) => (share ? `${Math.round(100 * tick)}%` : number(tick)));
    return [
      ...axes,
      axis({ scale: "y2", side: 1, label: narrow ? undefined : y2, size, values, grid: { show: false } }),
    ];
  }

  #words() {
    const [x, ...columns] = this.data;
    if (!x.length) return `${this.options.title}: no values yet`;
    const parts = columns.map((column, index) => {
      const seen = column.filter(Number.isFinite);
      if (!seen.length) return null;
      return `${this.options.series[index].label} from ${number(seen[0])} to ${number(seen[seen.length - 1])}`;
    });
    const range = `${this.options.x} ${number(x[0])} to ${number(x[x.length - 1])}`;
    return `${this.options.title}: ${range}; ${parts.filter(Boolean).join("; ")}`;
  }
}

function seriesOptions({ label, colour: name, points = false, width = 2, dash, scale = "y" }) {
  const stroke = colour(name);
  const only = points === "only";
  return {
    label,
    scale,
    stroke,
    dash,
    width: only ? 0 : width,
    paths: only ? () => null : undefined,
    points: { show: points !== false, size: only ? 4 : 7, stroke, fill: stroke },
    value: (_, value) => number(value) || "–",
  };
}

/** Columns of several curves over one x, as `set` takes them. */
export function joined(...tables) {
  const first = tables.find((columns) => columns[0].length);
  if (!first) return [[], ...tables.flatMap((columns) => columns.slice(1))];
  const nothing = (columns) => [[first[0][0]], ...columns.slice(1).map(() => [undefined])];
  return uPlot.join(tables.map((columns) => (columns[0].length ? columns : nothing(columns))));
}

/** The colours of several runs beside each other. */
export const RUN_COLOURS = ["run-1", "run-2", "run-3", "run-4", "run-5", "run-6"];
