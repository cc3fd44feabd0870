/** The plan of a job that is not there yet: memory by part, and whether it fits. */

import { coded, h, table } from "./dom.js";
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
    [h("strong", {}, "All of it"), h("strong", {}, bytes(plan.total_bytes)), "at the highest moment"],
    ["There is", bytes(plan.usable_bytes), plan.device.rule ?? plan.device.description],
  ];
  const verdict = plan.fits
    ? `It fits: ${bytes(plan.margin_bytes)} stay free.`
    : `It does not fit: ${bytes(-plan.margin_bytes)} are missing.`;
  return [
    h("p", { class: plan.fits ? "verdict good" : "verdict bad" }, verdict),
    h(
      "p",
      {},
      `On ${plan.device.description ?? plan.device.name}. `,
      seconds
        ? `A step takes some ${duration(seconds)}, all ${steps.toLocaleString()} some ${duration(seconds * steps)} (${plan.step_basis}); the program's start comes on top.`
        : "",
    ),
    table("Memory of the run by part", ["Part", "Memory", "What it is"], [...parts, ...host, ...sums]),
    ...plan.notes.map((note) => h("p", { class: "notice", dir: "auto" }, coded(note))),
  ];
}
