/** The folded parts of a job's page: when it may run, and its log. */

import { ask, every, get } from "./api.js";
import { h, labelled, setText } from "./dom.js";
import { attempt } from "./errors.js";
import { jobName } from "./format.js";

const GIB = 1024 ** 3;
const LOG_S = 3;
const LOG_BYTES = 65536;
const NEAR_END = 40;
const OVER = ["done", "cancelled"];

/** Priority, window and limits of a job that may still run: a failed one too, which is resumed with others. */
export function queuePanel(job, place, changed) {
  const priority = h("input", { type: "number", min: -1000, max: 1000, step: 1, value: job.priority });
  const [start, end] = windowFields(job.window);
  const limits = limitFields(job.limits);
  const button = h("button", {}, "Save");
  const form = h(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        attempt(
          button,
          place,
          async () => {
            await ask("PATCH", `/v1/jobs/${job.id}`, {
              priority: Number(priority.value),
              window: windowOf(start, end),
              limits: limits.values(),
            });
            await changed();
          },
          `${jobName(job)}: saved`,
        );
      },
    },
    h(
      "div",
      { class: "fields" },
      labelled("Priority", priority, "Higher runs first."),
      labelled("Runs from", start, "Empty: any time."),
      labelled("until", end, "Then it is saved and stopped, and goes on in the next window."),
      limits.elements,
    ),
    h("div", { class: "buttons" }, button),
  );
  const element = h("details", { class: "panel" }, h("summary", {}, "Priority, nightly window, limits"), form);
  return {
    element,
    update: (next) => {
      element.hidden = OVER.includes(next.state);
    },
  };
}

/** Two time fields. */
export function windowFields(window) {
  return [window?.start, window?.end].map((value) => h("input", { type: "time", value: value ?? "" }));
}

/** What they say; null for always. One empty field is for the API to refuse. */
export function windowOf(start, end) {
  return start.value || end.value ? { start: start.value, end: end.value } : null;
}

/** Memory, time and retries: the fields, and what they say. */
export function limitFields({ memory_bytes: bytes = null, time_s: time = null, retries: tries = 3 } = {}) {
  const field = (props) =>
    h("input", { type: "number", step: "any", placeholder: "none", inputmode: "decimal", ...props });
  const memory = field({ min: 0, value: bytes ? bytes / GIB : "" });
  const hours = field({ min: 0, value: time ? time / 3600 : "" });
  const retries = h("input", { type: "number", min: 0, max: 1000000, step: 1, value: tries, required: true });
  return {
    elements: [
      labelled("Memory limit, GiB", memory, "A job that exceeds it fails."),
      labelled("Time limit, hours", hours, "In total; then its state is saved. Raise it and resume to go on."),
      labelled("Tries after a crash", retries, "In a row, without a new checkpoint between them."),
    ],
    values: () => ({
      retries: Number(retries.value),
      ...(memory.value ? { memory_bytes: Math.round(Number(memory.value) * GIB) } : {}),
      ...(hours.value ? { time_s: Number(hours.value) * 3600 } : {}),
    }),
  };
}

/** The end of the log, read again while the panel is open and the job goes on. */
export function logPanel(path, goesOn, signal) {
  const text = h("pre", { tabindex: 0, role: "region", "aria-label": "Log", class: "log", dir: "ltr" });
  const element = h("details", { class: "panel" }, h("summary", {}, "Log"), text);
  let seen = false;
  const load = async () => {
    if (!element.open || (seen && !goesOn())) return;
    const near = text.scrollHeight - text.scrollTop - text.clientHeight < NEAR_END;
    setText(text, (await get(`${path}/log?bytes=${LOG_BYTES}`, signal)) || "No output yet.");
    if (near || !seen) text.scrollTop = text.scrollHeight;
    seen = true;
  };
  element.addEventListener("toggle", () => load().catch(() => {}));
  every(LOG_S, load, signal);
  return { element };
}
