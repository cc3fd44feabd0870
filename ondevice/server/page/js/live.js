/** The charts of a job: loss and evaluations, speed, memory, and what the machine's sensors say. */

import { Chart, joined } from "./chart.js";
import { h, table } from "./dom.js";
import { bytes, number, percent } from "./format.js";

const MIB = 1024 * 1024;
const ROWS = 12;
const SAMPLES = 900;

/** All charts of a live job. */
export class Charts {
  constructor(signal) {
    this.signal = signal;
    this.loss = new Chart(
      {
        title: "Loss",
        x: "steps",
        y: "nats per token",
        y2: "accuracy",
        share: true,
        series: [
          { label: "step", colour: "chart-faint", points: "only" },
          { label: "mean", colour: "chart-main" },
          { label: "evaluation", colour: "chart-second", points: true, dash: [6, 4] },
          { label: "accuracy", colour: "chart-third", points: true, width: 1, scale: "y2" },
        ],
      },
      signal,
    );
    this.speed = new Chart(
      {
        title: "Tokens per second",
        x: "steps",
        y: "tokens/s",
        zero: true,
        series: [
          { label: "step", colour: "chart-faint", points: "only" },
          { label: "mean", colour: "chart-main" },
        ],
      },
      signal,
    );
    this.memory = new Chart(
      {
        title: "Peak memory so far",
        x: "steps",
        y: "MiB",
        zero: true,
        series: [
          { label: "process, MiB", colour: "chart-main" },
          { label: "GPU, MiB", colour: "chart-second" },
        ],
      },
      signal,
    );
    this.small = h("div", { class: "chart-pair" }, this.speed.element, this.memory.element);
    this.element = h("section", { class: "charts", "aria-label": "Curves" }, this.loss.element, this.small);
    this.samples = [];
  }

  draw(curve) {
    const mebibytes = (column) => column.map((value) => (value === null ? null : value / MIB));
    this.loss.set(joined(curve.smoothed("loss"), [...curve.judged("loss"), curve.judged("accuracy")[1]]));
    this.speed.set(curve.smoothed("tokens_per_s"));
    const [x, process] = curve.column("peak_memory_bytes");
    this.memory.set([x, mebibytes(process), mebibytes(curve.column("peak_device_bytes")[1])]);
  }

  /** What the machine's sensors say since the page was opened; a chart only where there are sensors. */
  machine(machine, own) {
    const heat = { ...machine.temperatures_c, ...named(machine.gpus, "temperature_c") };
    const watts = { ...machine.power_w, ...named(machine.gpus, "power_w") };
    if (!own || (!Object.keys(heat).length && !Object.keys(watts).length)) return;
    if (!this.sensors) {
      this.begun = machine.time_s;
      this.keys = [
        ...Object.keys(heat)
          .slice(0, 3)
          .map((key) => ["heat", key]),
        ...Object.keys(watts)
          .slice(0, 3)
          .map((key) => ["watts", key]),
      ];
      this.sensors = new Chart(
        {
          title: "Temperature and power",
          x: "seconds",
          y: "°C",
          y2: "W",
          series: this.keys.map(([kind, key], index) => ({
            label: `${key}, ${kind === "heat" ? "°C" : "W"}`,
            colour: `run-${index + 1}`,
            scale: kind === "heat" ? "y" : "y2",
          })),
        },
        this.signal,
      );
      this.small.append(this.sensors.element);
    }
    this.samples.push([
      machine.time_s - this.begun,
      ...this.keys.map(([kind, key]) => (kind === "heat" ? heat : watts)[key] ?? null),
    ]);
    if (this.samples.length > SAMPLES) this.samples.shift();
    this.sensors.set(this.samples[0].map((_, column) => this.samples.map((sample) => sample[column])));
  }
}

/** {"GPU 0": value} of the GPUs that say it. */
export function named(gpus, field) {
  return Object.fromEntries(
    gpus.map((gpu, index) => [`GPU ${index}`, gpu[field]]).filter(([, value]) => value !== null),
  );
}

/** The figures behind the curves, for those who read rather than look. */
export function figuresTable(curve) {
  const steps = curve.steps.slice(-ROWS).reverse();
  const found = [
    table(
      "The last steps",
      ["Step", "Loss", "Learning rate", "Tokens/s", "Memory"],
      steps.map((step) => [
        number(step.step + 1),
        number(step.loss),
        number(step.learning_rate),
        number(step.tokens_per_s),
        bytes(step.peak_memory_bytes),
      ]),
    ),
  ];
  if (curve.evaluations.length) {
    found.push(
      table(
        "Evaluations",
        ["After step", "Loss", "Accuracy", "Best so far"],
        [...curve.evaluations]
          .reverse()
          .map((one) => [number(one.step), number(one.loss), percent(one.accuracy), one.best ? "yes" : ""]),
      ),
    );
  }
  return found;
}
