/** The plan of a job that is not there yet: memory by part, and whether it fits. */

import { coded, h, table } from "./dom.js";
import { inWords } from "./errors.js";
import { bytes, duration } from "./format.js";

/** A verdict and the table. `found` is the answer of a dry run. */
export function planParts({ plan, config }) {
  const parts = Object.entries(plan.parts_bytes).map(([part, size]) => [part, bytes(size), plan.meaning[part] ?? ""]);
  const host = Object.entries(plan.host_parts_bytes ?? {}).map(([part, size]) => [
    `${part} (host)`,
    bytes(size),
    plan.meaning[part] ?? "",
  ]);
  const seconds = plan.step_s_estimate;
  const steps = config.train.steps;
  const sums = [
    [h("strong", {}, "Total"), h("strong", {}, bytes(plan.total_bytes)), "at the peak"],
    ["Available", bytes(plan.usable_bytes), plan.device.rule ?? plan.device.description],
  ];
  const verdict = plan.fits
    ? `Fits: ${bytes(plan.margin_bytes)} stay free.`
    : `Does not fit: ${bytes(-plan.margin_bytes)} missing.`;
  return [
    h("p", { class: plan.fits ? "verdict good" : "verdict bad" }, verdict),
    h(
      "p",
      {},
      `On ${plan.device.description ?? plan.device.name}. `,
      seconds
        ? `A step takes about ${duration(seconds)}, all ${steps.toLocaleString()} about ${duration(seconds * steps)} (${plan.step_basis}), plus the start.`
        : "",
    ),
    table("Memory of the run by part", ["Part", "Memory", "Meaning"], [...parts, ...host, ...sums]),
    ...plan.notes.map((note) => h("p", { class: "notice", dir: "auto" }, coded(inWords(note)))),
  ];
}
