/** The folded parts of a job's page: when it may run, and what its workers printed. */

import { ask, ENDED, every, get } from "./api.js";
import { h, labelled, setText } from "./dom.js";
import { attempt } from "./errors.js";
import { jobName } from "./format.js";

const LOG_S = 3;
const LOG_BYTES = 65536;
const NEAR_END = 40;

/** Priority and window of a job that has not ended. */
export function queuePanel(job, place, changed) {
  const priority = h("input", { type: "number", min: -1000, max: 1000, step: 1, value: job.priority });
  const [start, end] = windowFields(job.window);
  const button = h("button", {}, "Keep");
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
            });
            await changed();
          },
          `${jobName(job)}: kept`,
        );
      },
    },
    h(
      "div",
      { class: "fields" },
      labelled("Priority", priority, "Higher runs first."),
      labelled("Runs from", start, "Empty: always."),
      labelled("until", end, "Then it is stopped with its state saved, and goes on the next time."),
    ),
    h("div", { class: "buttons" }, button),
  );
  const element = h("details", { class: "panel" }, h("summary", {}, "Priority and nightly window"), form);
  return {
    element,
    update: (next) => {
      element.hidden = ENDED.includes(next.state);
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

/** The end of the log, read again while the panel is open and the job goes on. */
export function logPanel(path, goesOn, signal) {
  const text = h("pre", { tabindex: 0, role: "region", "aria-label": "Log", class: "log", dir: "ltr" });
  const element = h("details", { class: "panel" }, h("summary", {}, "Log"), text);
  let seen = false;
  const load = async () => {
    if (!element.open || (seen && !goesOn())) return;
    const near = text.scrollHeight - text.scrollTop - text.clientHeight < NEAR_END;
    setText(text, (await get(`${path}/log?bytes=${LOG_BYTES}`, signal)) || "Nothing was printed yet.");
    if (near || !seen) text.scrollTop = text.scrollHeight;
    seen = true;
  };
  element.addEventListener("toggle", () => load().catch(() => {}));
  every(LOG_S, load, signal);
  return { element };
}
