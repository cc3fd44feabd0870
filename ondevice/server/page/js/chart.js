/** uPlot with this page's colours, sizes and words for those who cannot see it. */

import { h } from "./dom.js";
import { number } from "./format.js";

const { uPlot } = window;
const HEIGHT = 240;
const dark = window.matchMedia("(prefers-color-scheme: dark)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/**
 * A chart in a figure.
 * @param options title, x (what the horizontal axis counts), y, and `series`: {label, colour (a CSS variable), points,
 *   width, dash, scale, digits}; a series with scale "y2" has the axis on the right, labelled `y2`
 */
export class Chart {
  constructor(options, signal) {
    this.options = options;
    this.data = [[], ...options.series.map(() => [])];
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
    if (this.plot) this.plot.setData(data);
    else this.#make();
    this.box.setAttribute("aria-label", this.#words());
  }

  #fit() {
    const width = Math.floor(this.box.clientWidth);
    if (!width) return;
    if (!this.plot) this.#make();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  #make() {
    const width = Math.floor(this.box.clientWidth);
    if (!width) return;
    this.plot?.destroy();
    const { x, y, y2, series } = this.options;
    const narrow = width < 480;
    const axis = (more) => ({
      stroke: colour("text-soft"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { stroke: colour("line"), width: 1 },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      labelSize: 18,
      ...more,
    });
    const values = (_, ticks) => ticks.map((tick) => number(tick));
    this.plot = new uPlot(
      {
        width,
        height: HEIGHT,
        legend: { live: true },
        cursor: { drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => [low ?? 0, Math.max(high ?? 1, (low ?? 0) + 1)] } },
        axes: [
          axis({ label: x, size: 34, values }),
          axis({ label: narrow ? undefined : y, size: narrow ? 44 : 52, values }),
          ...(y2
            ? [axis({ scale: "y2", side: 1, label: narrow ? undefined : y2, size: 44, grid: { show: false }, values })]
            : []),
        ],
        series: [{ label: x }, ...series.map((one) => this.#series(one))],
      },
      this.data,
      this.box,
    );
  }

  #series({ label, colour: name, points = false, width = 2, dash, scale = "y", digits = 4 }) {
    const stroke = colour(name);
    return {
      label,
      scale,
      stroke,
      width: points === "only" ? 0 : width,
      dash,
      spanGaps: false,
      paths: points === "only" ? () => null : undefined,
      points: { show: points !== false, size: points === "only" ? 4 : 7, stroke, fill: stroke },
      value: (_, value) => number(value, digits) || "–",
    };
  }

  #words() {
    const [x, ...columns] = this.data;
    if (!x.length) return `${this.options.title}: nothing yet`;
    const parts = columns.map((column, index) => {
      const seen = column.filter((value) => Number.isFinite(value));
      if (!seen.length) return null;
      return `${this.options.series[index].label} from ${number(seen[0])} to ${number(seen[seen.length - 1])}`;
    });
    const range = `${this.options.x} ${number(x[0])} to ${number(x[x.length - 1])}`;
    return `${this.options.title}: ${range}; ${parts.filter(Boolean).join("; ")}`;
  }
}

/** Columns of several curves over one x, as `set` takes them. */
export function joined(...tables) {
  const full = tables.filter((columns) => columns[0].length);
  if (!full.length) return [[], ...tables.flatMap((columns) => columns.slice(1))];
  const filled = tables.map((columns) => columns);
  return uPlot.join(
    filled.map((columns) =>
      columns[0].length ? columns : [[full[0][0][0]], ...columns.slice(1).map(() => [undefined])],
    ),
  );
}

/** The colours of several runs beside each other. */
export const RUN_COLOURS = ["run-1", "run-2", "run-3", "run-4", "run-5", "run-6"];
