/** Several runs over each other: their curves, and what was set differently. */

import { at, get } from "./api.js";
import { Chart, joined, RUN_COLOURS } from "./chart.js";
import { Curve } from "./curve.js";
import { announce, h, table, ticked } from "./dom.js";
import { bytes, duration, flatten, jobName, number, percent, setting } from "./format.js";

const POINTS = 500;

/** The view `#/compare?jobs=ID,ID`. */
export async function compareView(main, { query, signal }) {
  const jobs = (await get("/v1/jobs", signal)).filter((job) => job.progress.step > 0);
  const wanted = (query.get("jobs") ?? "").split(",").filter(Boolean);
  const chosen = new Set(wanted.length ? wanted : jobs.slice(0, 2).map((job) => job.id));
  const shown = h("div");
  const curves = new Map();
  const load = async () => {
    const picked = jobs.filter((job) => chosen.has(job.id)).slice(0, RUN_COLOURS.length);
    for (const job of picked) {
      if (curves.has(job.id)) continue;
      const curve = new Curve();
      for (const point of await get(`${at("/v1/jobs", job.id)}/metrics?points=${POINTS}`, signal)) curve.add(point);
      curves.set(job.id, curve);
    }
    shown.replaceChildren(...(picked.length ? parts(picked, curves, signal) : [h("p", {}, "No run selected.")]));
    for (const child of shown.children) child.draw?.();
    for (const box of boxes) box.disabled = !box.checked && chosen.size >= RUN_COLOURS.length;
    history.replaceState(null, "", `#/compare?jobs=${picked.map((job) => job.id).join(",")}`);
    announce(`${picked.length} runs compared`);
  };
  const boxes = [];
  const ticks = jobs.map((job) => {
    const { box, element } = ticked(
      `${jobName(job)} (${job.method ?? job.artifact}, ${job.state})`,
      chosen.has(job.id),
    );
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(job.id);
      else chosen.delete(job.id);
      load().catch((error) => {
        if (error.name !== "AbortError") throw error;
      });
    });
    boxes.push(box);
    return element;
  });
  main.append(
    h("h1", {}, "Compare runs"),
    jobs.length
      ? h(
          "fieldset",
          { class: "panel" },
          h("legend", {}, `Runs, at most ${RUN_COLOURS.length}`),
          h("div", { class: "ticks" }, ticks),
        )
      : h("p", {}, "No job has run a step yet."),
    shown,
  );
  if (jobs.length) await load();
}

function parts(jobs, curves, signal) {
  const names = jobs.map((job) => `\u2068${jobName(job)}\u2069 (${job.number})`);
  const chart = (title, y, columns, points, zero = false) => {
    const made = new Chart(
      {
        title,
        x: "steps",
        y,
        zero,
        series: jobs.map((_, index) => ({ label: names[index], colour: RUN_COLOURS[index], points })),
      },
      signal,
    );
    made.element.draw = () => made.set(joined(...columns));
    return made.element;
  };
  const mean = jobs.map((job) => meanOf(curves.get(job.id), "loss"));
  const judged = jobs.map((job) => curves.get(job.id).judged("loss"));
  const speeds = jobs.map((job) => meanOf(curves.get(job.id), "tokens_per_s"));
  return [
    chart("Loss of the steps, running mean", "nats per token", mean, false),
    judged.some(([x]) => x.length) ? chart("Loss of the evaluations", "nats per token", judged, true) : null,
    chart("Tokens per second, running mean", "tokens/s", speeds, false, true),
    table(
      "Results",
      ["Run", "State", "Steps", "Loss", "Evaluation", "Tokens/s", "Memory", "Ran for"],
      jobs.map((job, index) => results(job, names[index])),
    ),
    differences(jobs, names),
  ].filter(Boolean);
}

function meanOf(curve, field) {
  const [x, , mean] = curve.smoothed(field);
  return [x, mean];
}

function results(job, name) {
  const { progress } = job;
  const judged = progress.evaluation;
  return [
    h("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, name),
    job.state,
    number(progress.step),
    `${number(progress.first_loss)} → ${number(progress.final_loss ?? progress.loss)}`,
    judged ? [number(judged.loss), percent(judged.accuracy)].filter(Boolean).join(", ") : "none",
    number(progress.tokens_per_s, 3),
    bytes(progress.peak_device_bytes ?? progress.peak_memory_bytes),
    duration(job.ran_s),
  ];
}

/** Settings that are not the same in all runs. A setting that a job does not name has its default. */
function differences(jobs, names) {
  const all = jobs.map((job) => ({
    model: job.model ?? job.artifact,
    data: job.dataset,
    "evaluated on": job.eval_dataset,
    ...flatten(job.config),
  }));
  const keys = [...new Set(all.flatMap((values) => Object.keys(values)))].sort();
  const text = (values, key) => (values[key] === undefined ? "default" : setting(values[key]));
  const differing = keys.filter((key) => new Set(all.map((values) => text(values, key))).size > 1);
  if (!differing.length) return h("p", {}, jobs.length > 1 ? "All settings are the same." : "");
  return table(
    "Settings that differ",
    ["Setting", ...names],
    differing.map((key) => [key, ...all.map((values) => text(values, key))]),
  );
}
